"""Compare ONNX stages with torch, operator by operator, over a grid of values: ``python -m tools.operators.onnx_values [OPERATOR...]``.

Each call of `value_grid` becomes a part of a bundle, whose stage is converted as `stagepack.add_onnx` does, without its self check. What
ONNX Runtime answers must be what torch answers: integers, booleans, NaN, infinities and the signs of zeros alike, and other
floats but for rounding. A call without an ONNX form stays in torch, by operator_name.
"""

import argparse
import collections
import functools
import json
import os
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import stagepack
from stagepack.format.reader import Bundle
from stagepack.roads.onnx.add import write_bundle
from stagepack.roads.onnx.conversion import convert_stage
from stagepack.torch_internals import onnx_functions_read_once, signs_of_zeros_kept, tree_unflatten
from stagepack_loaders.comparison import compare_arrays
from stagepack_loaders.torch.arrays import TORCH_ARRAYS
from tests.modules import module_of
from tools.operators.converted_calls import all_calls
from tools.operators.value_grid import TYPES, ValueCall, is_swept, parts, results, trials, value_calls

EQUAL, ROUNDED, SIGNS, DIFFERS = "equal", "rounded", "sign of zero", "differs"
# The operator has no ONNX form, or the self check refuses it at the example; it fails at some values; it ends the process.
IN_TORCH, REFUSES, FAILS, ENDS = "torch", "refuses special values", "fails", "ends the process"
_ORDER = (EQUAL, ROUNDED, SIGNS, REFUSES, FAILS, DIFFERS, IN_TORCH)
_BATCH = 40
_MAX_SECONDS = 600
_MAX_ALONE = 500
# Indices of equal values may be in any order. In `sort` and `topk`, torch orders them otherwise by the size of the tensor.
_UNORDERED = frozenset({"argsort", "sort", "topk"})
# Sums of a number and a logarithm: their rounding is that of the number.
_CANCELLING = frozenset({"lerp", "logaddexp", "logaddexp2"})
# Erf and Sigmoid of ONNX Runtime are near to torch relative to 1, not to their value; so are sines of multiples of pi.
_NEAR_ONE = frozenset({"erfc", "gelu", "silu", "sinc", "special_erfc", "special_erfcx"})
# How far a value may be from that of torch, relative to it, or to the largest finite value where elements are reduced: 32 units in the last
# element_index of float32, 4 of the types of 16 bits. Scalars are stored in float32, also for tensors of float64.
RELATIVE = {torch.float64: 2**-22, torch.float32: 2**-18, torch.float16: 2**-8, torch.bfloat16: 2**-5}


class Verdict(NamedTuple):
    """What the sweep says of a call."""

    call: str
    kind: str
    detail: str = ""
    trials: int = 0


def compare(
    actual: torch.Tensor,
    expected: torch.Tensor,
    elementwise: bool,
    largest: float = 0.0,
    sizes: torch.Tensor | None = None,
) -> tuple[str, int | None]:
    """Return how a result is other than expected, and the element where it is."""
    if actual.dtype != expected.dtype or actual.shape != expected.shape:
        return DIFFERS, None
    if not expected.dtype.is_floating_point and not expected.is_complex():
        unequal = (actual != expected).flatten().nonzero()
        return (DIFFERS, int(unequal[0])) if len(unequal) else (EQUAL, None)
    if expected.is_complex():
        sizes = parts(expected).abs().amax(-1, keepdim=True).expand(*expected.shape, 2)
        kind, position = compare(parts(actual), parts(expected), elementwise, largest, sizes)
        return kind, None if position is None else position // 2
    info = torch.finfo(expected.dtype)
    a, b = actual.double().flatten(), expected.double().flatten()
    same = (a == b) | (a.isnan() & b.isnan())
    if expected.dtype not in RELATIVE and not same.all():
        return DIFFERS, int((~same).nonzero()[0])
    wrong_zero = same & (a == 0) & (a.signbit() != b.signbit())
    # A finite number next to the largest one may be infinite.
    finite = b[b.isfinite()].abs()
    sizes = b.abs() if sizes is None else sizes.double().flatten()
    scale = (
        sizes if elementwise else torch.cat([finite, torch.tensor([largest], dtype=torch.float64)]).max().expand_as(b)
    )
    near = (a - b).abs() <= RELATIVE.get(expected.dtype, 0.0) * scale + 2 * info.smallest_normal
    # The intermediate results of one runtime may overflow where those of the other do not.
    at_end = (a.sign() == b.sign()) & (torch.minimum(a.abs(), b.abs()) > info.max / 16)
    bad = ~(same | at_end | (near & a.isfinite() & b.isfinite()))
    if bad.any():
        return DIFFERS, int(bad.nonzero()[0])
    if wrong_zero.any():
        return SIGNS, int(wrong_zero.nonzero()[0])
    return (EQUAL, None) if same.all() else (ROUNDED, None)


