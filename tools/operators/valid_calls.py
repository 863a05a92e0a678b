"""Valid calls of operators, recorded from the samples of torch's own tests."""

import itertools
import sys
import types
import unittest
from typing import Any

import torch

from stagepack.torch_internals import OperatorOverload, TorchDispatchMode
from tools.operators.hostile_arguments import Call, bind

_SAMPLES = 8
_CALLS = 24


class _Recorder(TorchDispatchMode):
    """Records the calls of operators that torch makes."""

    def __init__(self, calls: dict[str, list[Call]]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        calls = self._calls.setdefault(str(func), [])
        if len(calls) < _CALLS:
            calls.append(bind(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def recorded_calls() -> dict[str, list[Call]]:
    """Return valid calls by the name of the operator: those of the samples, and those that run inside of these calls."""
    # The test suite of torch imports it, and uses only its class of test cases.
    expecttest = types.ModuleType("expecttest")
    expecttest.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    sys.modules.setdefault("expecttest", expecttest)
    from torch.testing._internal.common_methods_invocations import op_db  # noqa: PLC0415 - needs the line above

    calls = recurrent_calls() | attention_calls() | quantized_calls()
    for info in op_db:
        try:
            dtype = torch.float32 if torch.float32 in info.dtypes else min(info.dtypes, key=str)
            for sample in itertools.islice(info.sample_inputs("cpu", dtype), _SAMPLES):
                _record_overloads(info.aten_name, (sample.input, *sample.args), sample.kwargs, calls)
                with _Recorder(calls):
                    info.op(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:  # noqa: BLE001 - some samples need another device
            print(f"no samples of {info.name}: {str(error)[:80]}", file=sys.stderr)
    return calls


def recurrent_calls() -> dict[str, list[Call]]:
    """Return calls of recurrent layers, of which torch's tests have no samples, also in two directions, and with projections."""
    calls: dict[str, list[Call]] = {}
    for name, gates in (("rnn_tanh", 1), ("rnn_relu", 1), ("gru", 3), ("lstm", 4)):
        for directions, hidden_size in ((1, 4), (2, 4), *([(1, 3)] if name == "lstm" else [])):
            state = torch.randn(2 * directions, 2, hidden_size)
            params = []
            for width in (5,) * directions + (hidden_size * directions,) * directions:
                shapes = [[gates * 4, width], [gates * 4, hidden_size], [gates * 4], [gates * 4], [hidden_size, 4]]
                params += [torch.randn(shape) for shape in shapes[: 5 if hidden_size != 4 else 4]]
            hx = [state, torch.randn(2 * directions, 2, 4)] if name == "lstm" else state
            operator = getattr(torch.ops.aten, name).input
            args = (torch.randn(3, 2, 5), hx, params, True, 2, 0.0, False, directions == 2, False)
            operator(*args)
            calls.setdefault(str(operator), []).append(bind(operator, args, {}))
    return calls


def find_operator(name: str) -> OperatorOverload:
    """Return an operator by its qualified name."""
    namespace, packet_name, overload_name = name.split(".")
    operator: OperatorOverload = getattr(getattr(getattr(torch.ops, namespace), packet_name), overload_name)
    return operator


def attention_calls() -> dict[str, list[Call]]:
    """Return calls of operators with the attention of several heads, of which torch's tests have no samples, with each kind of mask."""
    batch_size, length, width, head_count, inner_width = 2, 5, 16, 4, 32
    query = torch.randn(batch_size, length, width)
    weights = [torch.randn(shape) for shape in ((3 * width, width), (3 * width,), (width, width), (width,))]
    norms = [torch.randn(width) for _ in range(4)]
    inner_shapes = ((inner_width, width), (inner_width,), (width, inner_width), (width,))
    inner_weights = [torch.randn(shape) for shape in inner_shapes]
    args = {
        "aten._native_multi_head_attention.default": (query, query, query, width, head_count, *weights),
        "aten._transformer_encoder_layer_fwd.default": (
            *(query, width, head_count, *weights, True, False, 1e-5, *norms, *inner_weights),
        ),
    }
    mask_shapes = {0: (length, length), 1: (batch_size, length), 2: (batch_size, head_count, length, length)}
    masks: list[dict[str, Any]] = [{}]
    for mask_type, shape in mask_shapes.items():
        mask = torch.rand(shape) > 0.8
        mask[..., 0] = False  # of positions that are all masked, the result is not a number
        masks.append({"mask": mask, "mask_type": mask_type})
    return {name: [bind(find_operator(name), args[name], mask) for mask in masks] for name in args}


def quantized_calls() -> dict[str, list[Call]]:
    """Return calls of products of quantized weights and of groups, of which torch's tests have no samples."""
    integers = torch.randint(0, 16, (32, 64), dtype=torch.int32)
    packed = find_operator("aten._convert_weight_to_int4pack_for_cpu.default")(integers, 1)
    rows, scales = torch.randn(4, 64, dtype=torch.bfloat16), torch.randn(2, 32, 2, dtype=torch.bfloat16)
    groups = torch.tensor([8, 16], dtype=torch.int32)
    args: dict[str, tuple[Any, ...]] = {
        "aten._convert_weight_to_int4pack_for_cpu.default": (integers, 1),
        "aten._grouped_mm.default": (torch.randn(16, 32).bfloat16(), torch.randn(2, 32, 16).bfloat16(), groups),
        "aten._int_mm.default": (integers[:, :32].char(), integers[:, :32].t().char()),
        "aten._weight_int4pack_mm_for_cpu.default": (rows, packed, 32, scales),
        "aten._weight_int8pack_mm.default": (rows, integers.char(), torch.randn(32, dtype=torch.bfloat16)),
        "aten.fake_quantize_per_channel_affine.default": (
            torch.randn(3, 4),
            torch.rand(4),
            torch.zeros(4).int(),
            1,
            0,
            9,
        ),
    }
    return {name: [bind(find_operator(name), args[name], {})] for name in args}


def _record_overloads(
    packet_name: str, args: tuple[Any, ...], kwargs: dict[str, Any], calls: dict[str, list[Call]]
) -> None:
    """Record a sample as a call of each overload that takes it: composite operators are not seen by a dispatch mode."""
    for name in (packet_name, f"{packet_name}_"):
        packet = getattr(torch.ops.aten, name, None)
        for overload_name in packet.overloads() if packet is not None else ():
            overload: OperatorOverload = getattr(packet, overload_name)
            try:
                copied = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
                overload(*copied, **kwargs)
            except Exception:  # noqa: BLE001, S112 - the sample is one of another overload
                continue
            recorded = calls.setdefault(str(overload), [])
            if len(recorded) < _CALLS:
                recorded.append(bind(overload, args, kwargs))
