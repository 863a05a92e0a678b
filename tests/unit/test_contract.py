"""The boundary contract: a call binds as Python would bind it, and what does not fit is named with what is allowed."""

import inspect
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, bind_call, check_values
from stagepack.format.graph import Value
from stagepack.format.shapes import Dim, Expr, Guard, Symbol, evaluate_dim
from stagepack.format.tree import ConstantLeaf, DictTree, NonFiniteLeaf, Parameter, SequenceTree, Signature, ValueLeaf

DEFAULT = 7
NAMES = ["a", "b", "c", "d", "e"]


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Signature, inspect.Signature]:
    """A signature of ours and Python's own of the same kind: positional only, both, by name only; constants have defaults."""
    names = draw(st.lists(st.sampled_from(NAMES), unique=True, max_size=5))
    both = draw(st.integers(0, len(names)))
    last = draw(st.integers(both, len(names)))
    required = draw(st.integers(0, last))
    ours, theirs = [], []
    for number, name in enumerate(names):
        positional, keyword = number < last, number >= both
        fixed = draw(st.booleans()) if not positional else number >= required
        tree = ConstantLeaf(DEFAULT) if fixed else ValueLeaf(f"v_{name}")
        ours.append(Parameter(name=name, tree=tree, positional=positional, keyword=keyword))
        kinds = inspect.Parameter
        kind = (
            kinds.KEYWORD_ONLY if not positional else kinds.POSITIONAL_OR_KEYWORD if keyword else kinds.POSITIONAL_ONLY
        )
        theirs.append(kinds(name, kind, default=DEFAULT if fixed else kinds.empty))
    return Signature(parameters=tuple(ours), result=ConstantLeaf(None)), inspect.Signature(theirs)


@settings(derandomize=True, deadline=None, max_examples=300)
@given(signatures(), st.integers(0, 6), st.sets(st.sampled_from([*NAMES, "z"]), max_size=4))
def test_a_call_binds_where_and_as_python_binds_it(
    both: tuple[Signature, inspect.Signature], count: int, names: set[str]
) -> None:
    ours, theirs = both
    args = tuple(DEFAULT for _ in range(count))
    kwargs = dict.fromkeys(sorted(names), DEFAULT)
    try:
        expected = theirs.bind(*args, **kwargs).arguments
    except TypeError:
        with pytest.raises(InputError, match="argument"):
            bind_call(ours, args, kwargs)
    else:
        found = bind_call(ours, args, kwargs)
        values = [parameter.name for parameter in ours.parameters if isinstance(parameter.tree, ValueLeaf)]
        assert found == {f"v_{name}": BoundArgument(name, expected[name]) for name in values}


def signature(**trees: Any) -> Signature:
    parameters = tuple(Parameter(name=name, tree=tree, positional=True) for name, tree in trees.items())
    return Signature(parameters=parameters, result=ConstantLeaf(None))


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        ((), {}, r"^the argument 'ids' is missing$"),
        ((1, 2, 3), {}, r"^expected at most 2 positional arguments, found 3$"),
        ((1,), {"ids": 2}, r"^the argument 'ids' is given by position and by name$"),
        ((1,), {"mask": 2}, r"^there is no argument 'mask': the model was exported with ids, scale$"),
    ],
)
def test_a_call_that_does_not_fit_names_the_argument(args: tuple[Any, ...], kwargs: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        bind_call(signature(ids=ValueLeaf("ids"), scale=ConstantLeaf(2)), args, kwargs)


@pytest.mark.parametrize(
    ("fixed", "given", "says"),
    [
        (False, True, "^flag was fixed to False at export, found True: export again with an example that has this fla"),
        (False, 0, "found 0"),
        (1, True, "fixed to 1 at export, found True"),
        (1, 1.0, r"found 1\.0"),
        (2.5, 2, "found 2:"),
        ("a", "b", "fixed to 'a' at export, found 'b'"),
        (None, 3, "fixed to None at export, found 3"),
        (None, [1], "found list"),
        (None, np.zeros(2), "found ndarray"),
        (2, np.array(2), "found ndarray"),
        (math.inf, -math.inf, "fixed to inf at export, found -inf"),
        (math.nan, 0.0, "fixed to nan at export, found 0.0"),
        (math.nan, -math.nan, "fixed to nan at export, found nan"),
        (0.0, -0.0, "fixed to 0.0 at export, found -0.0"),
        (-0.0, 0.0, "fixed to -0.0 at export, found 0.0"),
    ],
)
def test_a_constant_must_be_the_one_of_the_export(fixed: Any, given: Any, says: str) -> None:
    special = isinstance(fixed, float) and not math.isfinite(fixed)
    tree = NonFiniteLeaf(str(fixed)) if special else ConstantLeaf(fixed)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=says):
        bind_call(signature(flag=tree), (given,), {})
    assert bind_call(signature(flag=tree), (fixed,), {}) == {}
    assert bind_call(signature(flag=tree), (), {}) == {}


