"""Write a captured model as a bundle: linearize, cut, write, and record the example."""

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch

from stagepack.capture.model_runs import EXAMPLE_SEED, are_identical
from stagepack.capture.programs import Capture
from stagepack.capture.source import FORWARD
from stagepack.capture.transformers.hugging_face import NotIdenticalError, only_parameters
from stagepack.errors import CaptureError
from stagepack.format.file_writing import Piece
from stagepack.format.manifest import EntryPoint, Producer
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.model_assembly import canonical_graph
from stagepack.linearize import LinearizedProgram, captured_example, linearize_program
from stagepack.linearize.tried_sizes import with_tried_sizes
from stagepack.linearize.weight_table import fill_module, tensor_bytes
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import Partition, partition_graph
from stagepack.roads import self_check
from stagepack.roads.bundle_builder import BundleBuilder, EntryPointContent
from stagepack.roads.export_warnings import warn_of_export
from stagepack.roads.stored_bundle import read_entry_point


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a captured model is written.

    Attributes:
        assets: further files, such as ``config.json``.
        overwrite: replace a bundle that exists at the output.
        allow_difference: write a model whose captured program answers otherwise than the model does, with a warning.
        progress: called with the name of each step before it begins.
        compared: called with the largest difference between the answers of the model and of its bundle to the example, of each entry point.
    """

    assets: Mapping[str, bytes] = field(default_factory=dict)
    overwrite: bool = False
    allow_difference: bool = False
    progress: Callable[[str], None] = lambda _: None
    compared: Callable[[float], None] = lambda _: None


_DEFAULTS = ExportOptions()


def export_capture(
    capture: Capture, *, out: str | os.PathLike[str], cut_options: CutOptions, options: ExportOptions = _DEFAULTS
) -> Bundle:
    """Write a captured model as a bundle of one entry point."""
    return export_captures({FORWARD: capture}, out=out, cut_options={FORWARD: cut_options}, options=options)


def export_captures(
    captures: Mapping[str, Capture],
    *,
    out: str | os.PathLike[str],
    cut_options: Mapping[str, CutOptions],
    options: ExportOptions = _DEFAULTS,
) -> Bundle:
    """Write captured functions of one model as the entry points of a bundle.

    The bundle is loaded before it has its name, and runs the example: what no loader accepts is not written.

    captures: the captured functions, by the name of the entry point. A weight that several of them use has one name in all.
    out: the folder to write; it must not exist unless `options.overwrite` is true.
    cut_options: where to cut each of them.
    """
    check_output_path(out, overwrite=options.overwrite)
    try:
        return _export(captures, out, cut_options, options)
    except NotIdenticalError:
        # Only a capture of weights that were not in memory is found to answer otherwise when it is written.
        loaded = {
            entry_name: capture if capture.capture_loaded is None else capture.capture_loaded()
            for entry_name, capture in captures.items()
        }
        return _export(loaded, out, cut_options, options)


def _export(
    captures: Mapping[str, Capture],
    out: str | os.PathLike[str],
    cut_options: Mapping[str, CutOptions],
    options: ExportOptions,
) -> Bundle:
    parts: list[tuple[EntryPointContent, TensorSource]] = []
    devices = set()
    for entry_name, capture in captures.items():
        title = "" if len(captures) == 1 else f" {entry_name}"
        options.progress(f"linearize{title}")
        program = _program(capture, entry_name)
        if len(captures) > 1:
            program = program.with_constant_prefix(f"{entry_name}.")
        options.progress(f"cut{title}")
        partition = _cut(program, cut_options[entry_name])
        entry_point = EntryPoint(
            name=entry_name,
            signature=program.signature,
            stages=(),
            edges=partition.cut.edges,
            plan=partition.plan,
            symbols=program.graph.symbols,
            guards=program.guards,
            seed=EXAMPLE_SEED,
        )
        content = EntryPointContent(
            entry_point=entry_point,
            stages=partition.cut.stages,
            record_example=_Example(capture, program, options).recorder(),
        )
        parts.append((content, _weight_source(capture, program)))
        devices.add(program.device)
    if len(devices) > 1:
        shown_devices = ", ".join(sorted(devices))
        raise CaptureError(f"expected all entry points on one device, found {shown_devices}: move the model to one")
    options.progress("write")
    builder = BundleBuilder(
        out=out,
        producer=Producer(
            stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0]
        ),
        device=devices.pop(),
        files=options.assets,
        overwrite=options.overwrite,
    )
    for content, weights in parts:
        builder.add(content, weights)
    return builder.write()


def _program(capture: Capture, entry_name: str) -> LinearizedProgram:
    """The program of an entry point, checked, with warnings of what will be missed when it is used."""
    program = _linearize(capture)
    if capture.deferred is None:
        program.weights.require_data()
    self_check.check_program(program)
    if entry_name != FORWARD:
        program = program.without_unused_weights()
    warn_of_export(capture, program)
    return program


def plan_capture(capture: Capture, cut_options: CutOptions) -> tuple[Partition, tuple[Symbol, ...]]:
    """Make the cut that `export_capture` would write."""
    program = _linearize(capture)
    return _cut(program, cut_options), program.graph.symbols


def _linearize(capture: Capture) -> LinearizedProgram:
    program = linearize_program(capture)
    if capture.model is not None:
        return with_tried_sizes(capture, program)
    # An exported program has the inputs that it was traced with, or others that the caller passes.
    with self_check.refused_by_loaders():
        program = with_tried_sizes(capture, captured_example.with_example_sizes(capture, program))
        captured_example.check_captured_example(capture, program)
    return program


def _cut(program: LinearizedProgram, cut_options: CutOptions) -> Partition:
    graph = canonical_graph(program.graph)
    weight_bytes = {tensor: spec.nbytes for tensor, (spec, _) in program.weights.stored.items()}
    return partition_graph(graph, graph_costs(graph, weight_bytes), cut_options, program.split_positions)


def _weight_source(capture: Capture, program: LinearizedProgram) -> TensorSource:
    stored, tensors, deferred = program.weights.stored, program.weights.tensors, capture.deferred

    def read(stored_name: str) -> list[Piece]:
        tensor = tensors.get(stored_name)
        location = None
        if deferred is not None and tensor is not None and tensor.is_contiguous():
            location = deferred.location(tensor)
        return [tensor_bytes(stored[stored_name].contiguous())] if location is None else [location]

    return TensorSource(specs={stored_name: spec for stored_name, (spec, _) in stored.items()}, read=read)


class _Example:
    """The example of an entry point: the answer of the model, and that of the bundle, which is compared with it and recorded."""

    def __init__(self, capture: Capture, program: LinearizedProgram, options: ExportOptions) -> None:
        self._capture = capture
        self._program = program
        self._options = options
        self._written_names = GraphAnalysis(program.graph).written_weight_names

    def recorder(self) -> Callable[[Bundle], TensorSource]:
        """What records the example. The model runs now, since it may fail; or, if its weights are deferred, when they are written."""
        if self._capture.deferred is not None:
            return self._record_from_files
        self._options.progress("run the example")
        inputs, expected = self._run(self._written_tensors())
        return lambda draft: self._record(self_check.LoadedDraft(draft, self._program.device), inputs, expected)

    def _written_tensors(self) -> list[torch.Tensor]:
        return [self._program.weights.tensors[weight] for weight in self._written_names]

    def _run(self, written: Sequence[torch.Tensor] = ()) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """The inputs of the example, and the answer of the model, which its second call gives too, unless it writes weights."""
        changed: list[str] = []
        inputs = captured_example.recorded_inputs(self._capture, self._program)
        answer = captured_example.run_example(self._capture, self._program, written, changed)
        if changed and not self._written_names:
            self_check.check_second_call(self._capture, changed, is_allowed=self._options.allow_difference)
        return inputs, answer

    def _record_from_files(self, draft: Bundle) -> TensorSource:
        """Record the example of a model whose weights are deferred: it runs with those of the weight files that are just written."""
        capture, program = self._capture, self._program
        self._options.progress("run the example")
        assert capture.model is not None
        assert capture.deferred is not None
        locations = read_entry_point(draft).locations
        fill_module(capture.model, capture.deferred, program.weights, locations, self._written_names)
        recorded, expected = self._run()
        stages = self_check.LoadedDraft(draft, program.device)
        if capture.capture_loaded is not None:
            for inputs in (capture.inputs, *capture.further_inputs):
                other = replace(capture, inputs=only_parameters(inputs, capture.inputs))
                model_answer = expected if inputs is capture.inputs else captured_example.run_example(other, program)
                if not are_identical(model_answer, stages.run(captured_example.recorded_inputs(other, program))):
                    raise NotIdenticalError
        return self._record(stages, recorded, expected)

    def _record(
        self, stages: self_check.LoadedDraft, inputs: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
    ) -> TensorSource:
        """The inputs of the example and the answer of the loaded stages, which is compared with that of the model."""
        capture, program, options = self._capture, self._program, self._options
        options.progress("replay the example")
        answer = stages.run(inputs)
        difference = stages.difference(answer, expected)
        options.compared(difference.largest)
        if not difference.within:
            values = tuple(captured_example.example_values(capture, program).values())
            self_check.report_difference(capture, values, difference.largest, is_allowed=options.allow_difference)
        elif capture.questions:
            self_check.check_other_inputs(
                stages, capture, program, written=self._written_tensors(), is_allowed=options.allow_difference
            )
        recorded = {input_name: tensor.contiguous() for input_name, tensor in inputs.items()}
        if any(tensor is not inputs[input_name] for input_name, tensor in recorded.items()):
            # Random numbers are drawn in the order of the memory, and a file has tensors without strides.
            answer = stages.run(recorded)
        return captured_example.tensor_source(
            {f"{captured_example.INPUT_PREFIX}{input_name}": tensor for input_name, tensor in recorded.items()} | answer
        )
