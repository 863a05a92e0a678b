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

from stagepack.bundle_writing import ExampleRecorder, ModelOrigin, write_bundle
from stagepack.capture.dimension_names import dimension_names
from stagepack.capture.hugging_face import AnswerDiffersError, are_identical
from stagepack.capture.inputs import Inputs
from stagepack.capture.model_run import run_model
from stagepack.capture.pretrained_model import is_transformers_model, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source import capture_source
from stagepack.capture.source_argument import capture_with_checkpoint
from stagepack.errors import OptionError
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
from stagepack.weight_replacement import replace_weights

# Called with the name of each step of the export before it begins.
Progress = Callable[[str], None]


def export(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str] | Callable[[], torch.nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    weights: str | os.PathLike[str] | None = None,
    graph_from: str | os.PathLike[str] | Bundle | None = None,
    stages: int | None = None,
    split_at: Sequence[str] = (),
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
        weights: a checkpoint of the module that `model` makes: a ``.safetensors`` file, a file of ``torch.save``, an index of sharded
            files, or a folder of ``torch.distributed.checkpoint``, of which torch reads a part with pickle. As those of a Hugging Face
            folder, its weights are never in memory together.
        graph_from: a bundle of the same model with other weights: nothing is captured, its graphs and its cut are used, and `model` is
            the new checkpoint, or a Hugging Face folder or hub name.
        stages: the number of stages. The cut makes the slowest stage as fast as possible.
        split_at: paths of modules, such as ``"layers.8"``; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan of another bundle (``bundle.manifest.plan``), or from `stagepack.read_plan`.
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
    cut_options = CutOptions(
        stages=stages,
        split_at=split_at,
        policy=policy,
        plan=plan,
        memory=memory,
        speeds=speeds,
        profile=profile,
        shared=shared,
    )
    inputs = _example_inputs(args, kwargs, dynamic_shapes)
    if onnx:
        # Packages that only this needs are missed before the work begins.
        importlib.import_module("stagepack.onnx")
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


def _with_onnx(bundle: Bundle) -> Bundle:
    """Add ONNX files; warn of stages that have none."""
    from stagepack.onnx import add_onnx  # noqa: PLC0415 - packages that only this needs

    namespaces = {namespace for stage in bundle.stages for namespace in stage.namespaces}
    conversion = add_onnx(bundle, allow_ops=namespaces)
    for stage_number, reason in conversion.torch_only.items():
        warnings.warn(f"stage {stage_number} runs in torch only: {reason}", stacklevel=3)
    return conversion.bundle


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
    check_output_path(out, overwrite=overwrite)
    progress("linearize")
    program = _linearize(capture)
    progress("cut")
    partition = _cut(program, cut_options)
    origin = _origin(program, partition.plan, model_files(capture.model))
    recorder: ExampleRecorder = partial(_record_from_files, capture, program, progress)
    if capture.deferred is None:
        # Before the weights are written, since it may fail.
        progress("run the example")
        written_tensors = [program.weights.tensors[weight] for weight in _written_weights(program)]
        example = example_tensors(capture, program.signature, run_example(capture, written_tensors))
        recorder = lambda _: example  # noqa: E731
    progress("write")
    try:
        write_bundle(out, partition.cut, _weight_source(capture, program), recorder, origin, overwrite=overwrite)
    except AnswerDiffersError:
        assert capture.capture_loaded is not None
        loaded = capture.capture_loaded()
        return export_capture(loaded, out=out, cut_options=cut_options, overwrite=overwrite, progress=progress)
    return Bundle(out)


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


def _origin(program: LinearizedProgram, plan: Plan, files: Mapping[str, bytes]) -> ModelOrigin:
    producer = Producer(stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0])
    return ModelOrigin(
        signature=program.signature,
        symbols=program.graph.symbols,
        producer=producer,
        plan=plan,
        device=program.device,
        seed=EXAMPLE_SEED,
        files=files,
    )
