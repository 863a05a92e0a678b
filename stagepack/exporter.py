"""The whole road: capture, linearize, cut, pack."""

import importlib.metadata
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.bundle_writing import ModelOrigin, write_bundle
from stagepack.capture.dimension_names import dimension_names
from stagepack.capture.inputs import Inputs
from stagepack.capture.pretrained_model import is_transformers_model, model_files
from stagepack.capture.programs import Capture
from stagepack.capture.source import capture_source
from stagepack.format.manifest import Producer
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol
from stagepack.format.writer import TensorSource, check_output_path
from stagepack.graph.aliasing import written_weight_names
from stagepack.graph.assembly import canonical_graph
from stagepack.linearize import LinearizedProgram, linearize_program
from stagepack.linearize.example import EXAMPLE_SEED, record_example
from stagepack.linearize.tensors import tensor_bytes
from stagepack.partition.costs import graph_costs
from stagepack.partition.cut import Cut, WeightSharing
from stagepack.partition.cut_options import CutOptions
from stagepack.partition.policies import Policy

# Called with one line that says which part of the export begins.
Progress = Callable[[str], None]


def export(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    stages: int | None = None,
    split_at: Sequence[str] = (),
    policy: Policy | None = None,
    plan: Plan | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    shared: WeightSharing = "replicate",
    dynamic_shapes: Any = None,
    onnx: bool = False,
    overwrite: bool = False,
) -> Bundle:
    """Write a model as a bundle of pipeline stages.

    Args:
        model: a module, an exported program, a ``.pt2`` file, or a Hugging Face folder or hub name.
        args: example inputs by position, as ``torch.export.export`` takes them.
        kwargs: example inputs by name.
        out: the folder to write; it must not exist unless `overwrite` is true.
        stages: cut into this many stages, so that the slowest is as fast as possible.
        split_at: names of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan: of another bundle, or read by `stagepack.read_plan`.
        memory: with `stages`: what the device of each stage has, in bytes or as ``"24GiB"``.
        speeds: with `stages`: how fast the device of each stage is, relative to the others.
        shared: a weight that several stages use is held by each of them ("replicate"), or held by the first and sent at each
            call ("transmit").
        dynamic_shapes: the sizes that may change, as ``torch.export.export`` takes them.
        onnx: add ONNX files, as `stagepack.add_onnx` does. It is warned of stages that have no ONNX form.
        overwrite: replace a bundle that is there.

    Returns:
        The bundle, opened.

    Raises:
        CaptureError: ``torch.export`` cannot capture the model.
        UnsupportedError: the capture holds something that a bundle cannot hold.
        CutError: the model cannot be cut as asked.
        OutputExistsError: `out` exists.
        WriteError: the disk is full or the like.
    """
    check_output_path(out, overwrite=overwrite)
    cut_options = CutOptions(
        stages=stages,
        split_at=split_at,
        policy=policy,
        plan=plan,
        memory=memory,
        speeds=speeds,
        shared=shared,
    )
    inputs = Inputs(args=tuple(args), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    if onnx:
        from stagepack.onnx import add_onnx  # noqa: PLC0415 - packages that only this needs, missed before the work begins
    capture = capture_source(model, inputs)
    bundle = export_capture(capture, out=out, cut_options=cut_options, overwrite=overwrite)
    if not onnx:
        return bundle
    added = add_onnx(bundle, allow_ops={name for stage in bundle.stages for name in stage.namespaces})
    for number, reason in added.torch_only.items():
        warnings.warn(f"stage {number} runs in torch only: {reason}", stacklevel=2)
    return added.bundle


def export_capture(
    capture: Capture,
    *,
    out: str | os.PathLike[str],
    cut_options: CutOptions,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write a captured model as a bundle; see `export`."""
    check_output_path(out, overwrite=overwrite)
    progress("linearize")
    linear = _linearize(capture)
    progress("cut")
    stages, plan = _cut(linear, cut_options)
    progress("run the example")
    written = [linear.weights.tensors[name] for name in written_weight_names(linear.graph)]
    example = record_example(capture, linear.signature, written)
    progress("write")
    origin = _origin(linear, plan, model_files(capture.model))
    write_bundle(out, stages, _tensors(linear), example, origin, overwrite=overwrite)
    return Bundle(out)


def plan_capture(capture: Capture, cut_options: CutOptions) -> tuple[Cut, Plan, tuple[Symbol, ...]]:
    """The cut that `export_capture` would write, what it costs, and the sizes that may change.

    Raises:
        UnsupportedError: the capture holds something that a bundle cannot hold.
        CutError: the model cannot be cut as asked.
    """
    linear = _linearize(capture)
    return *_cut(linear, cut_options), linear.graph.symbols


def _linearize(capture: Capture) -> LinearizedProgram:
    forward = capture.model.forward if capture.model is not None else None
    # Stock from_pretrained looks for every persistent buffer in the files.
    store_zeros = is_transformers_model(capture.model)
    names = dimension_names(capture)
    return linearize_program(capture.program, names, forward, traced=capture.calls, store_zeros=store_zeros)


def _cut(linear: LinearizedProgram, cut_options: CutOptions) -> tuple[Cut, Plan]:
    graph = canonical_graph(linear.graph)
    costs = graph_costs(graph, {name: spec.nbytes for name, (spec, _) in linear.weights.stored.items()})
    return cut_options.cut(graph, costs, linear.split_positions)


def _tensors(linear: LinearizedProgram) -> TensorSource:
    stored = linear.weights.stored
    return TensorSource(
        specs={name: spec for name, (spec, _) in stored.items()}, read=lambda name: [tensor_bytes(stored[name][1]())]
    )


def _origin(linear: LinearizedProgram, plan: Plan, files: Mapping[str, bytes]) -> ModelOrigin:
    producer = Producer(stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0])
    return ModelOrigin(
        signature=linear.signature,
        symbols=linear.graph.symbols,
        producer=producer,
        plan=plan,
        device=linear.device,
        seed=EXAMPLE_SEED,
        files=files,
    )
