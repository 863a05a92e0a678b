"""A stage as a session of ONNX Runtime."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import onnxruntime
from onnxruntime import OrtValue

from stagepack.errors import DeviceError, InputError, OperatorError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Weight
from stagepack.format.manifest import Edge
from stagepack.format.manifest import Stage as StageEntry
from stagepack.format.onnx import NEXT_STATE_PREFIX, STATE_PREFIX, WRITTEN_PREFIX
from stagepack.format.reader import Bundle, OnnxFile, read_graph
from stagepack.format.upgrade import is_newer_minor
from stagepack_loaders.onnxruntime.values import is_torch, to_numpy, to_ort, to_torch
from stagepack_loaders.onnxruntime.weights import Array, map_tensors, read_weight
from stagepack_loaders.onnxruntime.written import check_written, write

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ONNX Runtime: the CPU, or a GPU of CUDA with its number."""

    type: str
    index: int = 0

    def __str__(self) -> str:
        return self.type if self.type == "cpu" else f"{self.type}:{self.index}"


def parse_device(device: object) -> Device:
    """A device by its name: ``cpu``, ``cuda``, ``cuda:1``.

    Raises:
        DeviceError: it is none of these, or this onnxruntime has no execution provider for it.
    """
    kind, _, index = str(device).partition(":")
    if kind not in _PROVIDERS or (index and not index.isdecimal()) or (kind == "cpu" and int(index or 0)):
        raise DeviceError(f"device {str(device)!r}: ONNX Runtime runs stages on cpu, cuda or cuda:N")
    if _PROVIDERS[kind] not in onnxruntime.get_available_providers():
        raise DeviceError(
            f"device {str(device)!r}: this onnxruntime has no {_PROVIDERS[kind]}: install onnxruntime-gpu in its place"
        )
    return Device(kind, int(index or 0))


