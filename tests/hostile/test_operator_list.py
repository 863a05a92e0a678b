"""The list of judged operators: complete for this torch, and what is in it ends no process, whatever its arguments."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

import stagepack
from stagepack.argument_guards import ARGUMENT_CHECKS, NEED_NO_OVERLAP, guarded_operator
from stagepack.errors import FormatError, OperatorError
from stagepack.format.operator_schema import schema_parameters
from stagepack.format.operators import DENIED, LIST_FILE, REASONS, RUN_BY_DEFAULT, listed_verdicts
from stagepack.torch_internals import operator_schema
from stagepack_loaders.torch.resolved_operators import BOUNDED_OPERATORS
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails, run
from tools.operators.hostile_arguments import Call
from tools.operators.hostile_calls import CALLS, call_hostilely
from tools.operators.judge import problems
from tools.operators.valid_calls import (
    attention_calls,
    find_operator,
    quantized_calls,
    recorded_calls,
    recurrent_calls,
)

RUN = sorted(name for name, verdict in listed_verdicts().items() if verdict in RUN_BY_DEFAULT)
SAMPLE = [
    "aten.add.Tensor", "aten.as_strided.default", "aten.cat.default", "aten.embedding.default", "aten.gather.default",
    "aten.index.Tensor", "aten.index_copy_.default", "aten.native_layer_norm.default",
    "aten.scaled_dot_product_attention.default", "aten.slice.Tensor",
]  # fmt: skip
ROWS = torch.randn(6, 3)
BAGS = [ROWS[:, :1].expand(6, 3), torch.tensor([[2]]).expand(1, 4)[0], torch.tensor([[0]]).expand(1, 2)[0]]
[INT4_CALL] = quantized_calls()["aten._weight_int4pack_mm_for_cpu.default"]
[INT8_CALL] = quantized_calls()["aten._weight_int8pack_mm.default"]
# Arguments by position of operators that take elements to be one after another, among them tensors whose elements overlap.
OVERLAPPING_ARGUMENTS: dict[str, list[Any]] = {
    "aten._embedding_bag.default": BAGS,
    "aten._embedding_bag_forward_only.default": BAGS,
    "aten._int_mm.default": [torch.ones(32, 32).char(), torch.ones(1, 32).char().expand(32, 32)],
    "aten._weight_int4pack_mm_for_cpu.default": [
        *(INT4_CALL[name] for name in ("self", "mat2", "qGroupSize")),
        INT4_CALL["qScaleAndZeros"][:1].expand(2, 32, 2),
    ],
    "aten._weight_int8pack_mm.default": [INT8_CALL["self"], INT8_CALL["mat2"], INT8_CALL["scales"][:1].expand(32)],
    "aten._weight_norm.default": [ROWS[:, :1].expand(6, 3), ROWS[:1, :1].expand(6, 1)],
    "aten._weight_norm_interface.default": [ROWS[:, :1].expand(6, 3), ROWS[:1, :1].expand(6, 1)],
    "aten.embedding_bag.default": BAGS,
    "aten.embedding_bag.padding_idx": [*BAGS, False, 0, False, None, False, None],
    "aten.median.dim": [ROWS.flatten()[:8].as_strided((6, 3), (1, 1)), 0],
    "aten.nanmedian.dim": [ROWS[:1].expand(6, 3), 0],
    "aten.native_group_norm.default": [torch.randn(2, 6, 3), *(ROWS[:, 0][:1].expand(6),) * 2, 2, 6, 3, 2, 1e-5],
}
# Valid calls of operators whose arguments are checked.
GUARDED_CALLS = recurrent_calls() | attention_calls()


def rename_operator(editor: BundleEditor, name: str, schema: str = "") -> None:
    """Call another operator in stage 1 instead of gelu."""

    def rename(fields: dict[str, Any]) -> None:
        gelu = next(op for op in fields["ops"] if op["name"] == "aten.gelu.default")
        gelu.update(name=name, schema=schema or gelu["schema"])
        if schema:
            gelu.update(parameters=list(schema_parameters(schema) or ()))

    editor.edit_graph(1, rename)


def test_the_list_is_sorted_and_has_known_verdicts() -> None:
    lines = [line for line in LIST_FILE.read_text().splitlines() if not line.startswith("#")]
    assert lines == sorted(lines)
    assert len(lines) == len(listed_verdicts())
    assert set(listed_verdicts().values()) == {DENIED, *REASONS, *RUN_BY_DEFAULT}
    assert len(RUN) > 1500


def test_each_operator_of_this_torch_is_judged() -> None:
    assert problems() == []


@pytest.mark.parametrize("packet", [torch.ops.aten.threshold_backward, torch.ops.aten.center])
def test_an_operator_that_does_not_run_by_default_needs_its_name(packet: Any, editor: BundleEditor) -> None:
    name = str(packet.default)
    permission = name.removesuffix(".default")
    rename_operator(editor, name, str(operator_schema(packet.default)))
    for allow_ops in ([], ["aten"], ["aten.add"], [f"{permission}.other"], f"{permission}.default.more"):
        with pytest.raises(
            OperatorError, match=rf"{name} is not .*\[G11\]: if you trust the bundle, pass --allow-ops {permission}"
        ):
            stagepack.load(editor.path, allow_ops=allow_ops)
    for allow_ops in ([permission], [name], permission):
        with pytest.raises(
            (FormatError, OperatorError), match=rf"(?!.*G11){name}"
        ):  # it is called with arguments of another one
            stagepack.load(editor.path, allow_ops=allow_ops)
    command_fails("load", str(editor.path), says=rf"--allow-ops {permission} \(in Python")
    assert f"runs only with --allow-ops {permission}:" in run("inspect", str(editor.path), "--stage", "1").output


@pytest.mark.parametrize("name", ["aten.from_file.default", "aten.set_.a_future_overload", "aten.save.default"])
def test_a_denied_operator_never_runs(name: str, editor: BundleEditor) -> None:
    rename_operator(editor, name)
    with pytest.raises(FormatError, match=rf"{name} is not allowed in a bundle \[G11\]"):
        stagepack.load(editor.path, allow_ops=["aten", name, name.rpartition(".")[0]])
    command_fails("verify", str(editor.path), says="G11")


@pytest.mark.process
@pytest.mark.parametrize("name", SAMPLE)
def test_hostile_arguments_end_no_process(name: str) -> None:
    assert listed_verdicts()[name] in RUN_BY_DEFAULT
    outcome = call_hostilely(name, (), 10)
    assert not outcome.signals
    assert outcome.counts.total() == 10


@pytest.mark.process
@pytest.mark.parametrize("name", sorted(ARGUMENT_CHECKS))
def test_hostile_arguments_of_guarded_operators_end_no_process(name: str) -> None:
    outcome = call_hostilely(name, GUARDED_CALLS.get(name, ()), 20)
    assert not outcome.signals
    assert outcome.counts.total() == 20


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of torch, about arguments
@pytest.mark.parametrize("part", range(20))
def test_hostile_arguments_of_all_listed_operators_end_no_process(
    part: int, valid_calls: dict[str, list[Call]]
) -> None:
    names = RUN[part::20]
    outcomes = {name: call_hostilely(name, valid_calls.get(name, ()), CALLS) for name in names}
    assert {name: outcome.signals for name, outcome in outcomes.items() if outcome.signals} == {}


@pytest.fixture(scope="module")
def valid_calls() -> dict[str, list[Call]]:
    return recorded_calls()


@pytest.mark.parametrize("name", sorted(GUARDED_CALLS))
def test_guards_let_valid_calls_through(name: str) -> None:
    for call in GUARDED_CALLS[name]:
        operator = find_operator(name)
        guarded = guarded_operator(operator)
        assert guarded is not operator
        for expected, found in zip(operator(**call), guarded(**call), strict=True):
            assert torch.equal(expected, found)


@pytest.mark.filterwarnings("ignore")  # of torch, about quantized dtypes
@pytest.mark.parametrize("name", ["aten.view.dtype", "aten.view_copy.dtype"])
def test_a_view_in_another_dtype_stays_in_its_memory(name: str) -> None:
    dtypes = dict.fromkeys(dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype))
    quantized = {dtype for dtype in dtypes if str(dtype).startswith("torch.q")}
    operator, view_count = guarded_operator(find_operator(name)), 0
    for dtype in quantized:
        with pytest.raises(ValueError, match=r"expected dtypes of numbers, found torch\.q"):
            operator(torch.ones(4), dtype)
        with pytest.raises(ValueError, match=r"expected dtypes of numbers, found torch\.q"):
            operator(torch.empty(4, dtype=dtype), torch.uint8)
    for dtype, other in itertools.product(dtypes.keys() - quantized, dtypes.keys() - quantized):
        whole = torch.empty(64, dtype=dtype)
        tensors = [whole, whole[3:], whole[::2], whole.view(4, 16)[:, 1:9], whole[:1].expand(4, 8), whole[:0], whole[0]]
        for tensor in (*tensors, whole.as_strided((4, 8), (1, 2)), whole.view(8, 8).t()):
            try:
                view = operator(tensor, other)
            except (RuntimeError, ValueError):
                continue
            reach = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True))
            end = (view.storage_offset() + reach + 1) * view.element_size()
            assert not view.numel() or end <= view.untyped_storage().nbytes()
            view_count += 1
    assert view_count > 2000


@pytest.mark.parametrize("name", sorted(NEED_NO_OVERLAP))
def test_tensors_whose_elements_overlap_are_copied(name: str) -> None:
    operator, arguments = find_operator(name), OVERLAPPING_ARGUMENTS[name]
    copies = [argument.contiguous() if isinstance(argument, torch.Tensor) else argument for argument in arguments]
    results = [operator(*copies), guarded_operator(operator)(*arguments)]
    expected, found = (result if isinstance(result, tuple) else (result,) for result in results)
    assert len(expected) == len(found)
    assert all(map(torch.equal, expected, found))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("aten._fft_c2c.default", [torch.ones(2, 3, dtype=torch.complex64), [-1], 0, True], "dim: expected different"),
        (
            "aten._fft_r2c.default",
            [torch.ones(2, 3), [0, 0], 0, True],
            "dim: expected different dimensions from 0 to 1",
        ),
        ("aten._fft_c2r.default", [torch.ones(2, 3, dtype=torch.complex64), [2], 0, 4], "dim: expected different"),
        (
            "aten._upsample_bilinear2d_aa.default",
            [torch.ones(1, 1, 4, 3), [8, 7], False, 2.0, 1.0],
            "scales_w: expected",
        ),
        (
            "aten._upsample_bicubic2d_aa.default",
            [torch.ones(1, 1, 4, 3), [8, 6], False, 1.0, 2.0],
            "scales_h: expected",
        ),
    ],
)
def test_guards_refuse_what_would_be_read_past_the_end(name: str, arguments: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        guarded_operator(find_operator(name))(*arguments)


@pytest.mark.parametrize("name", sorted(recurrent_calls()))
def test_guards_let_calls_inside_autocast_through(name: str) -> None:
    """There the dtypes of the input and the weights are made equal."""
    operator = find_operator(name)
    for call in recurrent_calls()[name]:
        with torch.autocast("cpu", torch.bfloat16):
            guarded_operator(operator)(**{**call, "input": call["input"].bfloat16()})


def shrink_weight(call: Call) -> None:
    """Take the last row of the last weight away."""
    call["params"] = [*call["params"][:-1], call["params"][-1][:-1]]


def drop_weight(call: Call) -> None:
    """Take the last weight away."""
    call["params"] = call["params"][:-1]


def widen_batch(call: Call) -> None:
    """Give the input more sequences than the state has."""
    call["input"] = torch.cat([call["input"]] * 3, 1)


@pytest.mark.parametrize("change", [shrink_weight, drop_weight, widen_batch])
@pytest.mark.parametrize("name", ["aten.lstm.input", "aten.gru.input"])
def test_recurrent_layers_refuse_shapes_that_do_not_fit(name: str, change: Callable[[Call], None]) -> None:
    operator = find_operator(name)
    for call in recurrent_calls()[name]:
        changed = dict(call)
        change(changed)
        with pytest.raises(ValueError, match="expected"):
            guarded_operator(operator)(**changed)


@pytest.mark.parametrize("name", sorted(attention_calls()))
def test_attention_refuses_shapes_that_do_not_fit(name: str) -> None:
    operator = find_operator(name)
    for call in attention_calls()[name]:
        for parameter, value in call.items():
            if isinstance(value, torch.Tensor):
                wrong_values: list[Any] = [value[..., :-1], value[None]]
            else:
                wrong_values = [0, -1, 3] if parameter in {"num_head", "num_heads", "embed_dim"} else []
            for wrong_value in wrong_values:
                with pytest.raises((ValueError, RuntimeError), match="expected"):
                    guarded_operator(operator)(**{**call, parameter: wrong_value})


@pytest.mark.parametrize(
    ("name", "a", "b", "result"),
    [
        ("operator.pow", 9, 10**9, OverflowError),
        ("operator.pow", -2, 64, OverflowError),
        ("operator.pow", 3, 2**62, OverflowError),
        ("operator.pow", 2, 63, 2**63),
        ("operator.pow", -1, 10**9 + 1, -1),
        ("operator.pow", 2, -2, 0.25),
        ("operator.pow", 0, -1, ZeroDivisionError),
        ("operator.pow", 2.0, 0.5, 2.0**0.5),
        ("operator.lshift", 1, 2**62, OverflowError),
        ("operator.lshift", 1, 63, 2**63),
        ("operator.lshift", 0, 10**6, 0),
        ("operator.lshift", 1, -1, ValueError),
        ("operator.mul", 2**62, 3, OverflowError),
        ("operator.mul", -(2**62), 2, -(2**63)),
        ("operator.mul", 2.5, 4, 10.0),
        ("operator.mul", [1], 2**40, TypeError),
        ("operator.mul", 2**40, "x", TypeError),
        ("operator.mod", "%999999999999d", 1, TypeError),
        ("operator.mod", -7, 3, 2),
        ("operator.add", (1,), (2,), TypeError),
        ("operator.add", 2**63, 1, OverflowError),
        ("operator.add", 2**62, 2**62, 2**63),
        ("operator.sub", -(2**63), 1, OverflowError),
        ("operator.sub", 0, 2**63, -(2**63)),
    ],
)
def test_integers_are_bounded(name: str, a: Any, b: Any, result: Any) -> None:
    if isinstance(result, type):
        with pytest.raises(result):
            BOUNDED_OPERATORS[name](a, b)
    else:
        assert BOUNDED_OPERATORS[name](a, b) == result


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("name", [name for name in sorted(ARGUMENT_CHECKS) if "div" in name])
def test_no_integer_is_the_quotient_of_the_smallest_one_and_minus_one(name: str, dtype: torch.dtype) -> None:
    divide = guarded_operator(find_operator(name))
    smallest = torch.iinfo(dtype).min
    options: dict[str, Any] = {} if name.startswith("prims") else {"rounding_mode": "trunc"}

    def call(dividends: list[int], divisors: list[int]) -> list[int]:
        dividend, divisor = torch.tensor(dividends, dtype=dtype), torch.tensor(divisors, dtype=dtype)
        out = {"out": torch.empty_like(dividend)} if name.endswith(".out_mode") else {}
        result: list[int] = divide(dividend, divisors[0] if "Scalar" in name else divisor, **options, **out).tolist()
        return result

    with pytest.raises(ValueError, match=f"found {smallest} / -1"):
        call([8, smallest], [-1, -1])
    assert call([smallest, -9], [2, 2]) == [smallest // 2, -4]
    assert call([smallest + 1, 7], [-1, -1]) == [-(smallest + 1), -7]


@pytest.mark.parametrize("columns", [0, 2])
def test_least_squares_of_no_right_side_end_no_process(columns: int) -> None:
    solve = guarded_operator(find_operator("aten.linalg_lstsq.default"))
    matrix, right_side = torch.randn(4, 3), torch.randn(4, columns)
    if columns:
        assert solve(matrix, right_side, driver="gelss")[0].shape == (3, columns)
    else:
        with pytest.raises(ValueError, match=r"expected elements for the driver gelss, found the shape \[4, 0\]"):
            solve(matrix, right_side, driver="gelss")
        assert solve(matrix, right_side, driver="gelsy")[0].shape == (3, 0)


@pytest.mark.parametrize("name", ["aten.lcm.default", "aten.lcm.out", "aten.lcm_.default"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_no_integer_is_a_multiple_of_the_smallest_one_and_another(name: str, dtype: torch.dtype) -> None:
    operator = guarded_operator(find_operator(name))
    info = torch.iinfo(dtype)

    def call(left: list[int], right: list[int]) -> list[int]:
        arguments = {"self": torch.tensor(left, dtype=dtype), "other": torch.tensor(right, dtype=dtype)}
        if name.endswith(".out"):
            arguments["out"] = torch.empty(2, dtype=dtype)
        multiples: list[int] = operator(**arguments).tolist()
        return multiples

    with pytest.raises(ValueError, match=f"found ones of {info.min}"):
        call([4, info.min], [6, info.max])
    assert call([info.min, 4], [0, -6]) == [0, 12]
    assert call([info.max, 7], [1, 0]) == [info.max, 0]
