"""Write a model as a bundle: capture, linearize, cut, write.

- Warnings for models exported in training mode by mistake, those that cannot be trained, and those that need `allow_ops` to be loaded.
"""

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from stagepack.bundle_writing import (
    EntryPointContent,
    ExampleRecorder,
    ModelOrigin,
    merged_tensors,
    read_entry_point,
    write_bundle,
)
from stagepack.capture.explicit_signature import wrapped_model
from stagepack.capture.hugging_face import NotIdenticalError, are_identical, only_parameters
from stagepack.capture.module_inputs import dimension_names, size_requests
from stagepack.capture.pretrained_model import is_transformers_model, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source import FORWARD
from stagepack.errors import CaptureError, ExportWarning, warn_caller
from stagepack.format.file_writing import Piece
from stagepack.format.graph import Graph
from stagepack.format.manifest import Producer
from stagepack.format.operator_permissions import bundle_permissions, needed_permissions
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.assembly import canonical_graph
from stagepack.linearize import LinearizedProgram, linearize_program
from stagepack.linearize.example import (
    EXAMPLE_SEED,
    INPUT_PREFIX,
    check_example,
    example_inputs,
    example_values,
    run_example,
    tensor_source,
    with_example_sizes,
)
from stagepack.linearize.tried_sizes import with_tried_sizes
from stagepack.linearize.weight_table import fill_modules, tensor_bytes
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import Partition, partition_graph
from stagepack.self_check import (
    LoadedDraft,
    check_other_inputs,
    check_program,
    check_second_call,
    refused_by_loaders,
    report_difference,
)

_SHOWN_MODULES = 3
# Buffers of torch's batch norms, in training mode updated by each call.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Called with the name of each step of the export before it begins.
Progress = Callable[[str], None]


def warn_of_training_mode(capture: Capture, program: LinearizedProgram, written_weights: tuple[str, ...]) -> None:
    """Warn if a model in training mode drops values at random or updates statistics of batches, as dropout and batch norm do."""
    if capture.model is None or not capture.model.training:
        return
    graph = program.graph
    # The last argument of these operators is whether they train.
    dropouts = [
        graph.scopes[node.scope].path
        for node in graph.nodes
        if graph.ops[node.op].random and graph.ops[node.op].name.endswith("dropout.default") and True in node.args
    ]
    statistics = [name for name in written_weights if name.endswith(_STATISTICS)]
    reasons = []
    if dropouts:
        reasons.append(f"drops values at random ({_shown(dropouts)})")
    if statistics:
        reasons.append(f"updates statistics of batches ({_shown(statistics)})")
    if reasons:
        warn_caller(
            ExportWarning(
                f"{capture.model_name} is exported in training mode: each call {' and '.join(reasons)}. Call model.eval() before the "
                "export, unless the bundle is to be trained",
            )
        )


def warn_of_lost_backward(capture: Capture) -> None:
    """Warn if a model calls functions with a backward of their own, which torch does not capture."""
    if capture.functions:
        class_names = [function.class_name for function in capture.functions]
        warn_caller(
            ExportWarning(
                f"{capture.model_name} calls {_shown(class_names)}, in {_shown([f.module_path for f in capture.functions])}: "
                "torch.export keeps what forward of a torch.autograd.Function does, and drops its backward. The bundle answers as the "
                "model does, but stagepack.train would use the gradients of forward. To train it, register the function as an operator, by "
                "torch.library.custom_op and register_autograd",
            )
        )


def warn_of_unlisted_operators(capture: Capture, graph: Graph) -> None:
    """Warn if a model uses operators that loaders do not run by default."""
    permissions = sorted(needed_permissions([graph]))
    if permissions:
        model_name = capture.model_name
        warn_caller(
            ExportWarning(
                f"{model_name} uses {_shown(permissions)}, which loaders do not run by default: whoever loads the bundle passes "
                f"allow_ops={permissions} (--allow-ops)",
            )
        )


def _shown(names: list[str] | tuple[str, ...]) -> str:
    distinct = list(dict.fromkeys(name or "the model itself" for name in names))
    more = f" and {len(distinct) - _SHOWN_MODULES} more" if len(distinct) > _SHOWN_MODULES else ""
    return ", ".join(distinct[:_SHOWN_MODULES]) + more


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """How a captured model is written.

    Attributes:
        assets: further files, see `stagepack.capture.assets.read_assets`.
        overwrite: replace a bundle that exists at the output.
        allow_difference: write a model whose captured program answers otherwise than the model does, with a warning.
        progress: called with the name of each step before it begins.
        compared: called with the largest difference between the answers of the model and of its bundle to the example, of each entry point.
    """

    assets: Mapping[str, bytes] = field(default_factory=dict)
    overwrite: bool = False
    allow_difference: bool = False
    progress: Progress = lambda _: None
    compared: Callable[[float], None] = lambda _: None