class OnnxRuntimeStage:
    """One stage of a bundle: called with its inputs, by position or by edge name, it returns a tuple of its outputs.

    Inputs are numpy arrays or torch tensors, on whose memory the stage works. Outputs are numpy arrays; torch tensors if an input is one.
    Types that numpy has not, such as bfloat16, are those of ml_dtypes.

    Attributes:
        runtime: ``"onnxruntime"``.
        session: what runs it; None if there is nothing to run.
        device: where it runs.
        state: the content of the buffers that calls write, by the name of each.
    """

    runtime = "onnxruntime"

    def __init__(
        self, prepared: "Prepared", session: onnxruntime.InferenceSession | None, tensors: Mapping[str, Array]
    ) -> None:
        """`tensors` are the bytes in the weight files."""
        self.session = session
        self.device = prepared.device
        self._prepared = prepared
        self._tensors = tensors
        self._inputs = prepared.edges(prepared.entry.inputs)
        self._outputs = prepared.edges(prepared.entry.outputs)
        self._written = [
            one.name.removeprefix(WRITTEN_PREFIX)
            for one in prepared.onnx.model.outputs
            if one.name.startswith(WRITTEN_PREFIX)
        ]
        self._turn = threading.Lock()
        self.state = self.fresh_state()

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Run the stage.

        Raises:
            InputError: an input is missing, unknown, or does not fit its recorded type, shape or range.
        """
        names = self._prepared.entry.inputs
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or given.keys() != set(names):
            raise InputError(
                f"expected the inputs {', '.join(names)}, found {len(args)} by position and {sorted(kwargs)} by name"
            )
        bound = {name: BoundArgument(name, value) for name, value in given.items()}
        check_values(self._inputs, bound, self._prepared.bundle.manifest.symbols)
        found = self.run([given[name] for name in names])
        convert = to_torch if any(map(is_torch, given.values())) else to_numpy
        return tuple(convert(value, edge.dtype) for value, edge in zip(found, self._outputs, strict=True))

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage on values that are known to fit, in the order of its inputs; the outputs are values of ONNX Runtime, or numbers.

        Raises:
            InputError: an input holds no dense tensor; or the stage writes it, and it cannot be written, or shares memory with another.
            RuntimeError: ONNX Runtime fails, on an index out of range for example.
        """
        if self.session is None:
            return ()
        # Calls from several threads must not lose what one of them writes.
        with self._turn if self.state else nullcontext():
            return self._run(self.session, values)

    def _run(self, session: onnxruntime.InferenceSession, values: list[Any]) -> tuple[Any, ...]:
        edges, outputs = self._inputs, self._outputs
        given = dict(zip((edge.name for edge in edges), values, strict=True))
        check_written(given, self._written)
        binding = session.io_binding()
        for edge, value in zip(edges, values, strict=True):
            binding.bind_ortvalue_input(edge.name, to_ort(value, edge.dtype, edge.name, str(self.device)))
        for name, value in self.state.items():
            binding.bind_ortvalue_input(STATE_PREFIX + name, value)
        for edge in outputs:
            on_host = edge.dtype in SCALAR_DTYPES
            binding.bind_output(edge.name, *(("cpu", 0) if on_host else (self.device.type, self.device.index)))
        for name in (
            *(NEXT_STATE_PREFIX + name for name in self.state),
            *(WRITTEN_PREFIX + name for name in self._written),
        ):
            binding.bind_output(name, self.device.type, self.device.index)
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        found = binding.get_outputs()
        self.state = dict(zip(self.state, found[len(outputs) :], strict=False))
        dtypes = {edge.name: edge.dtype for edge in edges}
        for name, value in zip(self._written, found[len(outputs) + len(self.state) :], strict=True):
            write(given[name], value, dtypes[name])
        return tuple(
            to_numpy(value, edge.dtype) if edge.dtype in SCALAR_DTYPES else value
            for value, edge in zip(found, outputs, strict=False)
        )

    def __reduce_ex__(self, _: Any) -> Any:
        """Refuse to be pickled or copied."""
        raise TypeError("a loaded stage is not pickled or copied: hand on the bundle, and load the stage there")

    def reset_state(self) -> None:
        """Give the buffers that calls write the content that they were loaded with."""
        self.state = self.fresh_state()

    def fresh_state(self) -> dict[str, OrtValue]:
        """The buffers that calls write, with the content that they were loaded with."""
        names = self._prepared.entry.state
        weights = self._weights() if names else ()
        content = {weight.names[0]: (array, weight.dtype) for weight, array in weights if weight.names[0] in names}
        return {name: to_ort(*content[name], name) for name in names}

    def swap_state(self, state: dict[str, OrtValue]) -> dict[str, OrtValue]:
        """Put other buffers, of `fresh_state` or of this method, in the place of those that calls write; return those."""
        held, self.state = self.state, state
        return held

    def state_dict(self) -> dict[str, Any]:
        """The parameters and persistent buffers by the model's own names, as numpy arrays; what no call writes must not be written."""
        found = {}
        for weight, array in self._weights():
            if weight.names[0] in self.state:
                array = to_numpy(self.state[weight.names[0]], weight.dtype).copy()
            if weight.kind in ("parameter", "buffer"):
                found.update(dict.fromkeys(weight.names, array))
        return found

    def parameters(self) -> Iterator[Any]:
        """The parameters as numpy arrays, which must not be written."""
        return (array for weight, array in self._weights() if weight.kind == "parameter")

    def _weights(self) -> Iterator[tuple[Weight, Array]]:
        """The weights of the stage, and what the files hold of each."""
        return ((weight, read_weight(weight, self._tensors)) for weight in self._table)

    @cached_property
    def _table(self) -> tuple[Weight, ...]:
        bundle, name = self._prepared.bundle, self._prepared.entry.graph
        newer = is_newer_minor(bundle.manifest.version)
        return read_graph(self._prepared.graph, name, newer=newer, module_calls=False).graph.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A stage whose ONNX file is known to be sound, of whose weights nothing is read yet.

    Attributes:
        graph: the content of its graph file, which tells what the weights are.
        onnx: its ONNX file.
        takes_turns: it runs in one process with other stages.
    """

    bundle: Bundle
    number: int
    device: Device
    graph: bytes
    onnx: OnnxFile
    takes_turns: bool

    def finish(self, *, verify: bool) -> OnnxRuntimeStage:
        """Make the session of the stage, which reads its weights.

        Raises:
            DigestError: a weight file is not the one listed.
            OperatorError: this onnxruntime cannot run the stage.
        """
        assert self.entry.onnx is not None
        tensors = map_tensors(self.bundle, self.number)
        if verify:
            self.bundle.check_digests((*self.entry.weights, *self.entry.onnx.weights))
        if not self.onnx.model.outputs:  # ONNX Runtime takes no model without outputs
            return OnnxRuntimeStage(self, None, tensors)
        providers: list[Any] = [_PROVIDERS["cpu"]]
        if self.device.type != "cpu":
            providers.insert(0, (_PROVIDERS[self.device.type], {"device_id": self.device.index}))
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        if self.takes_turns:  # the threads of one stage that wait for work would keep those of the next from theirs
            options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        folder = str(self.bundle.path.absolute())
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", folder)
        try:  # the bytes that were checked
            session = onnxruntime.InferenceSession(self.onnx.content, options, providers=providers, enable_fallback=0)
        except Exception as error:  # noqa: BLE001 - onnxruntime's have no other base
            message = " ".join(str(error).split())[:500]
            raise OperatorError(
                f"stage {self.number}: ONNX Runtime {onnxruntime.__version__} cannot run it: {message}"
            ) from None
        return OnnxRuntimeStage(self, session, tensors)

    @property
    def entry(self) -> StageEntry:
        """What the manifest says of the stage."""
        return self.bundle.stages[self.number]

    def edges(self, names: Sequence[str]) -> list[Edge]:
        """The edges of these names."""
        by_name = {edge.name: edge for edge in self.bundle.edges}
        return [by_name[name] for name in names]


def prepare(bundle: Bundle, placed: Mapping[int, object]) -> dict[int, Prepared]:
    """Read and check the ONNX files of some stages, by their numbers; `placed` says the device of each.

    Raises:
        OperatorError: a stage has no ONNX file.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        DeviceError: a device is not there.
    """
    devices = {number: parse_device(device) for number, device in placed.items()}
    without = [number for number in placed if bundle.stages[number].onnx is None]
    if without:
        named = ", ".join(map(str, without))
        raise OperatorError(
            f"{bundle.path}: stage {named} has no ONNX model: add it (stagepack onnx), or run it in torch (runtime='torch')"
        )
    return {
        number: Prepared(
            bundle=bundle,
            number=number,
            device=device,
            graph=bundle.read(bundle.stages[number].graph),
            onnx=bundle.onnx_file(number),
            takes_turns=len(devices) > 1,
        )
        for number, device in devices.items()
    }
