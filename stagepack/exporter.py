"""The whole road: capture, linearize, cut, pack."""

import importlib.metadata
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.capture import Capture, Inputs, capture_module, capture_program, dimension_names, load_program
from stagepack.errors import CaptureError, CutError
from stagepack.example import SEED, record_example
from stagepack.format.graph import Graph
from stagepack.format.manifest import Producer
from stagepack.format.reader import Bundle
from stagepack.format.writer import check_output
from stagepack.hugging_face import capture_pretrained, model_files
from stagepack.linearize import Linearized, linearize
from stagepack.linearize.tensors import to_bytes
from stagepack.pack import Origin, Tensors, pack
from stagepack.split.cut import cut
from stagepack.split.policy import Assignment, Policy, at_modules, at_positions, by_policy, evenly

# Called with one line that says which part of the export begins.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """Where to cut: one of the four, or none of them for the marks in the model's code, else one stage."""

    stages: int | None = None
    split_at: Sequence[str] = ()
    policy: Policy | None = None

    def __post_init__(self) -> None:
        """Refuse more than one way to cut."""
        given = [
            name
            for name, value in (("stages", self.stages), ("split_at", self.split_at), ("policy", self.policy))
            if value
        ]
        if len(given) > 1:
            raise CutError(f"expected one way to cut, found {' and '.join(given)}: choose one")

    def assign(self, graph: Graph, marks: Sequence[int], stored_bytes: Mapping[str, int]) -> Assignment:
        """The stage of each node.

        Raises:
            CutError: the graph cannot be cut so.
        """
        if self.policy is not None:
            return by_policy(graph, self.policy)
        if self.split_at:
            return at_modules(graph, self.split_at)
        if self.stages is not None:
            return evenly(graph, self.stages, stored_bytes)
        return at_positions(graph, marks)


def export(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str],
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    out: str | os.PathLike[str],
    stages: int | None = None,
    split_at: Sequence[str] = (),
    policy: Policy | None = None,
    dynamic_shapes: Any = None,
    overwrite: bool = False,
) -> Bundle:
    """Write a model as a bundle of pipeline stages.

    Args:
        model: a module, an exported program, a ``.pt2`` file, or a Hugging Face folder or hub name.
        args: example inputs by position, as ``torch.export.export`` takes them.
        kwargs: example inputs by name.
        out: the folder to write; it must not exist unless `overwrite` is true.
        stages: cut into this many stages of about equal weight bytes.
        split_at: names of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        dynamic_shapes: the sizes that may change, as ``torch.export.export`` takes them.
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
    check_output(out, overwrite=overwrite)
    inputs = Inputs(args=tuple(args), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
    capture = capture_source(model, inputs)
    return export_capture(
        capture, out=out, where=Where(stages=stages, split_at=split_at, policy=policy), overwrite=overwrite
    )


def capture_source(model: torch.nn.Module | ExportedProgram | str | os.PathLike[str], inputs: Inputs) -> Capture:
    """Capture whatever `export` takes as a model.

    Raises:
        CaptureError: it cannot be captured.
    """
    if isinstance(model, torch.nn.Module):
        return capture_module(model, inputs)
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".pt2"):
            return capture_program(load_program(model), inputs)
        return capture_pretrained(os.fspath(model), inputs)
    raise CaptureError(f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}")


def export_capture(
    capture: Capture,
    *,
    out: str | os.PathLike[str],
    where: Where,
    overwrite: bool = False,
    progress: Progress = lambda _: None,
) -> Bundle:
    """Write a captured model as a bundle; see `export`."""
    check_output(out, overwrite=overwrite)
    progress("linearize")
    forward = capture.model.forward if capture.model is not None else None
    linear = linearize(capture.program, dimension_names(capture), forward)
    progress("cut")
    stored_bytes = {name: spec.nbytes for name, (spec, _) in linear.weights.stored.items()}
    stages = cut(linear.graph, where.assign(linear.graph, linear.marks, stored_bytes))
    progress("run the example")
    example = record_example(capture, linear.signature)
    progress("write")
    pack(out, stages, _tensors(linear), example, _origin(linear, model_files(capture.model)), overwrite=overwrite)
    return Bundle(out)


def _tensors(linear: Linearized) -> Tensors:
    stored = linear.weights.stored
    return Tensors(
        specs={name: spec for name, (spec, _) in stored.items()}, read=lambda name: [to_bytes(stored[name][1]())]
    )


def _origin(linear: Linearized, files: Mapping[str, bytes]) -> Origin:
    producer = Producer(stagepack=importlib.metadata.version("stagepack"), torch=str(torch.__version__).split("+")[0])
    return Origin(
        signature=linear.signature,
        symbols=linear.graph.symbols,
        producer=producer,
        device=linear.device,
        seed=SEED,
        files=files,
    )
