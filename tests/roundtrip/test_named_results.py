"""Results and inputs that are tuples with names: what unpacks in the model unpacks to the same values."""

import collections
import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils import _pytree as pytree

import stagepack
from stagepack.errors import InputError, UnsupportedError
from tests.laws.function_model import Calls

X = torch.arange(12.0).reshape(3, 4) / 7 - 0.5
SQUARE = X[:, :3] @ X[:, :3].T + torch.eye(3)

# Every operator of torch with a result of torch.return_types that torch.export captures.
OF_TORCH: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "aminmax": lambda x, a: torch.aminmax(x),
    "cummax": lambda x, a: torch.cummax(x, 0),
    "cummin": lambda x, a: torch.cummin(x, 1),
    "frexp": lambda x, a: torch.frexp(x),
    "geqrf": lambda x, a: torch.geqrf(x),
    "histogram": lambda x, a: torch.histogram(x, 4),
    "kthvalue": lambda x, a: torch.kthvalue(x, 2),
    "linalg_cholesky_ex": lambda x, a: torch.linalg.cholesky_ex(a @ a.T + torch.eye(3)),
    "linalg_eig": lambda x, a: torch.linalg.eig(a),
    "linalg_eigh": lambda x, a: torch.linalg.eigh(a + a.T),
    "linalg_inv_ex": lambda x, a: torch.linalg.inv_ex(a),
    "linalg_ldl_factor": lambda x, a: torch.linalg.ldl_factor(a + a.T),
    "linalg_lu": lambda x, a: torch.linalg.lu(a),
    "linalg_lu_factor": lambda x, a: torch.linalg.lu_factor(a),
    "linalg_qr": lambda x, a: torch.linalg.qr(a),
    "linalg_slogdet": lambda x, a: torch.linalg.slogdet(a),
    "linalg_solve_ex": lambda x, a: torch.linalg.solve_ex(a, a),
    "linalg_svd": lambda x, a: torch.linalg.svd(a),
    "max": lambda x, a: torch.max(x, 0),
    "max keepdim": lambda x, a: x.max(1, keepdim=True),
    "median": lambda x, a: torch.median(x, 0),
    "min": lambda x, a: torch.min(x, 0),
    "mode": lambda x, a: torch.mode(x, 0),
    "nanmedian": lambda x, a: torch.nanmedian(x, 0),
    "qr": lambda x, a: torch.qr(a),
    "slogdet": lambda x, a: torch.slogdet(a),
    "sort": lambda x, a: torch.sort(x, dim=0, descending=True),
    "svd": lambda x, a: torch.svd(a),
    "topk": lambda x, a: torch.topk(x, 2),
    "triangular_solve": lambda x, a: torch.triangular_solve(a, a),
}


class Point(NamedTuple):
    row: torch.Tensor
    column: torch.Tensor
    scale: float = 0.5


Counted = collections.namedtuple("Counted", ("count", "index"))  # noqa: PYI024 - the names of methods of every tuple
Renamed = collections.namedtuple("Renamed", ("row", "class", "row"), rename=True)  # noqa: PYI024
Empty = collections.namedtuple("Empty", ())  # noqa: PYI024


class Shuffled(NamedTuple):
    scale: float
    column: torch.Tensor
    row: torch.Tensor


class Nested(NamedTuple):
    point: Point
    rest: dict[str, Any]


@dataclasses.dataclass
class Record:
    row: torch.Tensor
    column: torch.Tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Pair:
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Unregistered:
    values: torch.Tensor
    rest: Any
    label: str = "none"
    missing: torch.Tensor | None = None
    items: torch.Tensor | None = None


class Plain(tuple[torch.Tensor, ...]):
    """A tuple without names, which torch does not know unless it is registered."""

    __slots__ = ()


torch.export.register_dataclass(Record, serialized_type_name="tests.Record")
pytree.register_pytree_node(
    Plain, lambda plain: (list(plain), None), lambda items, _: Plain(items), serialized_type_name="tests.Plain"
)


def exported(function: Callable[..., Any], args: tuple[Any, ...], folder: Path) -> stagepack.Bundle:
    bundle = stagepack.export(Calls(function), args, out=folder / "b.stagepack")
    bundle.verify()
    return bundle


def assert_alike(found: Any, expected: Any) -> None:
    """Check that two results have equal tensors, unpack to the same and have the same names."""
    if isinstance(expected, torch.Tensor):
        assert torch.equal(found, expected)
    elif isinstance(expected, dict):
        assert type(found) is type(expected)
        assert list(found) == list(expected)
        for key in expected:
            assert_alike(found[key], expected[key])
    elif isinstance(expected, tuple | list | collections.deque):
        assert isinstance(found, tuple) == isinstance(expected, tuple)
        assert len(found) == len(expected)
        names = getattr(type(expected), "__match_args__", ())
        assert (getattr(type(found), "__match_args__", ())) == names
        for index, (item, expected_item) in enumerate(zip(found, expected, strict=True)):
            assert_alike(item, expected_item)
            if names:
                assert getattr(found, names[index]) is item
    else:
        assert found == expected