def test_places_inside_containers_are_named() -> None:
    tree = DictTree(kind="dict", items=(("x", SequenceTree(kind="list", items=(ValueLeaf("v"), ConstantLeaf(1)))),))
    assert bind_call(signature(batch=tree), ({"x": [5, 1]},), {}) == {"v": BoundArgument("batch['x'][0]", 5)}
    with pytest.raises(InputError, match=r"^batch\['x'\]\[1\] was fixed to 1 at export, found 2"):
        bind_call(signature(batch=tree), ({"x": [5, 2]},), {})


N, M = "n", "m"
SYMBOLS = (Symbol(name=N, min=1, max=8), Symbol(name=M, min=2, max=9))
VALUES = (
    Value(name="late", dtype="float32", shape=(Expr(op="add", args=(M, Expr(op="mul", args=(2, N)))),)),
    Value(name="double", dtype="int64", shape=(Expr(op="mul", args=(2, N)), 3)),
    Value(name="plain", dtype="float32", shape=(4, M)),
    Value(name="sum", dtype="bool", shape=(Expr(op="add", args=(N, M)),)),
    Value(name="size", dtype="symint", expr=Expr(op="floordiv", args=(M, 2))),
)


def arrays(sizes: dict[str, int]) -> dict[str, BoundArgument]:
    def size(dim: Dim) -> int:
        return evaluate_dim(dim, sizes)

    made: dict[str, Any] = {
        value.name: np.empty([size(dim) for dim in value.shape], value.dtype) for value in VALUES if value.shape
    }
    made["size"] = size(VALUES[-1].expr or 0)
    return {name: BoundArgument(f"where_{name}", value) for name, value in made.items()}


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(1, 8), st.integers(2, 9))
def test_sizes_that_fit_are_found_whatever_tells_them(n: int, m: int) -> None:
    assert check_values(VALUES, arrays({N: n, M: m}), SYMBOLS) == {N: n, M: m}
    assert check_values(VALUES[::-1], arrays({N: n, M: m}), SYMBOLS) == {N: n, M: m}


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.integers(1, 8), st.integers(2, 9), st.data())
def test_one_size_that_is_off_is_named_with_its_dimension_and_what_is_allowed(
    n: int, m: int, data: st.DataObject
) -> None:
    given = arrays({N: n, M: m})
    name = data.draw(st.sampled_from(["late", "double", "plain", "sum"]))
    shape = list(given[name].value.shape)
    place = data.draw(st.integers(0, len(shape) - 1))
    shape[place] += data.draw(st.integers(-3, 5).filter(bool))
    assume(shape[place] >= 0)
    given[name] = BoundArgument(given[name].location, np.empty(shape, given[name].value.dtype))
    says = r"^where_(late|double|plain|sum|size)(: dimension \d)?: expected .*, found -?\d+$"
    with pytest.raises(InputError, match=says):
        check_values(VALUES, given, SYMBOLS)


