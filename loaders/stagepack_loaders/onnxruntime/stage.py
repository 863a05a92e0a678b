"""A stage as a session of ONNX Runtime."""

import contextlib
import mmap
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy
import onnxruntime
from onnxruntime import OrtValue

from stagepack.adapter.adapted_bundle import ROWS_NAME
from stagepack.format.chunk_reads import FileRead, read_chunks
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Graph, Value, ValueArg, Weight
from stagepack.format.graph_codec import read_graph
from stagepack.format.onnx import NEXT_STATE_PREFIX, STATE_PREFIX, WRITTEN_PREFIX
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.traversal import input_names, output_names
from stagepack.format.upgrade import is_newer_minor
from stagepack.format.weights import parse_weight_header
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_interpreter import read_weight, stored_tensors
from stagepack_loaders.onnxruntime.values import (
    ENDS_PROCESS_WITHOUT_ELEMENTS,
    ProviderDevice,
    SessionTypes,
    check_operators,
    check_written_inputs,
    to_host,
    to_numpy,
    to_ort,
    write_input,
)
from stagepack_loaders.stages import CallableStage
from stagepack_loaders.weight_files import WeightFile


class SessionWeights:
    """The weights of a stage as read-only arrays. They stay valid when the bundle is replaced or removed."""

    def __init__(
        self,
        bundle: Bundle,
        stage_number: int,
        graph_content: bytes,
        weight_files: Mapping[str, WeightFile],
        *,
        mapped: bool,
    ) -> None:
        self._graph_name = bundle.stages[stage_number].graph
        self._graph_content = graph_content
        self._newer = is_newer_minor(bundle.manifest.version)
        self._files = None if mapped else _OpenFiles(bundle, bundle.stages[stage_number].weights)
        # The tensors that are kept are copies.
        self._stored = stored_tensors(weight_files) if mapped else {}

    def keep(self, weight_names: Collection[str], weight_files: Mapping[str, WeightFile], *, verified: bool) -> None:
        """Keep some weights in memory of their own."""
        assert self._files is not None
        self._files.verify = verified
        if not weight_names:
            return
        kept_tensors = {
            weight.stored
            for weight in self._table
            if not weight.zeros and not set(weight_names).isdisjoint(weight.names)
        }
        for weight_file in weight_files.values():
            for stored_name in kept_tensors & weight_file.tensors.keys():
                stored = weight_file.tensors[stored_name]
                self._stored[stored_name] = numpy.frombuffer(
                    weight_file.content[stored.start : stored.end], numpy.uint8
                )

    def __iter__(self) -> Iterator[tuple[Weight, Array]]:
        """Yield each weight of the graph with its content at loading."""
        stored = self._stored if self._files is None else self._files.read()
        return ((weight, read_weight(weight, stored)) for weight in self._table)

    def some(self, weight_names: Collection[str]) -> Iterator[tuple[Weight, Array]]:
        """Yield some weights with their content at loading: of copies, those that are kept."""
        for weight in self._table:
            if weight.names[0] in weight_names:
                yield weight, read_weight(weight, self._stored)

    def written_in_place(self) -> frozenset[str]:
        """The names of the buffers that the session may write where they are, and need not copy in each call."""
        return _buffers_in_place(self._graph)

    @cached_property
    def _table(self) -> tuple[Weight, ...]:
        return self._graph.weights

    @property
    def _graph(self) -> Graph:
        return read_graph(self._graph_content, self._graph_name, newer=self._newer, module_calls=False).graph


def _buffers_in_place(graph: Graph) -> frozenset[str]:
    """The buffers of zeros that one ``index_put_`` writes, of which nothing but copies for its own arguments is read before.

    ScatterND, which it becomes, copies what it writes into unless that has the memory of its result already.
    """
    writes: dict[str, int] = {}
    uses: defaultdict[str, list[int]] = defaultdict(list)
    producers: dict[str, int] = {}
    for node_number, node in enumerate(graph.nodes):
        for value_name in set(input_names(node)):
            uses[value_name].append(node_number)
        producers |= dict.fromkeys(output_names(node), node_number)
        is_write = graph.ops[node.op].name == "aten.index_put_.default" and len(node.args) == 3  # without `accumulate`
        if is_write and isinstance(node.args[0], ValueArg):
            writes[node.args[0].name] = node_number
    found: set[str] = set()
    for weight in graph.weights:
        write = writes.get(weight.value)
        if write is None or not weight.zeros or weight.base is not None:
            continue
        node = graph.nodes[write]
        read_before = {number for name in input_names(node)[1:] for number in _earlier_nodes(graph, name, producers)}
        reads = [node_number for node_number in uses[weight.value] if node_number != write]
        results = {weight.value, *output_names(node)}
        is_copied = all(graph.ops[graph.nodes[number].op].name == "aten.index.Tensor" for number in reads)
        if is_copied and read_before.issuperset(reads) and results.isdisjoint(graph.outputs):
            found.update(weight.names)
    return frozenset(found)


