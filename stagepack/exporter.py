"""Write a model as a bundle: capture, linearize, cut, write."""

import importlib
import importlib.metadata
import os
from collections.abc import Callable, Mapping
from functools import partial

import torch

from stagepack.bundle_content import merged_tensors
from stagepack.bundle_writing import EntryPointContent, ExampleRecorder, ModelOrigin, write_bundle
from stagepack.capture.assets import NO_ASSETS
from stagepack.capture.dimension_names import dimension_names, size_requests
from stagepack.capture.hugging_face import AnswerDiffersError, answers_alike, are_identical, only_parameters
from stagepack.capture.model_run import run_model
from stagepack.capture.pretrained_model import is_transformers_model, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source_argument import FORWARD
from stagepack.errors import CaptureError
from stagepack.export_warnings import warn_of_lost_backward, warn_of_training_mode, warn_of_unlisted_operators
from stagepack.format.file_writing import Piece
from stagepack.format.manifest import Producer
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.assembly import canonical_graph
from stagepack.linearize import LinearizedProgram, linearize_program
from stagepack.linearize.example import EXAMPLE_SEED, example_tensors, run_example
from stagepack.linearize.filled_model import TensorLocations, fill_modules
from stagepack.linearize.tensor_memory import tensor_bytes
from stagepack.linearize.tried_sizes import with_tried_sizes
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import Partition, partition_graph

# Called with the name of each step of the export before it begins.
Progress = Callable[[str], None]


