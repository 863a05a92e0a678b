"""Compile the stages of a bundle: at the first call, or ahead of time into a folder."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace

import torch

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack.opening import BundleSource, errors_name_bundle, opened
from stagepack_loaders.base import Compile, PrepareOptions
from stagepack_loaders.torch.ahead_of_time import compile_to_folder
from stagepack_loaders.torch.compiled_folder import CompiledFolder, CompiledUnit
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.prepare import PreparedTorchStage, prepare_stages
from stagepack_loaders.torch.torch_compile import TorchCompiler


def compile_stages(
    bundle: Bundle,
    stages: Mapping[int, PreparedTorchStage],
    compile: Compile,
    compiled: str | os.PathLike[str] | None,
) -> dict[int, PreparedTorchStage]:
    """Return stages that run compiled; see `stagepack_loaders.base.Runtime.compile_stages`."""
    if compile and compiled is not None:
        raise OptionError("compile and compiled exclude each other: pass one of them")
    torch_compiler = TorchCompiler(compile)
    compiled_folder = None if compiled is None else CompiledFolder(compiled, bundle)
    ready_stages = {}
    for stage_number, stage in stages.items():
        graph_module, graph = stage.code.graph_module, stage.code.graph
        if compiled_folder is None:
            module = torch_compiler.compile_stage(graph_module, graph)
        else:
            module = compiled_folder.load_stage(stage_number, graph_module, graph, stage.device)
        ready_stages[stage_number] = replace(stage, code=replace(stage.code, compiled_module=module))
    return ready_stages


@errors_name_bundle
def compile_ahead(
    bundle: BundleSource,
    out: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    allow_ops: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[CompiledUnit]:
    """Compile each distinct unit of a bundle with AOTInductor, for ``load(..., compiled=out)``. Reads no weights.

    A unit is a region that a stage calls several times, or a whole stage if most of its nodes are outside of such regions. A unit that
    cannot be compiled runs without; the result says why.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        out: the folder to write; it must not exist.
        device: a device of the kind that the code will run on.
        allow_ops: as for `stagepack.load`.
        progress: called with a line before each unit.

    Returns:
        The distinct units.

    Raises:
        OutputExistsError: `out` exists.
        WriteError: it cannot be written.
        DigestError, FormatError, DeviceError, OperatorError: see `stagepack.load`.

    Example:
        >>> compile_ahead("m.stagepack", "m.compiled", "cuda")
        >>> pipeline = stagepack.load("m.stagepack", ["cuda"], compiled="m.compiled")
    """
    opened_bundle = opened(bundle)
    target_device = parse_device(device)
    placement = dict.fromkeys(range(len(opened_bundle.stages)), target_device)
    prepared_stages = prepare_stages(opened_bundle, placement, PrepareOptions(allow_ops=allow_ops))
    stages = {
        stage_number: (stage.code.graph_module, stage.code.graph) for stage_number, stage in prepared_stages.items()
    }
    return compile_to_folder(opened_bundle, stages, target_device, out, progress)
