"""The check of values makes no tensor for each row, step or unit that a graph states."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from stagepack.errors import FormatError
from stagepack.format.graph import Argument, Graph, ListArg, Node, Op, Scope, Value, ValueArg
from stagepack.torch_internals import operator_schema
from stagepack_loaders.torch.meta_work import MOST_TENSORS, meta_work
from stagepack_loaders.torch.value_check import check_graph_values
from tools.operators.valid_calls import find_operator

HUGE = 2**40
X = ValueArg("x")


def check_call(name: str, shape: tuple[int, ...], *args: Argument, outputs: int = 1) -> int:
    """Check a graph with one call of an operator on values `x` of a shape; return how often the operator was called."""
    overload = find_operator(name)
    schema = operator_schema(overload)
    calls = 0

    @functools.wraps(overload)
    def counted(*call_args: Any, **call_kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        return overload(*call_args, **call_kwargs)

    op = Op(name=name, schema=str(schema), parameters=tuple(argument.name for argument in schema.arguments))
    results = tuple(Value(name=f"y{index}", dtype="float32", shape=shape[1:]) for index in range(outputs))
    graph = Graph(
        inputs=(Value(name="x", dtype="float32", shape=shape),),
        nodes=(Node(op=0, args=args, outputs=results, unpack=True),),
        outputs=("x",),
        ops=(op,),
        scopes=(Scope(path=""),),
    )
    check_graph_values(graph, [counted], "g.msgpack")
    return calls


@pytest.mark.parametrize(
    ("name", "shape", "args", "says"),
    [
        ("aten.unbind.int", (HUGE, 2), (X,), f"returns {HUGE}"),
        ("aten.unbind.int", (2, HUGE), (X, -1), f"returns {HUGE}"),
        ("aten.unbind_copy.int", (HUGE,), (X,), f"returns {HUGE}"),
        ("aten.split.Tensor", (HUGE,), (X, 3), f"returns {-(-HUGE // 3)}"),
        ("aten.split_copy.Tensor", (HUGE,), (X, 1), f"returns {HUGE}"),
        ("aten.unsafe_split.Tensor", (HUGE,), (X, 1), f"returns {HUGE}"),
        ("aten.chunk.default", (HUGE,), (X, 2**30), f"returns {2**30}"),
        ("aten.chunk.default", (0, 2), (X, HUGE), f"returns {HUGE}"),
        ("aten.unsafe_chunk.default", (0,), (X, HUGE), f"returns {HUGE}"),
        ("aten.tensor_split.sections", (2,), (X, HUGE), f"returns {HUGE}"),
        ("aten.hsplit.int", (HUGE,), (X, HUGE), f"returns {HUGE}"),
        ("aten.vsplit.int", (HUGE, 2), (X, HUGE), f"returns {HUGE}"),
        ("aten.dsplit.int", (2, 2, HUGE), (X, HUGE), f"returns {HUGE}"),
        ("aten.combinations.default", (3,), (X, HUGE), f"takes {HUGE} tensors: expected at most 64"),
        ("aten.meshgrid.default", (1,), (ListArg((X,) * 65),), "takes 65 tensors: expected at most 64"),
        ("aten.cartesian_prod.default", (1,), (ListArg((X,) * 65),), "takes 65 tensors: expected at most 64"),
        ("aten.linalg_multi_dot.default", (2, 2), (ListArg((X,) * 257),), "takes 257 tensors: expected at most 256"),
        ("aten.chain_matmul.default", (2, 2), (ListArg((X,) * 257),), "takes 257 tensors: expected at most 256"),
    ],
)
def test_a_call_that_makes_a_tensor_for_each_row_is_refused_before_it_runs(
    name: str, shape: tuple[int, ...], args: tuple[Argument, ...], says: str
) -> None:
    with pytest.raises(FormatError, match=says) as caught:
        check_call(name, shape, *args)
    assert {problem.rule for problem in caught.value.problems} == {"G16"}


def test_a_node_may_state_as_many_values_as_its_file_holds() -> None:
    count = 3 * MOST_TENSORS
    assert check_call("aten.unbind.int", (count, 2), X, outputs=count) == 1
    with pytest.raises(FormatError, match=f"it states {count - 1} values, the operator returns {count}"):
        check_call("aten.unbind.int", (count, 2), X, outputs=count - 1)
    assert check_call("aten.unbind.int", (MOST_TENSORS, 2), X) == 1


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("aten.unbind.int", ((5, 3),)),
        ("aten.unbind_copy.int", ((5, 3), -1)),
        *(
            (f"aten.{name}.Tensor", ((7, 3), size))
            for name in ("split", "split_copy", "unsafe_split")
            for size in (2, 9)
        ),
        *((f"aten.{name}.default", ((7,), count)) for name in ("chunk", "unsafe_chunk") for count in (2, 4, 9)),
        ("aten.chunk.default", ((0,), 3)),
        ("aten.tensor_split.sections", ((7,), 9)),
        ("aten.hsplit.int", ((6,), 3)),
        ("aten.vsplit.int", ((6, 2), 3)),
        ("aten.dsplit.int", ((2, 2, 6), 3)),
    ],
)
def test_the_count_is_that_of_torch_or_more(
    name: str, arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    overload = find_operator(name)
    args = (torch.empty(arguments[0], device="meta"), *arguments[1:])
    result_count = len(overload(*args))
    monkeypatch.setattr("stagepack_loaders.torch.meta_work.MOST_TENSORS", 0)
    assert not meta_work(overload, args, {}, arguments[1] if "chunk" in name else result_count).is_excessive
    assert meta_work(overload, args, {}, result_count - 1).is_excessive


def recurrent_call(name: str, step_count: int) -> tuple[Any, ...]:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    gates = {"gru": 3, "lstm": 4}.get(name, 1)
    params = [tensor(gates * 4, 5), tensor(gates * 4, 4)]
    state = tensor(1, 2, 4)
    return (
        tensor(2, step_count, 5),
        [state, state] if name == "lstm" else state,
        params,
        *(False, 1, 0.0, False, False, True),
    )


@pytest.mark.parametrize("name", ["gru", "lstm", "rnn_relu", "rnn_tanh"])
def test_long_sequences_are_not_run_and_not_refused(name: str) -> None:
    overload = find_operator(f"aten.{name}.input")
    assert not meta_work(overload, recurrent_call(name, MOST_TENSORS), {}, 2).is_excessive
    assert meta_work(overload, recurrent_call(name, HUGE), {}, 2) == (True, "")


@pytest.mark.parametrize("outputs", [3, HUGE])
def test_a_layer_of_many_units_is_not_run_and_not_refused(outputs: int) -> None:
    def tensor(*shape: int) -> torch.Tensor:
        return torch.empty(shape, device="meta")

    is_large = outputs > MOST_TENSORS
    bilinear = (tensor(2, 4), tensor(2, 5), tensor(outputs, 4, 5))
    assert meta_work(find_operator("aten.bilinear.default"), bilinear, {}, 1) == (is_large, "")
    trilinear = (tensor(HUGE, 4), tensor(outputs, 4, 5), tensor(HUGE, 5), [1, 3], [0], [1, 2], [2, 3])
    assert meta_work(find_operator("aten._trilinear.default"), trilinear, {}, 1) == (is_large, "")


@pytest.mark.parametrize(
    "call", [lambda: ("aten.split.Tensor", (2,), X, "text"), lambda: ("aten.unbind.int", (2,), X, 7)]
)
def test_arguments_that_the_operator_refuses_are_left_to_it(call: Callable[[], tuple[Any, ...]]) -> None:
    with pytest.raises(FormatError, match=r"the operator refuses its arguments|takes"):
        check_call(*call())