def export_capture(
    capture: Capture,
    *,
    out: str | os.PathLike[str],
    cut_options: CutOptions,
    assets: Mapping[str, bytes] = NO_ASSETS,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write a captured model as a bundle.

    Args:
        capture: the captured model.
        out: the folder to write; it must not exist unless `overwrite` is true.
        cut_options: where to cut.
        assets: see `stagepack.capture.assets.read_assets`.
        overwrite: replace a bundle that exists at `out`.
        progress: called with the name of each step before it begins.

    Returns:
        The new bundle, opened.

    Raises:
        CaptureError, UnsupportedError, CutError, OutputExistsError, WriteError: see `export`.
    """
    try:
        return export_entry_points(
            {FORWARD: capture},
            out=out,
            cut_options={FORWARD: cut_options},
            assets=assets,
            overwrite=overwrite,
            progress=progress,
        )
    except AnswerDiffersError:
        assert capture.capture_loaded is not None
        loaded = capture.capture_loaded()
        return export_capture(
            loaded, out=out, cut_options=cut_options, assets=assets, overwrite=overwrite, progress=progress
        )


def export_captures(
    captures: Mapping[str, Capture],
    *,
    out: str | os.PathLike[str],
    cut_options: CutOptions,
    assets: Mapping[str, bytes] = NO_ASSETS,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write a captured model as a bundle, or captured functions of one model, each cut in the same way.

    Args:
        captures: the captured functions, by the name of the entry point.
        out: the folder to write; it must not exist unless `overwrite` is true.
        cut_options: where to cut each of them.
        assets: see `stagepack.capture.assets.read_assets`.
        overwrite: replace a bundle that exists at `out`.
        progress: called with the name of each step before it begins.

    Returns:
        The new bundle, opened.

    Raises:
        CaptureError, UnsupportedError, CutError, OutputExistsError, WriteError: see `export`.
    """
    if len(captures) == 1 and FORWARD in captures:
        return export_capture(
            captures[FORWARD], out=out, cut_options=cut_options, assets=assets, overwrite=overwrite, progress=progress
        )
    options = dict.fromkeys(captures, cut_options)
    return export_entry_points(
        captures, out=out, cut_options=options, assets=assets, overwrite=overwrite, progress=progress
    )


def export_entry_points(
    captures: Mapping[str, Capture],
    *,
    out: str | os.PathLike[str],
    cut_options: Mapping[str, CutOptions],
    assets: Mapping[str, bytes] = NO_ASSETS,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write captured functions of one model as the entry points of a bundle.

    Args:
        captures: the captured functions, by the name of the entry point. A weight that several of them use has one name in all.
        out: the folder to write; it must not exist unless `overwrite` is true.
        cut_options: where to cut each of them, by name.
        assets: see `stagepack.capture.assets.read_assets`.
        overwrite: replace a bundle that exists at `out`.
        progress: called with the name of each step before it begins.

    Returns:
        The new bundle, opened.

    Raises:
        AnswerDiffersError: a captured program whose weights are deferred answers otherwise than the model.
        CaptureError, UnsupportedError, CutError, OutputExistsError, WriteError: see `export`.
    """
    check_output_path(out, overwrite=overwrite)
    contents, sources, devices = [], [], set()
    for name, capture in captures.items():
        progress(_step("linearize", name, captures))
        program = _linearize(capture)
        if name != FORWARD:
            program = program.without_unused_weights()
        warn_of_training_mode(capture, program, _written_weights(program))
        warn_of_lost_backward(capture)
        warn_of_unlisted_operators(capture, program.graph)
        if len(captures) > 1:
            program = program.with_constant_prefix(f"{name}.")
        progress(_step("cut", name, captures))
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
                record_example=_example_recorder(capture, program, progress),
            )
        )
        sources.append(_weight_source(capture, program))
        devices.add(program.device)
    if len(devices) > 1:
        raise CaptureError(
            f"expected all entry points on one device, found {', '.join(sorted(devices))}: move the model to one"
        )
    progress("write")
    origin = _origin(next(iter(captures.values())), devices.pop(), assets)
    write_bundle(out, contents, merged_tensors(sources), origin, overwrite=overwrite)
    return Bundle(out)


def _step(title: str, name: str, captures: Mapping[str, Capture]) -> str:
    return f"{title} {name}" if len(captures) > 1 else title


def _example_recorder(capture: Capture, program: LinearizedProgram, progress: Progress) -> ExampleRecorder:
    """What records the example: now, since it may fail, or where the weights are deferred when they are written."""
    if capture.deferred is not None:
        return partial(_record_from_files, capture, program, progress)
    progress("run the example")
    written_tensors = [program.weights.tensors[weight] for weight in _written_weights(program)]
    example = example_tensors(capture, program.signature, run_example(capture, written_tensors))
    return lambda _: example


def _record_from_files(
    capture: Capture, program: LinearizedProgram, progress: Progress, locations: TensorLocations
) -> TensorSource:
    """Run a model whose weights are deferred on its example, from the weight files that are just written.

    Raises:
        AnswerDiffersError: the captured program answers otherwise than the model.
        CaptureError: the model fails.
    """
    progress("run the example")
    assert capture.model is not None
    compared = [] if capture.capture_loaded is None else [capture.program.module()]
    fill_modules([capture.model, *compared], capture, program.weights, locations, _written_weights(program))
    answer = run_example(capture)
    for module in compared:
        if not are_identical(answer, run_model(module, capture.inputs, seed=EXAMPLE_SEED)):
            raise AnswerDiffersError
        for further_inputs in capture.further_inputs:
            if not answers_alike(capture.model, module, only_parameters(further_inputs, capture.inputs)):
                raise AnswerDiffersError
    return example_tensors(capture, program.signature, answer)


def _written_weights(program: LinearizedProgram) -> tuple[str, ...]:
    return GraphAnalysis(program.graph).written_weight_names


def plan_capture(capture: Capture, cut_options: CutOptions) -> tuple[Partition, tuple[Symbol, ...]]:
    """Make the cut that `export_capture` would write.

    Args:
        capture: the captured model.
        cut_options: where to cut.
        assets: see `stagepack.capture.assets.read_assets`.

    Returns:
        The cut with its costs, and the dynamic sizes of the model.

    Raises:
        UnsupportedError: the captured program contains something that a bundle cannot represent.
        CutError: the model cannot be cut as requested.
    """
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
        store_zeros=is_transformers_model(capture.model),
        data_of=capture.data,
    )
    return with_tried_sizes(capture, program)


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
