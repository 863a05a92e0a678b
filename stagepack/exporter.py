"""Write a model as a bundle: capture, linearize, cut, write."""

import importlib
import importlib.metadata
import os
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.bundle_content import merged_tensors
from stagepack.bundle_writing import EntryPointContent, ExampleRecorder, ModelOrigin, write_bundle
from stagepack.capture.dimension_names import dimension_names
from stagepack.capture.entry_points import capture_entry_points
from stagepack.capture.hugging_face import AnswerDiffersError, are_identical
from stagepack.capture.inputs import Inputs
from stagepack.capture.model_run import run_model
from stagepack.capture.pretrained_model import is_transformers_model, load_pretrained, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source import capture_source
from stagepack.capture.source_argument import capture_with_checkpoint
from stagepack.errors import CaptureError, OptionError
from stagepack.format.file_writing import Piece
from stagepack.format.manifest import Producer
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.assembly import canonical_graph
from stagepack.linearize import LinearizedProgram, linearize_program
from stagepack.linearize.example import EXAMPLE_SEED, example_tensors, run_example
from stagepack.linearize.filled_model import TensorLocations, fill_modules
from stagepack.linearize.tensor_memory import tensor_bytes
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut import WeightSharing
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.partitioner import Partition, partition_graph
from stagepack.partition.policies import Policy
from stagepack.partition.profile import Profile
from stagepack.torch_internals import uncompiled_module
from stagepack.weight_replacement import replace_weights

# The name of the only entry point of a module.
_FORWARD = "forward"

# Called with the name of each step of the export before it begins.
Progress = Callable[[str], None]