def _rank(verdict: Verdict) -> int:
    return _ORDER.index(verdict.kind)


def _is_example(call: ValueCall, trial: int) -> bool:
    """Whether a trial has the example, with which the self check of `stagepack.add_onnx` refuses what differs or fails."""
    return trial == 0 and not call.is_elementwise


def _largest(tensors: Sequence[torch.Tensor]) -> float:
    finite = [
        tensor[tensor.isfinite()].double().abs().max()
        for tensor in map(parts, tensors)
        if tensor.is_floating_point() and tensor.isfinite().any()
    ]
    return float(max(finite, default=0.0))


def _selected(call: ValueCall, tensors: Sequence[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
    """What indices select, of an operator for which those of equal values may be in any order."""
    if call.operator_name.split(".")[1] not in _UNORDERED or result.dtype != torch.int64 or not tensors[0].dim():
        return result
    arguments = dict(zip(call.names, tree_unflatten(list(call.leaves), call.structure), strict=True))
    dim = arguments.get("dim", -1)
    return tensors[0].gather(dim, result) if result.numel() and int(result.min()) >= 0 else result


def _one_by_one(
    call: ValueCall, tensors: Sequence[torch.Tensor], onnx_result: torch.Tensor, torch_result: torch.Tensor
) -> torch.Tensor:
    """The results of torch, with those of calls of one element where they differ: vectors of elements are computed otherwise."""
    unlike = (
        ((onnx_result != torch_result) & ~(onnx_result.isnan() & torch_result.isnan()))
        .flatten()
        .nonzero()
        .flatten()
        .tolist()
    )
    alone = torch_result.clone()
    for element_index in unlike[:_MAX_ALONE]:
        (answer,) = results(call, [tensor.flatten()[element_index : element_index + 1] for tensor in tensors])
        if compare(onnx_result.flatten()[element_index : element_index + 1], answer, True)[0] != DIFFERS:
            alone.view(-1)[element_index] = onnx_result.flatten()[element_index]
    return alone


def converted(calls: Sequence[ValueCall], folder: Path) -> Any:
    """Return a pipeline in ONNX Runtime of some calls, or why there is none."""
    counts = [len(call.tensors) for call in calls]

    def forward(_: Any, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        remaining, outputs = list(tensors), []
        for call, count in zip(calls, counts, strict=True):
            outputs += results(call, remaining[:count])
            remaining = remaining[count:]
        return tuple(outputs)

    args = tuple(tensor for call in calls for tensor in call.tensors)
    try:
        bundle = stagepack.export(module_of(forward), args, out=folder / "torch", overwrite=True)
    except Exception as error:  # noqa: BLE001
        return f"export: {type(error).__name__}: {str(error)[:200]}"
    files = convert_stage(bundle, 0, ())
    if isinstance(files, str):
        return files
    try:
        write_bundle(
            bundle,
            {0: files},
            bundle.check_digests(bundle.files),
            folder / "onnx",
            replaced_digest=Bundle(folder / "onnx").digest if (folder / "onnx").exists() else None,
        )
        return stagepack.load(folder / "onnx", runtime="onnxruntime")
    except Exception as error:  # noqa: BLE001
        return f"load: {' '.join(str(error).split())[:300]}"


def sweep_calls(calls: Sequence[ValueCall], folder: Path) -> Iterator[Verdict]:
    """Yield the verdict on each of some calls."""
    if not calls:
        return
    pipe = converted(calls, folder)
    if not isinstance(pipe, str):
        yield from _compared(calls, pipe, folder)
    elif unsupported := {call.operator_name for call in calls if f"no ONNX form of {call.operator_name} in " in pipe}:
        # No function of the exporter, whatever the arguments.
        for call in calls:
            if call.operator_name in unsupported:
                yield Verdict(str(call), IN_TORCH, pipe)
        yield from sweep_calls([call for call in calls if call.operator_name not in unsupported], folder)
    elif len(calls) == 1 or (
        "NOT_IMPLEMENTED" in pipe and len({(call.operator_name, call.types) for call in calls}) == 1
    ):
        # The arguments have no form, or ONNX Runtime no kernel for the dtypes.
        for call in calls:
            yield Verdict(str(call), IN_TORCH, pipe)
    else:
        half = len(calls) // 2
        yield from sweep_calls(calls[:half], folder)
        yield from sweep_calls(calls[half:], folder)


def _compared(calls: Sequence[ValueCall], pipe: Any, folder: Path) -> Iterator[Verdict]:
    """Yield the verdicts on converted calls."""
    worst = [Verdict(str(call), EQUAL) for call in calls]
    streams = [list(trials(call)) for call in calls]
    for trial in range(max(map(len, streams))):
        inputs = [_inputs(call, stream, trial) for call, stream in zip(calls, streams, strict=True)]
        try:
            outputs = pipe(*(tensor.clone() for tensors in inputs for tensor in tensors))
        except Exception as error:  # noqa: BLE001 - runtimes raise any class
            if len(calls) > 1:
                half = len(calls) // 2
                yield from sweep_calls(calls[:half], folder)
                yield from sweep_calls(calls[half:], folder)
                return
            worst[0] = max(worst[0], _failure(calls[0], trial, error), key=_rank)
            continue
        actual = iter(outputs if isinstance(outputs, tuple | list) else [outputs])
        captured = _Captured(folder, inputs)
        for index, (call, tensors) in enumerate(zip(calls, inputs, strict=True)):
            for position, torch_result in enumerate(results(call, tensors)):
                onnx_result, captured_result = next(actual), captured.next_result
                verdict = _verdict(call, tensors, (position, onnx_result, torch_result), trial)
                if verdict.kind == DIFFERS:
                    # torch.export takes some operators apart into steps that are other than the operator at infinity.
                    verdict = _verdict(call, tensors, (position, onnx_result, captured_result()), trial)
                if verdict.kind == DIFFERS and "scaled_dot_product" in call.operator_name:
                    # The kernels of torch differ at NaN and infinity: each element is to be that of one of them.
                    with sdpa_kernel(SDPBackend.MATH):
                        plain_result = results(call, tensors)[position]
                    is_plain = torch.isclose(onnx_result, plain_result, rtol=1e-3, atol=1e-6, equal_nan=True)
                    either_result = torch.where(is_plain, plain_result, torch_result)
                    verdict = _verdict(call, tensors, (position, onnx_result, either_result), trial)
                worst[index] = max(worst[index], verdict, key=_rank)
    for verdict, stream in zip(worst, streams, strict=True):
        yield verdict._replace(trials=len(stream))


class _Captured:
    """The results of the captured program in torch, computed when one is asked for."""

    def __init__(self, folder: Path, inputs: Sequence[Sequence[torch.Tensor]]) -> None:
        self._folder, self._inputs = folder, inputs
        self._results: list[torch.Tensor] = []
        self._count = 0

    @property
    def next_result(self) -> Callable[[], torch.Tensor]:
        """A function that returns the next result."""
        self._count += 1
        return functools.partial(self._result, self._count - 1)

    def _result(self, index: int) -> torch.Tensor:
        if not self._results:
            pipe = stagepack.load(self._folder / "torch", runtime="torch")
            outputs = pipe(*(tensor.clone() for tensors in self._inputs for tensor in tensors))
            self._results = list(outputs) if isinstance(outputs, tuple | list) else [outputs]
        return self._results[index]


def _inputs(call: ValueCall, stream: Sequence[list[torch.Tensor]], trial: int) -> list[torch.Tensor]:
    """The tensors of a trial; the example if torch raises for them, or there is no such trial."""
    tensors = stream[trial] if trial < len(stream) else call.tensors
    try:
        results(call, tensors)
    except Exception:  # noqa: BLE001 - operators raise any class
        return call.tensors
    return tensors


def _failure(call: ValueCall, trial: int, error: Exception) -> Verdict:
    message = " ".join(str(error).split())
    # A guard of `stagepack.roads.onnx.special_values` fails where the answer would be another.
    kind = REFUSES if "expected_finite" in message else IN_TORCH if _is_example(call, trial) else FAILS
    return Verdict(str(call), kind, f"trial {trial}: {message[:200]}")


def _verdict(
    call: ValueCall, tensors: Sequence[torch.Tensor], result: tuple[int, torch.Tensor, torch.Tensor], trial: int
) -> Verdict:
    """What is said of a result: its position, and it in both runtimes."""
    position, onnx_result, torch_result = result
    packet_name = call.operator_name.split(".")[1]
    largest = max(_largest(tensors), 1.0 if packet_name in _NEAR_ONE else 0.0)
    if "fft_" in packet_name:
        # The rounding of a transform is that of a sum of all elements.
        largest *= max(tensor.numel() for tensor in tensors)
    is_relative = call.is_elementwise and packet_name not in _NEAR_ONE | _CANCELLING
    if packet_name == "argsort" or position:
        onnx_result, torch_result = _selected(call, tensors, onnx_result), _selected(call, tensors, torch_result)
    kind, element_index = compare(onnx_result, torch_result, is_relative, largest)
    if kind == DIFFERS and call.is_elementwise and element_index is not None:
        torch_result = _one_by_one(call, tensors, onnx_result, torch_result)
        kind, element_index = compare(onnx_result, torch_result, is_relative, largest)
    if (
        kind == DIFFERS
        and _is_example(call, trial)
        and not compare_arrays(TORCH_ARRAYS, onnx_result, torch_result).within
    ):
        kind = IN_TORCH
    return Verdict(str(call), kind, _describe(call, tensors, onnx_result, torch_result, element_index, trial))


def _describe(
    call: ValueCall,
    tensors: Sequence[torch.Tensor],
    onnx_result: torch.Tensor,
    torch_result: torch.Tensor,
    element_index: int | None,
    trial: int,
) -> str:
    if element_index is None:
        return (
            ""
            if onnx_result.dtype == torch_result.dtype and onnx_result.shape == torch_result.shape
            else f"{onnx_result.dtype}{list(onnx_result.shape)} for {torch_result.dtype}{list(torch_result.shape)}"
        )
    inputs = (
        ", ".join(str(tensor[element_index].item()) for tensor in tensors) if call.is_elementwise else f"trial {trial}"
    )
    if not call.is_elementwise and sum(tensor.numel() for tensor in tensors) < 40:
        inputs += " " + " ".join(str(tensor.tolist()) for tensor in tensors)
    extra = (
        ""
        if call.is_elementwise or onnx_result.numel() > 24
        else f" all {onnx_result.tolist()} for {torch_result.tolist()}"
    )
    return f"at {inputs}: {onnx_result.flatten()[element_index].item()} for {torch_result.flatten()[element_index].item()}{extra}"


def sweep(calls: Sequence[ValueCall]) -> list[Verdict]:
    """Return the verdicts on calls, from a process of its own. Where it ends, the calls are tried in halves."""
    verdicts = _in_process(calls)
    if verdicts is None and len(calls) > 1:
        half = len(calls) // 2
        return sweep(calls[:half]) + sweep(calls[half:])
    return [Verdict(str(calls[0]), ENDS)] if verdicts is None else verdicts


def _in_process(calls: Sequence[ValueCall]) -> list[Verdict] | None:
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.close(reader)
        signal.alarm(_MAX_SECONDS)
        try:
            with os.fdopen(writer, "w") as stream, tempfile.TemporaryDirectory() as folder:
                verdicts = list(sweep_calls(calls, Path(folder)))
                json.dump(verdicts, stream)
        finally:
            traceback.print_exc()
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        report = stream.read()
    os.waitpid(child, 0)
    return [Verdict(*entry) for entry in json.loads(report)] if report else None


def sweep_operators(operator_names: Sequence[str], dtypes: AbstractSet[torch.dtype]) -> Iterator[Verdict]:
    """Yield the verdicts on the calls of some operators, or of all, whose first tensor is of some dtypes."""
    with warnings.catch_warnings(action="ignore"), onnx_functions_read_once(), signs_of_zeros_kept():
        samples = all_calls()
        calls = [
            call
            for operator_name in sorted(samples)
            if is_swept(operator_name)
            and (not operator_names or {operator_name, operator_name.split(".")[1]}.intersection(operator_names))
            for call in value_calls(operator_name, samples[operator_name], dtypes)
        ]
        for first in range(0, len(calls), _BATCH):
            yield from sweep(calls[first : first + _BATCH])


def main() -> None:
    """Print the verdicts as lines of JSON, and how many there are of each kind."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("operators", nargs="*")
    parser.add_argument(
        "--dtypes", type=lambda value: value.split(","), help="such as float32,int64: of the first tensor"
    )
    options = parser.parse_args()
    dtypes = {dtype for dtype in TYPES if not options.dtypes or str(dtype).removeprefix("torch.") in options.dtypes}
    start, kinds = time.monotonic(), collections.Counter[str]()
    for verdict in sweep_operators(options.operators, dtypes):
        kinds[verdict.kind] += 1
        print(json.dumps(verdict._asdict()), flush=True)
    print(f"{kinds.total()} calls in {time.monotonic() - start:.0f} s: {dict(kinds)}", file=sys.stderr)
    sys.exit(bool(kinds[DIFFERS] + kinds[ENDS]))


if __name__ == "__main__":
    main()