_DEFAULTS = ExportOptions()


def export_capture(
    capture: Capture, *, out: str | os.PathLike[str], cut_options: CutOptions, options: ExportOptions = _DEFAULTS
) -> Bundle:
    """Write a captured model as a bundle.

    out: the folder to write; it must not exist unless `options.overwrite` is true.
    """
    try:
        return export_entry_points({FORWARD: capture}, out=out, cut_options={FORWARD: cut_options}, options=options)
    except NotIdenticalError:
        assert capture.capture_loaded is not None
        return export_capture(capture.capture_loaded(), out=out, cut_options=cut_options, options=options)


def export_captures(
    captures: Mapping[str, Capture],
    *,
    out: str | os.PathLike[str],
    cut_options: CutOptions,
    options: ExportOptions = _DEFAULTS,
) -> Bundle:
    """Write a captured model as a bundle, or captured functions of one model, each cut in the same way.

    out: the folder to write; it must not exist unless `options.overwrite` is true.
    """
    if len(captures) == 1 and FORWARD in captures:
        return export_capture(captures[FORWARD], out=out, cut_options=cut_options, options=options)
    return export_entry_points(captures, out=out, cut_options=dict.fromkeys(captures, cut_options), options=options)


def export_entry_points(
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
    """
    check_output_path(out, overwrite=options.overwrite)
    contents, sources, devices = [], [], set()
    for name, capture in captures.items():
        options.progress(_step("linearize", name, captures))
        program = _linearize(capture)
        check_program(program)
        if name != FORWARD:
            program = program.without_unused_weights()
        warn_of_training_mode(capture, program, _written_weights(program))
        warn_of_lost_backward(capture)
        warn_of_unlisted_operators(capture, program.graph)
        if len(captures) > 1:
            program = program.with_constant_prefix(f"{name}.")
        options.progress(_step("cut", name, captures))
        partition = _cut(program, cut_options[name])
        contents.append(
            EntryPointContent(
                name=name,
                signature=program.signature,
                symbols=program.graph.symbols,
                guards=program.guards,
                cut=partition.cut,
                plan=partition.plan,
                seed=EXAMPLE_SEED,
                record_example=_example_recorder(capture, program, options),
            )
        )
        sources.append(_weight_source(capture, program))
        devices.add(program.device)
    if len(devices) > 1:
        raise CaptureError(
            f"expected all entry points on one device, found {', '.join(sorted(devices))}: move the model to one"
        )
    options.progress("write")
    origin = _origin(next(iter(captures.values())), devices.pop(), options.assets)
    write_bundle(out, contents, merged_tensors(sources), origin, overwrite=options.overwrite)
    return Bundle(out)


def _step(title: str, name: str, captures: Mapping[str, Capture]) -> str:
    return f"{title} {name}" if len(captures) > 1 else title


def _example_recorder(capture: Capture, program: LinearizedProgram, options: ExportOptions) -> ExampleRecorder:
    """What records the example. The model runs now, since it may fail; or, if its weights are deferred, when they are written."""
    if capture.deferred is not None:
        return partial(_record_from_files, capture, program, options)
    options.progress("run the example")
    written_tensors = [program.weights.tensors[weight] for weight in _written_weights(program)]
    expected = _model_answer(capture, program, options, written_tensors)
    return lambda draft: _record_example(
        LoadedDraft(draft, program.device, bundle_permissions(draft)), capture, program, expected, options
    )


def _model_answer(
    capture: Capture, program: LinearizedProgram, options: ExportOptions, written: Sequence[torch.Tensor] = ()
) -> dict[str, torch.Tensor]:
    """The answer of the model to the example, which its second call gives too, unless it writes weights."""
    changed: list[str] = []
    answer = run_example(capture, program, written, changed)
    if changed and not _written_weights(program):
        check_second_call(capture, changed, seed=EXAMPLE_SEED, is_allowed=options.allow_difference)
    return answer


def _record_from_files(
    capture: Capture, program: LinearizedProgram, options: ExportOptions, draft: Bundle
) -> TensorSource:
    """Record the example of a model whose weights are deferred: it runs with those of the weight files that are just written."""
    options.progress("run the example")
    assert capture.model is not None
    locations = read_entry_point(draft).locations
    fill_modules([capture.model], capture, program.weights, locations, _written_weights(program))
    expected = _model_answer(capture, program, options)
    stages = LoadedDraft(draft, program.device, bundle_permissions(draft))
    if capture.capture_loaded is not None:
        for inputs in (capture.inputs, *capture.further_inputs):
            example = replace(capture, inputs=only_parameters(inputs, capture.inputs))
            model_answer = expected if inputs is capture.inputs else run_example(example, program)
            answer = stages.run(example_inputs(example, program), EXAMPLE_SEED)
            if not are_identical(model_answer, answer):
                raise NotIdenticalError
    return _record_example(stages, capture, program, expected, options)


def _record_example(
    stages: LoadedDraft,
    capture: Capture,
    program: LinearizedProgram,
    expected: Mapping[str, torch.Tensor],
    options: ExportOptions,
) -> TensorSource:
    """The inputs of the example and the answer of the loaded stages, which is compared with that of the model."""
    options.progress("replay the example")
    inputs = example_inputs(capture, program)
    answer = stages.run(inputs, EXAMPLE_SEED)
    difference = stages.difference(answer, expected)
    options.compared(difference.largest)
    if not difference.within:
        values = tuple(example_values(capture, program).values())
        report_difference(capture, values, difference.largest, seed=EXAMPLE_SEED, is_allowed=options.allow_difference)
    elif capture.questions:
        written = [program.weights.tensors[weight] for weight in _written_weights(program)]
        check_other_inputs(
            stages, capture, program, written=written, seed=EXAMPLE_SEED, is_allowed=options.allow_difference
        )
    recorded = {name: tensor.contiguous() for name, tensor in inputs.items()}
    if any(tensor is not inputs[name] for name, tensor in recorded.items()):
        # Random numbers are drawn in the order of the memory, and a file has tensors without strides.
        answer = stages.run(recorded, EXAMPLE_SEED)
    return tensor_source({f"{INPUT_PREFIX}{name}": tensor for name, tensor in recorded.items()} | answer)


def _written_weights(program: LinearizedProgram) -> tuple[str, ...]:
    return GraphAnalysis(program.graph).written_weight_names


def plan_capture(capture: Capture, cut_options: CutOptions) -> tuple[Partition, tuple[Symbol, ...]]:
    """Make the cut that `export_capture` would write."""
    program = _linearize(capture)
    return _cut(program, cut_options), program.graph.symbols


def _linearize(capture: Capture) -> LinearizedProgram:
    program = linearize_program(
        capture.program,
        dimension_names(capture),
        None if capture.model is None else capture.model.forward,
        smallest_sizes={symbol_name: request.smallest for symbol_name, request in size_requests(capture).items()},
        traced_calls=capture.calls,
        # from_pretrained of transformers expects every persistent buffer in the files.
        store_zeros=capture.model is not None and is_transformers_model(wrapped_model(capture.model)),
        data_of=capture.data,
    )
    if capture.model is not None:
        return with_tried_sizes(capture, program)
    # An exported program has the inputs that it was traced with, or others that the caller passes.
    with refused_by_loaders():
        program = with_tried_sizes(capture, with_example_sizes(capture, program))
        check_example(capture, program)
    return program


def _cut(program: LinearizedProgram, cut_options: CutOptions) -> Partition:
    graph = canonical_graph(program.graph)
    weight_bytes = {tensor: spec.nbytes for tensor, (spec, _) in program.weights.stored.items()}
    return partition_graph(graph, graph_costs(graph, weight_bytes), cut_options, program.split_positions)


def _weight_source(capture: Capture, program: LinearizedProgram) -> TensorSource:
    stored = program.weights.stored

    def read(stored_name: str) -> list[Piece]:
        tensor = program.weights.tensors.get(stored_name)
        location = None if tensor is None or not tensor.is_contiguous() else capture.location(tensor)
        return [tensor_bytes(stored[stored_name].contiguous())] if location is None else [location]

    return TensorSource(specs={stored_name: spec for stored_name, (spec, _) in stored.items()}, read=read)


def _origin(capture: Capture, device: str, assets: Mapping[str, bytes]) -> ModelOrigin:
    producer = Producer(stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0])
    return ModelOrigin(producer=producer, device=device, files={**model_files(capture.model), **assets})