def _earlier_nodes(graph: Graph, value_name: str, producers: Mapping[str, int]) -> set[int]:
    """The nodes that a value is computed by."""
    earlier: set[int] = set()
    pending = [value_name]
    while pending:
        node_number = producers.get(pending.pop())
        if node_number is not None and node_number not in earlier:
            earlier.add(node_number)
            pending += input_names(graph.nodes[node_number])
    return earlier


class _OpenFiles:
    """Weight files that stay open, and are read again when they are needed.

    Attributes:
        verify: compare what is read with the digests of the manifest. What was read at loading had these digests too.
    """

    def __init__(self, bundle: Bundle, file_names: Sequence[str]) -> None:
        self.verify = True
        self._reads: dict[str, FileRead] = {}
        open_files = contextlib.ExitStack()
        weakref.finalize(self, open_files.close)
        bundle.fetch(file_names)
        for file_name in file_names:
            self._reads[file_name] = bundle.open_read(open_files, file_name)

    def read(self) -> dict[str, Array]:
        """Return the bytes of each stored tensor, by name, in new memory."""
        memories = {file_name: mmap.mmap(-1, read.entry.size) for file_name, read in self._reads.items()}
        reads = [replace(read, destination=memoryview(memories[file_name])) for file_name, read in self._reads.items()]
        raise_problems(read_chunks(reads, compare=self.verify))
        return stored_tensors(
            {
                file_name: WeightFile(memory, parse_weight_header(memory, file_name))
                for file_name, memory in memories.items()
            }
        )