def export(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str] | Callable[[], torch.nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    entry_points: Mapping[str, Inputs] | None = None,
    weights: str | os.PathLike[str] | None = None,
    graph_from: str | os.PathLike[str] | Bundle | None = None,
    stages: int | Mapping[str, int] | None = None,
    split_at: Sequence[str] | Mapping[str, Sequence[str]] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profile: Profile | None = None,
    shared: WeightSharing = "replicate",
    dynamic_shapes: Any = None,
    onnx: bool = False,
    allow_ops: Collection[str] = (),
    overwrite: bool = False,
) -> Bundle:
    """Write a model as a bundle of pipeline stages.

    The model is captured by ``torch.export.export``, cut, and run once on its example, so that every loader can check itself against the
    answer. The model and the inputs are unchanged afterwards. At most one of `stages`, `split_at`, `policy` and `plan` says where to
    cut; without them, the model is cut at `stagepack.split_here` in its code, or is one stage.

    Args:
        model: a module, an exported program, a ``.pt2`` file, or a Hugging Face folder or hub name. Of a module that ``torch.compile``
            returned, the original module is exported. Do not pass a ``.pt2`` file that you do not trust: torch reads a part of it
            with pickle. With `weights`, a function without arguments that makes the module, such as its class.
        args: example inputs by position. An exported program and a Hugging Face model may do without example inputs.
        kwargs: example inputs by name.
        out: the folder to write; it must not exist unless `overwrite` is true.
        entry_points: the example inputs of several functions of `model`, by their paths in it: a method (``"encode"``), a module
            (``"text_model"``), or a method of a module (``"vae.decode"``). Each becomes an entry point of the bundle, named by its path
            with ``_`` in the place of each dot, with its own cut. Weights that several of them use are stored once.
        weights: a checkpoint of the module that `model` makes: a ``.safetensors`` file, a file of ``torch.save``, an index of sharded
            files, or a folder of ``torch.distributed.checkpoint``, of which torch reads a part with pickle. As those of a Hugging Face
            folder, its weights are never in memory together.
        graph_from: a bundle of the same model with other weights: nothing is captured, its graphs and its cut are used, and `model` is
            the new checkpoint, or a Hugging Face folder or hub name.
        stages: the number of stages; with `entry_points`, of each, or a dict from the names of some to theirs. The cut makes the slowest
            stage as fast as possible.
        split_at: paths of modules, such as ``"layers.8"``; each starts a stage. With `entry_points`, a dict from names to such lists.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan of another bundle (``bundle.entry_point.plan``), or from `stagepack.read_plan`.
        memory: with `stages`: the memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with `stages`: the speed of the device of each stage, relative to the others.
        profile: with `stages`: measured times of the model's operators, from `stagepack.read_profile`, in the place of estimates.
        shared: how several stages use one weight: each of them stores it (``"replicate"``), or the first one stores it and sends it at
            each call (``"transmit"``).
        dynamic_shapes: the dimensions that may change, as ``torch.export.export`` takes them; parameters may be left out.
        onnx: also add ONNX files, as `stagepack.add_onnx` does. A stage that has no ONNX form is named by a warning.
        allow_ops: with `graph_from`: the namespaces of custom operators of that bundle that may run.
        overwrite: replace a bundle that exists at `out`.

    Returns:
        The new bundle, opened.

    Raises:
        CaptureError: the model cannot be loaded, captured or run on its example.
        UnsupportedError: the captured program contains something that a bundle cannot represent.
        CutError: the model cannot be cut as requested.
        OptionError: `args` is not a tuple, or `kwargs` not a dict, or `model` is not a function though there are `weights`.
        OutputExistsError: `out` exists and `overwrite` is false, or it is not a bundle.
        WriteError: the bundle cannot be written.
        MissingPackageError: a Hugging Face model needs transformers, or `onnx` needs ONNX packages, which are not installed.

    Examples:
        Two stages, for batches of 1 to 64:

        >>> batch = torch.export.Dim("batch", min=1, max=64)
        >>> stagepack.export(model, (x,), out="m.stagepack", stages=2, dynamic_shapes={"x": {0: batch}})

        Stages that begin at two layers of a Hugging Face model:

        >>> stagepack.export("./llama", out="llama.stagepack", split_at=["model.layers.8", "model.layers.16"])

        A fine-tuned checkpoint, with the graphs of the bundle of the original one:

        >>> stagepack.export("./llama-tuned", graph_from="llama.stagepack", out="tuned.stagepack")

        A module of which the weights are in a file:

        >>> stagepack.export(Net, (x,), weights="net.safetensors", out="net.stagepack")
    """
    check_output_path(out, overwrite=overwrite)
    further_options: dict[str, Any] = {
        "policy": policy,
        "plan": plan,
        "memory": memory,
        "speeds": speeds,
        "profile": profile,
    }
    inputs = _example_inputs(args, kwargs, dynamic_shapes)
    if onnx:
        # Packages that only this needs are missed before the work begins.
        importlib.import_module("stagepack.onnx")
    if entry_points is not None:
        if inputs != Inputs() or weights is not None or graph_from is not None or any(further_options.values()):
            raise OptionError(
                "entry_points: each has its own inputs, and is cut by stages or split_at: leave out args, kwargs, dynamic_shapes, weights, "
                "graph_from and the other ways to cut"
            )
        captures = capture_entry_points(_loaded_module(model), entry_points)
        options_of_entry_points = _entry_point_cut_options(captures, stages, split_at, shared)
        bundle = export_entry_points(captures, out=out, cut_options=options_of_entry_points, overwrite=overwrite)
        return _with_onnx(bundle) if onnx else bundle
    if isinstance(stages, Mapping) or isinstance(split_at, Mapping):
        raise OptionError("stages, split_at: a dict is for entry_points, which are missing")
    cut_options = CutOptions(stages=stages, split_at=split_at, shared=shared, **further_options)
    if graph_from is not None:
        if cut_options != CutOptions() or inputs != Inputs() or weights is not None:
            raise OptionError("graph_from: the inputs and the cut are those of the bundle: leave out the other options")
        if not isinstance(model, str | os.PathLike):
            raise OptionError(f"graph_from: expected the path of a checkpoint, found {type(model).__name__}")
        bundle = replace_weights(graph_from, model, out=out, allow_ops=allow_ops, overwrite=overwrite)
        return _with_onnx(bundle) if onnx else bundle
    capture = capture_source(model, inputs) if weights is None else _capture_with_weights(model, inputs, weights)  # type: ignore[arg-type]
    bundle = export_capture(capture, out=out, cut_options=cut_options, overwrite=overwrite)
    return _with_onnx(bundle) if onnx else bundle


def _loaded_module(model: object) -> torch.nn.Module:
    """The module whose functions become entry points."""
    if isinstance(model, str | os.PathLike):
        loaded: torch.nn.Module = load_pretrained(os.fspath(model))
        return loaded
    if not isinstance(model, torch.nn.Module):
        raise OptionError(
            f"entry_points: expected a torch.nn.Module or a Hugging Face folder or hub name, found {type(model).__name__}"
        )
    return uncompiled_module(model)


def _entry_point_cut_options(
    names: Collection[str],
    stages: int | Mapping[str, int] | None,
    split_at: Sequence[str] | Mapping[str, Sequence[str]],
    shared: WeightSharing,
) -> dict[str, CutOptions]:
    """Where to cut each entry point."""
    if split_at and not isinstance(split_at, Mapping):
        raise OptionError("split_at: with entry_points, expected a dict from their names to lists of modules")
    stages_of_name = stages if isinstance(stages, Mapping) else {}
    splits_of_name = split_at if isinstance(split_at, Mapping) else {}
    for option, options_of_name in (("stages", stages_of_name), ("split_at", splits_of_name)):
        for name in options_of_name:
            if name not in names:
                raise OptionError(f"{option}: expected names among {', '.join(names)}, found {name!r}")
    # Split points in the code of the model hold where neither option does.
    stage_count = None if isinstance(stages, Mapping) else stages
    return {
        name: CutOptions(
            stages=stages_of_name.get(name, None if name in splits_of_name else stage_count),
            split_at=splits_of_name.get(name, ()),
            shared=shared,
        )
        for name in names
    }