@pytest.mark.filterwarnings("ignore:torch.*is deprecated")
def test_results_of_torch_unpack_and_have_their_names(tmp_path: Path) -> None:
    def results(x: torch.Tensor, a: torch.Tensor) -> dict[str, Any]:
        return {name: function(x, a) for name, function in OF_TORCH.items()}

    bundle = exported(results, (X, SQUARE), tmp_path)
    expected = results(X, SQUARE)
    pipe = stagepack.load(bundle)
    found = pipe(X, SQUARE)
    assert_alike(found, expected)
    values, indices = found["max"]
    assert torch.equal(values, X.max(0).values)
    assert torch.equal(indices, X.max(0).indices)
    assert type(found["max"]) is type(pipe(X, SQUARE)["max keepdim"])
    classes = {type(result) for result in expected.values()} - {tuple}
    typed = stagepack.load(bundle, types=classes)(X, SQUARE)
    assert_alike(typed, expected)
    assert {name: type(result) for name, result in typed.items()} == {name: type(e) for name, e in expected.items()}


def named_tuples(x: torch.Tensor) -> list[Any]:
    inner = Point(x, x + 1)
    return [
        inner,
        Counted(x, x * 2),
        Renamed(x, x + 1, x + 2),
        Nested(inner, {"deque": collections.deque([inner], maxlen=2), "list": [Empty()]}),
        collections.OrderedDict(b=x, a=Point(x, x, 1.0)),
        collections.defaultdict(list, {0: inner}),
        (x, (x, [Plain([x, x + 1])])),
    ]


def test_named_tuples_unpack_and_have_their_names(tmp_path: Path) -> None:
    bundle = exported(named_tuples, (X,), tmp_path)
    *expected, unnamed = named_tuples(X)
    *found, found_unnamed = stagepack.load(bundle)(X)
    assert_alike(found, expected)
    _, second = found_unnamed[1][1][0]  # its items have no names of their own
    assert torch.equal(second, X + 1)
    assert found[0]._asdict().keys() == {"row", "column", "scale"}
    typed = stagepack.load(bundle, types=[Point, Counted, Renamed, Nested, Empty, Plain])(X)
    assert_alike(typed, [*expected, unnamed])
    assert type(typed[3].point) is Point
    assert type(typed[-1][1][1][0]) is Plain
    # Its parts cut again say the same.
    recut = stagepack.recut(bundle, out=tmp_path / "recut.stagepack", stages=1)
    assert_alike(stagepack.load(recut)(X)[:-1], expected)


def test_objects_that_do_not_unpack_are_dicts(tmp_path: Path) -> None:
    bundle = exported(lambda x: [Record(x, x + 1), {"row": x}], (X,), tmp_path)
    record, plain = stagepack.load(bundle)(X)
    assert record.keys() == {"row", "column"}
    assert plain.keys() == {"row"}
    assert type(stagepack.load(bundle, types=[Record])(X)[0]) is Record
    assert "features" not in json.loads((bundle.path / "manifest.json").read_text())


def test_unregistered_dataclasses_give_their_fields(tmp_path: Path) -> None:
    def results(x: torch.Tensor) -> Any:
        inner = Unregistered(x, {"more": [Pair(x + 1, x)]})
        return Unregistered(x * 2, inner, "text", items=x * 3)

    bundle = exported(results, (X,), tmp_path)
    expected = results(X)
    found = stagepack.load(bundle)(X)
    assert list(found) == ["values", "rest", "label", "missing", "items"]
    # Attributes are the fields, even those that are methods of a dict; `found[0]` is the first that is not None.
    for answer in (found, copy.deepcopy(found)):
        assert torch.equal(answer.values, expected.values)
        assert torch.equal(answer["items"], answer.items)
        assert torch.equal(answer.rest.rest["more"][0].left, X + 1)
        assert (answer.label, answer.missing, answer["missing"]) == ("text", None, None)
        assert torch.equal(answer[0], expected.values)
        assert torch.equal(answer[-1], expected.items)
    with pytest.raises(
        AttributeError, match="expected one of the fields values, rest, label, missing, items, found logits"
    ):
        _ = found.logits
    with pytest.raises(KeyError):
        _ = found["logits"]
    doubled = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor * 2, found)
    assert torch.equal(doubled.rest["values"], X * 2)
    assert doubled.label == "text"
    typed = stagepack.load(bundle, types=[Unregistered, Pair])(X)
    assert (type(typed), type(typed.rest.rest["more"][0])) == (Unregistered, Pair)
    # The user's own registration is left to the user.
    torch.export.register_dataclass(Unregistered, serialized_type_name="tests.Unregistered")


