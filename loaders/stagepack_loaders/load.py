"""A bundle -> a pipeline or a stage, on devices."""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from stagepack.format.reader import Bundle
from stagepack_loaders.pipeline import Pipeline
from stagepack_loaders.placement import place
from stagepack_loaders.torch.aot import CompiledFolder, CompiledPart, compile_parts
from stagepack_loaders.torch.compile import Compile, Compiler
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.stage import Prepared, Stage, finish_stage, prepare_stage
from stagepack_loaders.torch.weights import WeightCache

Source = str | os.PathLike[str] | Bundle


def load(
    bundle: Source,
    devices: Sequence[str | torch.device] = ("cpu",),
    *,
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: bool = True,
    compile: Compile = False,
    compiled: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Load all stages of a bundle into this process.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        devices: one a stage in order, or fewer: then consecutive stages share one.
        types: classes to build results of, where the bundle names them; else such a result is a dict of its fields.
        allow_ops: namespaces of custom operators that may run; their library must be imported already.
        verify: compare every file with its digest before it is used.
        compile: True compiles each distinct region once, ``"whole"`` each stage as a whole, by ``torch.compile`` at the first call.
        compiled: a folder that ``stagepack compile`` wrote for this bundle and this kind of device. Its native code is run.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        DeviceError: a device is not there, or there are more devices than stages.
        OperatorError: an operator is missing here, not allowed, or has another schema.
        CompiledError: `compiled` is of another bundle, for another device or torch, or damaged.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    prepared = speed_up(opened, prepare_stages(opened, devices, allow_ops=allow_ops), compile, compiled)
    return Pipeline(opened.manifest, list(finish_stages(prepared, verify=verify)), types)


def prepare_stages(
    bundle: Bundle, devices: Sequence[str | torch.device], *, allow_ops: Collection[str] = ()
) -> list[Prepared]:
    """Read all of a bundle but its weights, so that what is wrong with any stage is said before a weight of the first one is read.

    Raises:
        DigestError, FormatError, DeviceError, OperatorError: see `load`.
    """
    named = [devices] if isinstance(devices, str | torch.device) else devices
    placed = place(bundle.manifest, [parse_device(device) for device in named])
    return [prepare_stage(bundle, number, device, allow_ops=allow_ops) for number, device in enumerate(placed)]


def speed_up(
    bundle: Bundle, prepared: Sequence[Prepared], compile: Compile, compiled: str | os.PathLike[str] | None
) -> list[Prepared]:
    """Stages that will run compiled; see `load`.

    Raises:
        CompiledError: see `load`.
        ValueError: `compile` is none of its values, or both ways are asked for.
    """
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
    bundle: Source,
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
    prepared = prepare_stages(opened, [device], allow_ops=allow_ops)
    stages = [(stage.module, stage.graph) for stage in prepared]
    return compile_parts(opened, stages, parse_device(device), out, progress)


def finish_stages(prepared: Iterable[Prepared], *, verify: bool = True) -> Iterator[Stage]:
    """Read the weights of prepared stages, one stage after another; those on one device share what they share in the model.

    Raises:
        DigestError, FormatError: a weight file is damaged, or breaks a rule of the format.
    """
    cache = WeightCache()
    for stage in prepared:
        yield finish_stage(stage, verify=verify, cache=cache)


def load_stage(
    bundle: Source,
    stage: int,
    device: str | torch.device = "cpu",
    *,
    modules: bool = False,
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: bool = True,
    compile: Compile = False,
    compiled: str | os.PathLike[str] | None = None,
) -> Stage:
    """Load one stage as a `torch.nn.Module`; only its own files and the shared files it names are read.

    With `modules`, the modules of the original model stand in it under their names. Each that lies whole in the stage can be called
    on its own, as the model called it, and replaced by another one that takes the same call. A module that the model calls several
    times is one module; a call that runs another graph than the first is a module beside it, named ``layer@1``. Modules that do
    nothing, or are called in branches and loops, cannot be called or replaced. What the model gave a module as a constant may be left
    out of a call.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        stage: its number.
        device: where it runs.
        modules: run by calls of the model's modules.
        types: classes to build arguments and results of modules of, where the bundle names them; else such an object is a dict of
            its fields.
        allow_ops: see `load`; and so the others.
        verify: see `load`.
        compile: see `load`.
        compiled: see `load`.

    Raises:
        IndexError: there is no stage of that number.
        ValueError: `modules` and a way to compile are asked for together.
        NotABundleError, VersionError, DigestError, FormatError, DeviceError, OperatorError, CompiledError: see `load`.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    if not 0 <= stage < len(opened.stages):
        raise IndexError(f"expected a stage from 0 to {len(opened.stages) - 1}, found {stage}")
    if modules and (compile or compiled is not None):
        raise ValueError("modules excludes compile and compiled: a stage that runs by its modules runs as it is")
    prepared = prepare_stage(opened, stage, parse_device(device), allow_ops=allow_ops, modules=modules, types=types)
    [ready] = [prepared] if modules else speed_up(opened, [prepared], compile, compiled)
    return finish_stage(ready, verify=verify, cache=WeightCache())