class OnnxRuntimeStage(CallableStage):
    """One stage of a bundle: called with its inputs, by position or by edge name, it returns a tuple of its outputs.

    Inputs are arrays of any runtime; the stage works on their memory. Outputs are arrays of the kind of the first input that is one, or
    numpy arrays. Dtypes that numpy lacks, such as bfloat16, come from ml_dtypes.

    Attributes:
        session: the session that runs the stage; None if there is nothing to run.
        state: the content of the buffers that calls write, by name.
    """

    runtime = "onnxruntime"

    def __init__(
        self,
        bundle: Bundle,
        stage_number: int,
        device: ProviderDevice,
        session: onnxruntime.InferenceSession | None,
        weights: SessionWeights,
        operators: Collection[str] = (),
        check_rows: Callable[[Array], None] | None = None,
    ) -> None:
        super().__init__(bundle, stage_number, device)
        self.session = session
        self._weights = weights
        # The session of a stage that no adapter changes does not take the numbers of the rows.
        self._takes_rows = session is not None and ROWS_NAME in {value.name for value in session.get_inputs()}
        self._check_rows = check_rows
        self._unsafe_operators = sorted(ENDS_PROCESS_WITHOUT_ELEMENTS.intersection(operators))
        self._state_names = bundle.stages[stage_number].state
        output_names = [] if session is None else [output.name for output in session.get_outputs()]
        self._written_names = [
            output_name.removeprefix(WRITTEN_PREFIX)
            for output_name in output_names
            if output_name.startswith(WRITTEN_PREFIX)
        ]
        self._lock = threading.Lock()
        self._in_place = weights.written_in_place() & set(self._state_names)
        self.state = self.fresh_state()
        further_outputs = [*self._next_state_types(), *self._written_types()]
        self._types = SessionTypes(self.inputs, self.outputs, further_outputs, bundle.entry_point.symbols)

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage; see `stagepack_loaders.base.LoadedStage`."""
        if self.session is None:
            return ()
        if self._check_rows is not None:
            numbers = values[-1]  # the last input of an adapted stage
            self._check_rows(to_numpy(numbers, "int64") if isinstance(numbers, OrtValue) else numbers)
        described_inputs = self._types.describe_inputs(values)
        empty_outputs = self._types.outputs_without_elements(described_inputs, self.device)
        if empty_outputs is not None:
            return empty_outputs[: len(self.outputs)]
        check_operators(self._unsafe_operators, described_inputs, self._stage_number)
        # Calls from several threads must not lose what one of them writes.
        with self._lock if self.state else contextlib.nullcontext():
            return self._run_session(self.session, values, described_inputs)

    def _run_session(
        self, session: onnxruntime.InferenceSession, values: list[Any], described_inputs: Sequence[Any]
    ) -> tuple[Any, ...]:
        inputs = {edge.name: value for edge, value in zip(self.inputs, values, strict=True)}
        check_written_inputs(inputs, self._written_names)
        binding = self._bind(session, inputs)
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        output_values = self._types.checked_outputs(described_inputs, binding.get_outputs())
        written_start = len(self.outputs) + len(self.state)
        # A value that is written in place stays: it keeps the memory, which may be an array's.
        self.state = {
            buffer_name: value if buffer_name in self._in_place else next_value
            for (buffer_name, value), next_value in zip(
                self.state.items(), output_values[len(self.outputs) : written_start], strict=True
            )
        }
        dtypes = {edge.name: edge.dtype for edge in self.inputs}
        for edge_name, content in zip(self._written_names, output_values[written_start:], strict=True):
            write_input(inputs[edge_name], content, dtypes[edge_name])
        return tuple(output_values[: len(self.outputs)])

    def _bind(self, session: onnxruntime.InferenceSession, inputs: dict[str, Any]) -> Any:
        """Bind the inputs and the memory of the outputs: the edges, then the next state, then the inputs that are written."""
        binding = session.io_binding()
        for edge in self.inputs:
            if edge.name == ROWS_NAME and not self._takes_rows:
                continue
            value = to_ort(inputs[edge.name], edge.dtype)
            binding.bind_ortvalue_input(edge.name, to_host(value) if self.device.type == "cpu" else value)
        for buffer_name, value in self.state.items():
            binding.bind_ortvalue_input(STATE_PREFIX + buffer_name, value)
        for edge in self.outputs:
            on_host = edge.dtype in SCALAR_DTYPES
            binding.bind_output(edge.name, *(("cpu", 0) if on_host else (self.device.type, self.device.index)))
        for buffer_name, value in self.state.items():
            if buffer_name in self._in_place:
                binding.bind_ortvalue_output(NEXT_STATE_PREFIX + buffer_name, value)
            else:
                binding.bind_output(NEXT_STATE_PREFIX + buffer_name, self.device.type, self.device.index)
        for edge_name in self._written_names:
            binding.bind_output(WRITTEN_PREFIX + edge_name, self.device.type, self.device.index)
        return binding

    def _next_state_types(self) -> Iterator[Value]:
        """The buffers that calls write, as outputs of the session."""
        weights = {weight.names[0]: weight for weight, _ in self._weights.some(self._state_names)} if self.state else {}
        for buffer_name in self._state_names:
            weight = weights[buffer_name]
            yield Value(name=NEXT_STATE_PREFIX + buffer_name, dtype=weight.dtype, shape=weight.shape)

    def _written_types(self) -> Iterator[Value]:
        """The inputs that the stage writes, as outputs of the session."""
        edges = {edge.name: edge for edge in self.inputs}
        for edge_name in self._written_names:
            yield Value(name=WRITTEN_PREFIX + edge_name, dtype=edges[edge_name].dtype, shape=edges[edge_name].shape)

    def reset_state(self) -> None:
        """Set the buffers that calls write to their content at loading."""
        self.state = self.fresh_state()

    def fresh_state(self) -> dict[str, OrtValue]:
        """Return the buffers that calls write, with their content at loading."""
        if not self._state_names:
            return {}
        content = {
            weight.names[0]: to_ort(array, weight.dtype) for weight, array in self._weights.some(self._state_names)
        }
        return {buffer_name: content[buffer_name] for buffer_name in self._state_names}

    def swap_state(self, state: dict[str, OrtValue]) -> dict[str, OrtValue]:
        """Exchange the buffers that calls write for others, from `fresh_state` or `swap_state`; return the previous ones."""
        previous, self.state = self.state, state
        return previous

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers, by their names in the model.

        They are numpy arrays: copies of buffers that calls write, all others read-only. With ``copy=True``, or if files are not mapped,
        they are read from the weight files again, and compared with their digests if they were at loading.
        """
        state_entries: dict[str, Any] = {}
        for weight, array in self._weights:
            if weight.kind not in ("parameter", "buffer"):
                continue
            state = self.state.get(weight.names[0])
            content = array if state is None else to_numpy(state, weight.dtype).copy()
            state_entries.update(dict.fromkeys(weight.names, content))
        return state_entries

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters as read-only numpy arrays."""
        return (array for weight, array in self._weights if weight.kind == "parameter")
