"""Stages that run compiled, at the first call or ahead of time."""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from stagepack.format.reader import Bundle
from stagepack_loaders.torch.aot import CompiledFolder, CompiledPart, compile_parts
from stagepack_loaders.torch.compile import Compile, Compiler
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.stage import Prepared, prepare


def speed_up(
    bundle: Bundle, prepared: Sequence[Any], compile: Compile, compiled: str | os.PathLike[str] | None
) -> list[Prepared]:
    """Prepared stages that will run compiled; see `stagepack.load`.

    Raises:
        CompiledError: `compiled` is of another bundle, for another device or torch, or damaged.
        ValueError: `compile` is none of its values, both ways are asked for, or a stage is not of torch.
    """
    if not all(isinstance(stage, Prepared) for stage in prepared):
        raise ValueError("compile and compiled are for stages in torch: leave them out, or ask for runtime='torch'")
    if compiled is None:
        compiler = Compiler(compile)
        return [replace(stage, run=compiler.stage(stage.module, stage.graph)) for stage in prepared]
    if compile:
        raise ValueError("compile and compiled exclude each other: give one of them")
    folder = CompiledFolder(compiled, bundle)
    return [
        replace(stage, run=folder.stage(stage.number, stage.module, stage.graph, stage.device)) for stage in prepared
    ]


def compile_ahead(
    bundle: str | os.PathLike[str] | Bundle,
    out: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    allow_ops: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[CompiledPart]:
    """Compile each distinct part of a bundle with AOTInductor, for `load(..., compiled=out)`. Reads no weights.

    A part is a region that a stage calls several times; or a whole stage, when most of it lies outside of such regions. What
    cannot be compiled runs as it is; the result says why.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        out: the folder to write; it must not exist.
        device: one of the kind that the code shall run on.
        allow_ops: namespaces of custom operators that may run.
        progress: is told what is compiled.

    Raises:
        OutputExistsError: `out` exists.
        WriteError: it cannot be written.
        DigestError, FormatError, DeviceError, OperatorError: see `load`.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    placed = dict.fromkeys(range(len(opened.stages)), device)
    stages = [(stage.module, stage.graph) for stage in prepare(opened, placed, allow_ops=allow_ops).values()]
    return compile_parts(opened, stages, parse_device(device), out, progress)