def _with_onnx(bundle: Bundle) -> Bundle:
    """Add ONNX files; warn of stages that have none."""
    from stagepack.onnx import add_onnx  # noqa: PLC0415 - packages that only this needs

    for entry_point in bundle.entry_points:
        namespaces = {namespace for stage in entry_point.stages for namespace in stage.namespaces}
        conversion = add_onnx(Bundle(bundle.path).select(entry_point.name), allow_ops=namespaces)
        prefix = f"{entry_point.name}, " if len(bundle.entry_points) > 1 else ""
        for stage_number, reason in conversion.torch_only.items():
            warnings.warn(f"{prefix}stage {stage_number} runs in torch only: {reason}", stacklevel=3)
    return Bundle(bundle.path)


def export_capture(
    capture: Capture,
    *,
    out: str | os.PathLike[str],
    cut_options: CutOptions,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write a captured model as a bundle.

    Args:
        capture: the captured model.
        out: the folder to write; it must not exist unless `overwrite` is true.
        cut_options: where to cut.
        overwrite: replace a bundle that exists at `out`.
        progress: called with the name of each step before it begins.

    Returns:
        The new bundle, opened.

    Raises:
        CaptureError, UnsupportedError, CutError, OutputExistsError, WriteError: see `export`.
    """
    try:
        return export_entry_points(
            {_FORWARD: capture}, out=out, cut_options={_FORWARD: cut_options}, overwrite=overwrite, progress=progress
        )
    except AnswerDiffersError:
        assert capture.capture_loaded is not None
        loaded = capture.capture_loaded()
        return export_capture(loaded, out=out, cut_options=cut_options, overwrite=overwrite, progress=progress)


def export_entry_points(
    captures: Mapping[str, Capture],
    *,
    out: str | os.PathLike[str],
    cut_options: Mapping[str, CutOptions],
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write captured functions of one model as the entry points of a bundle.

    Args:
        captures: the captured functions, by the name of the entry point. A weight that several of them use has one name in all.
        out: the folder to write; it must not exist unless `overwrite` is true.
        cut_options: where to cut each of them, by name.
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
        if len(captures) > 1:
            program = program.with_constant_prefix(f"{name}.")
        progress(_step("cut", name, captures))
        partition = _cut(program, cut_options[name])
        contents.append(
            EntryPointContent(
                name=name,
                signature=program.signature,
                symbols=program.graph.symbols,
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
    origin = _origin(next(iter(captures.values())), devices.pop())
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
    return example_tensors(capture, program.signature, answer)


def _written_weights(program: LinearizedProgram) -> tuple[str, ...]:
    return GraphAnalysis(program.graph).written_weight_names


def plan_capture(capture: Capture, cut_options: CutOptions) -> tuple[Partition, tuple[Symbol, ...]]:
    """Make the cut that `export_capture` would write.

    Args:
        capture: the captured model.
        cut_options: where to cut.

    Returns:
        The cut with its costs, and the dynamic sizes of the model.

    Raises:
        UnsupportedError: the captured program contains something that a bundle cannot represent.
        CutError: the model cannot be cut as requested.
    """
    program = _linearize(capture)
    return _cut(program, cut_options), program.graph.symbols


def _example_inputs(args: Any, kwargs: Any, dynamic_shapes: Any) -> Inputs:
    # A tensor is a sequence too: its rows would become the arguments.
    if not isinstance(args, tuple | list):
        raise OptionError(f"args: expected a tuple of example inputs, such as (x,), found {type(args).__name__}")
    if not isinstance(kwargs, Mapping | None):
        raise OptionError(f"kwargs: expected a dict of example inputs by name, found {type(kwargs).__name__}")
    return Inputs(args=tuple(args), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def _capture_with_weights(model: object, inputs: Inputs, weights: str | os.PathLike[str]) -> Capture:
    if isinstance(model, torch.nn.Module) or not callable(model):
        raise OptionError(
            f"weights: expected a function that makes the module, such as its class, found {type(model).__name__}"
        )
    return capture_with_checkpoint(lambda: (model(), None), inputs, weights)


def _linearize(capture: Capture) -> LinearizedProgram:
    return linearize_program(
        capture.program,
        dimension_names(capture),
        None if capture.model is None else capture.model.forward,
        traced_calls=capture.calls,
        # from_pretrained of transformers expects every persistent buffer in the files.
        store_zeros=is_transformers_model(capture.model),
        data_of=capture.data,
    )


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


def _origin(capture: Capture, device: str) -> ModelOrigin:
    producer = Producer(stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0])
    return ModelOrigin(producer=producer, device=device, files=model_files(capture.model))
