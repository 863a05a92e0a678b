"""Stages that run compiled, at the first call or ahead of time."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Compile, PrepareOptions
from stagepack_loaders.torch.aot import CompiledFolder, CompiledPart, compile_parts
from stagepack_loaders.torch.compile import Compiler
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.stage import PreparedTorchStage, prepare_stages


def compile_stages(
    bundle: Bundle,
    stages: Mapping[int, PreparedTorchStage],
    compile: Compile,
    compiled: str | os.PathLike[str] | None,
) -> dict[int, PreparedTorchStage]:
    """Return stages that run compiled; see `stagepack_loaders.base.Runtime.compile_stages`.

    Raises:
        CompiledError: `compiled` is of another bundle, for another device or torch, or damaged.
        OptionError: `compile` is none of its values, or both ways are asked for.
    """
    if compiled is None:
        compiler = Compiler(compile)
        return {
            number: replace(stage, run=compiler.stage(stage.module, stage.graph)) for number, stage in stages.items()
        }
    if compile:
        raise OptionError("compile and compiled exclude each other: give one of them")
    folder = CompiledFolder(compiled, bundle)
    return {
        number: replace(stage, run=folder.stage(number, stage.module, stage.graph, stage.device))
        for number, stage in stages.items()
    }


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
    target = parse_device(device)
    placement = dict.fromkeys(range(len(opened.stages)), target)
    prepared = prepare_stages(opened, placement, PrepareOptions(allow_ops=allow_ops))
    stages = [(stage.module, stage.graph) for stage in prepared.values()]
    return compile_parts(opened, stages, target, out, progress)