@pytest.mark.parametrize(
    ("n", "m", "says"),
    [
        (9, 3, r"^where_late: dimension 0: expected m \+ 2\*n where n is 1 to 8, found 21$"),
        (0, 3, r"^where_late: dimension 0: expected m \+ 2\*n where n is 1 to 8, found 3$"),
        (3, 1, r"^where_plain: dimension 1: expected 2 to 9 \('m'\), found 1$"),
        (3, 10, r"^where_plain: dimension 1: expected 2 to 9 \('m'\), found 10$"),
    ],
)
def test_a_size_out_of_its_range_is_named_with_the_range(n: int, m: int, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_values(VALUES, arrays({N: n, M: m}), SYMBOLS)


ONE = (Value(name="x", dtype="float32", shape=(2, N)),)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (np.zeros((2, 3), "float64"), r"^batch\['x'\]: expected dtype float32, found float64$"),
        (np.zeros(2, "float32"), r"^batch\['x'\]: expected 2 dimensions \[2, n\], found the shape \[2\]$"),
        (np.zeros((3, 3), "float32"), r"^batch\['x'\]: dimension 0: expected 2 \(shape \[2, n\]\), found 3$"),
        (np.zeros((2, 0), "float32"), r"^batch\['x'\]: dimension 1: expected 1 to 8 \('n'\), found 0$"),
        ([[1.0]], r"^batch\['x'\]: expected a tensor of float32 \[2, n\], found list$"),
        (None, "expected a tensor of float32 .*found NoneType"),
        ("x", "found str"),
    ],
)
def test_a_value_that_does_not_fit_is_named_with_what_is_expected(given: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        check_values(ONE, {"x": BoundArgument("batch['x']", given)}, SYMBOLS)


@pytest.mark.parametrize(
    ("dtype", "good", "bad"),
    [("symint", 3, [3.0, True, "3", np.int64(3)]), ("symfloat", 2.5, [2, "2.5"]), ("symbool", True, [1, None])],
)
def test_numbers_are_python_numbers_of_their_kind(dtype: str, good: Any, bad: list[Any]) -> None:
    expected = (Value(name="k", dtype=dtype),)
    assert check_values(expected, {"k": BoundArgument("k", good)}, ()) == {}
    for wrong in bad:
        says = f"^k: expected a Python {type(good).__name__}, found {type(wrong).__name__}$"
        with pytest.raises(InputError, match=says):
            check_values(expected, {"k": BoundArgument("k", wrong)}, ())


def test_equal_sizes_that_differ_name_both_places() -> None:
    two = (Value(name="x", dtype="float32", shape=(N,)), Value(name="y", dtype="float32", shape=(N,)))
    given = {"x": BoundArgument("x", np.zeros(3, "float32")), "y": BoundArgument("y", np.zeros(4, "float32"))}
    with pytest.raises(InputError, match=r"^y: dimension 0: expected 3, the size of 'n' in x: dimension 0, found 4$"):
        check_values(two, given, SYMBOLS)


def test_a_size_told_late_lets_earlier_ones_be_checked() -> None:
    two = (VALUES[3], VALUES[1])  # n + m, and only then 2*n
    given = arrays({N: 4, M: 3})
    assert check_values(two, given, SYMBOLS) == {N: 4, M: 3}
    with pytest.raises(InputError, match=r"^where_sum: dimension 0: expected n \+ m where m is 2 to 9, found 14$"):
        check_values(two, arrays({N: 4, M: 10}), SYMBOLS)


def test_a_size_that_cannot_be_told_is_left_to_the_graph() -> None:
    half = (Value(name="x", dtype="float32", shape=(Expr(op="floordiv", args=(N, 2)),)),)
    assert check_values(half, {"x": BoundArgument("x", np.zeros(100, "float32"))}, SYMBOLS) == {}


def test_guard_without_a_value_refuses_the_call() -> None:
    guard = Guard(left=Expr(op="floordiv", args=(12, Expr(op="add", args=(N, -3)))), relation="le", right=12)
    check_values(ONE, {"x": BoundArgument("x", np.zeros((2, 4), "float32"))}, SYMBOLS, [guard])
    says = r"expected 12//\(n \+ -3\) <= 12, for which the model was captured, found n = 3"
    with pytest.raises(InputError, match=says):
        check_values(ONE, {"x": BoundArgument("x", np.zeros((2, 3), "float32"))}, SYMBOLS, [guard])