def test_sizes_of_a_result_in_a_dataclass_are_dynamic(tmp_path: Path) -> None:
    bundle = stagepack.export(
        Calls(lambda x: Pair(x * 2, x.sum(0))),
        (X,),
        dynamic_shapes={"inputs": ({0: torch.export.Dim.AUTO},)},
        out=tmp_path / "b.stagepack",
    )
    pipe = stagepack.load(bundle)
    for rows in (0, 1, 7):
        assert torch.equal(pipe(torch.ones(rows, 4)).right, torch.full((4,), float(rows)))


def test_model_outputs_give_their_fields(tmp_path: Path) -> None:
    outputs = pytest.importorskip("transformers.utils", reason="transformers is not installed").ModelOutput

    @dataclasses.dataclass
    class Late(outputs):  # type: ignore[valid-type, misc]
        loss: torch.Tensor | None = None
        logits: torch.Tensor | None = None

    found = stagepack.load(exported(lambda x: Late(logits=x + 1), (X,), tmp_path))(X)
    assert list(found) == ["logits"]
    assert torch.equal(found.logits, X + 1)
    assert torch.equal(found[0], X + 1)


@pytest.mark.slow
@pytest.mark.process
def test_a_class_that_the_model_imports_while_it_is_traced_gives_its_fields(tmp_path: Path) -> None:
    """Which torch knows nothing of."""
    pytest.importorskip("transformers", reason="transformers is not installed")
    script = (
        "import stagepack, sys, torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        from transformers.modeling_outputs import BaseModelOutput\n"
        "        return BaseModelOutput(last_hidden_state=x + 1)\n"
        "found = stagepack.load(stagepack.export(Model(), (torch.zeros(2),), out=sys.argv[1]))(torch.ones(2))\n"
        "print(list(found), found.last_hidden_state.tolist())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "late.stagepack")]
    assert subprocess.check_output(command, text=True) == "['last_hidden_state'] [2.0, 2.0]\n"


def test_named_tuples_are_inputs(tmp_path: Path) -> None:
    def subtracted(point: Any, largest: Any, counted: Any) -> torch.Tensor:
        row, column, scale = point
        return (row - column) * scale + largest.values.sum() + counted.index

    args = (Point(X, X + 1), torch.max(X, 0), Counted(X, X * 2))
    bundle = exported(subtracted, args, tmp_path)
    pipe = stagepack.load(bundle)
    expected = subtracted(*args)
    other_order = Shuffled(0.5, X + 1, X)
    for point in (args[0], tuple(args[0]), list(args[0]), other_order, args[0]._asdict()):
        for counted in (args[2], tuple(args[2]), args[2]._asdict()):
            assert torch.equal(pipe(point, args[1], counted), expected)
    assert torch.equal(pipe(args[0], tuple(args[1]), args[2]), expected)
    wrong: Any
    for wrong, message in (
        ((X, X), "expected 3 items, found 2"),
        (X, "expected .*Point or a dict"),
        ({"row": X}, "keys"),
    ):
        with pytest.raises(InputError, match=message):
            pipe(wrong, *args[1:])
    with pytest.raises(InputError, match=r"scale.* was fixed to 0.5"):
        pipe(Point(X, X + 1, -0.5), *args[1:])


def test_a_reader_that_does_not_know_named_tuples_refuses_them(tmp_path: Path) -> None:
    bundle = exported(lambda x: Point(x, x), (X,), tmp_path)
    assert json.loads((bundle.path / "manifest.json").read_text())["features"] == ["named_tuples"]


def test_a_type_that_does_not_take_the_items_is_said(tmp_path: Path) -> None:
    bundle = exported(lambda x: Point(x, x), (X,), tmp_path)
    other = type("Point", (tuple,), {"__module__": Point.__module__, "_fields": ("row",)})
    with pytest.raises(InputError, match="cannot be built from the fields"):
        stagepack.load(bundle, types=[other])(X)


def test_what_torch_cannot_take_apart_is_refused(tmp_path: Path) -> None:
    class Unknown(tuple[torch.Tensor, ...]):
        __slots__ = ()

    with pytest.raises((UnsupportedError, stagepack.errors.CaptureError)):
        exported(lambda x: Unknown([x, x]), (X,), tmp_path)
