"""A bundle -> a pipeline or a stage, on devices. Imports torch, or ONNX Runtime, only where a stage runs in it."""

import os
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, get_args, overload

from stagepack.format.reader import Bundle
from stagepack_loaders.pipeline import LoadedStage, Pipeline
from stagepack_loaders.placement import place

if TYPE_CHECKING:
    import torch

    from stagepack_loaders.onnxruntime.stage import OnnxRuntimeStage as OnnxRuntimeStage
    from stagepack_loaders.torch.compile import Compile
    from stagepack_loaders.torch.stage import TorchStage as TorchStage

Source = str | os.PathLike[str] | Bundle
Runtime = Literal["torch", "onnxruntime"]
RUNTIMES: tuple[Runtime, ...] = get_args(Runtime)


class Prepared(Protocol):
    """A stage that is known to be sound, of whose weights nothing is read yet."""

    def finish(self, *, verify: bool) -> LoadedStage:
        """Read the weights.

        Raises:
            DigestError: a weight file is not the one listed.
            FormatError: a weight file breaks rules.
            OperatorError: the runtime cannot run the stage.
        """


def load(
    bundle: Source,
    devices: "Sequence[str | torch.device]" = ("cpu",),
    *,
    runtime: Runtime | Sequence[Runtime] = "torch",
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: bool = True,
    compile: "Compile" = False,
    compiled: str | os.PathLike[str] | None = None,
) -> Pipeline:
    """Load all stages of a bundle into this process.

    In torch, a pipeline takes and gives torch tensors. With a stage in ONNX Runtime, it takes torch tensors or numpy arrays, and gives
    numpy arrays, but torch tensors to a call with one. Stages hand their values on without a copy, where the devices are the same.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        devices: one a stage in order, or fewer: then consecutive stages share one.
        runtime: ``"torch"`` or ``"onnxruntime"``, or one of them for each stage. ONNX Runtime needs the ONNX files that
            ``stagepack onnx`` adds, and no torch.
        types: classes to build results of, where the bundle names them; else such a result is a dict of its fields.
        allow_ops: namespaces of custom operators that may run; their library must be imported already.
        verify: compare every file with its digest before it is used.
        compile: True compiles each distinct region once, ``"whole"`` each stage as a whole, by ``torch.compile`` at the first call.
        compiled: a folder that ``stagepack compile`` wrote for this bundle and this kind of device. Its native code is run.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        DeviceError: a device is not there, or there are more devices than stages.
        OperatorError: an operator is missing here, not allowed, or has another schema; or a stage has no ONNX model, or one that this
            onnxruntime cannot run.
        CompiledError: `compiled` is of another bundle, for another device or torch, or damaged.
        ValueError: a runtime is unknown, or what compiles is asked of ONNX Runtime.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    prepared = prepare_stages(opened, devices, runtime=runtime, allow_ops=allow_ops)
    ready = speed_up(opened, prepared, compile, compiled)
    return assemble(opened, [stage.finish(verify=verify) for stage in ready], types)


@overload
def load_stage(
    bundle: Source,
    stage: int,
    device: "str | torch.device" = ...,
    *,
    runtime: Literal["torch"] = ...,
    modules: bool = ...,
    types: Collection[type] = ...,
    allow_ops: Collection[str] = ...,
    verify: bool = ...,
    compile: "Compile" = ...,
    compiled: str | os.PathLike[str] | None = ...,
) -> "TorchStage": ...


@overload
def load_stage(
    bundle: Source,
    stage: int,
    device: "str | torch.device" = ...,
    *,
    runtime: Literal["onnxruntime"],
    verify: bool = ...,
) -> "OnnxRuntimeStage": ...


def load_stage(
    bundle: Source,
    stage: int,
    device: "str | torch.device" = "cpu",
    *,
    runtime: Runtime = "torch",
    modules: bool = False,
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: bool = True,
    compile: "Compile" = False,
    compiled: str | os.PathLike[str] | None = None,
) -> Any:
    """Load one stage; only its own files and the shared files it names are read.

    In torch it is a `torch.nn.Module`, in ONNX Runtime a callable with a session, `stagepack_loaders.onnxruntime.stage.Stage`. Both
    are called with their inputs, by position or by edge name, and return a tuple of their outputs.

    With `modules`, the modules of the original model stand in it under their names. Each that lies whole in the stage can be called
    on its own, as the model called it, and replaced by another one that takes the same call. A module that the model calls several
    times is one module; a call that runs another graph than the first is a module beside it, named ``layer@1``. Modules that do
    nothing, or are called in branches and loops, cannot be called or replaced. What the model gave a module as a constant may be left
    out of a call.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        stage: its number.
        device: where it runs.
        runtime: ``"torch"`` or ``"onnxruntime"``.
        modules: run by calls of the model's modules.
        types: classes to build arguments and results of modules of, where the bundle names them; else such an object is a dict of
            its fields.
        allow_ops: see `load`; and so the others.
        verify: see `load`.
        compile: see `load`.
        compiled: see `load`.

    Raises:
        IndexError: there is no stage of that number.
        ValueError: `modules` and a way to compile are asked for together, or one of them of ONNX Runtime.
        NotABundleError, VersionError, DigestError, FormatError, DeviceError, OperatorError, CompiledError: see `load`.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    opened.stage(stage)
    if modules and (compile or compiled is not None):
        raise ValueError("modules excludes compile and compiled: a stage that runs by its modules runs as it is")
    prepared = prepare(opened, {stage: device}, runtime, modules=modules, types=types, allow_ops=allow_ops)
    [ready] = speed_up(opened, list(prepared.values()), compile, compiled)
    return ready.finish(verify=verify)


def prepare_stages(
    bundle: Bundle,
    devices: "Sequence[str | torch.device]",
    *,
    runtime: Runtime | Sequence[Runtime] = "torch",
    allow_ops: Collection[str] = (),
) -> list[Prepared]:
    """Read all of a bundle but its weights, so that what is wrong with any stage is said before a weight of the first one is read.

    Raises:
        DigestError, FormatError, DeviceError, OperatorError, ValueError: see `load`.
    """
    named = devices if isinstance(devices, Sequence) and not isinstance(devices, str) else [devices]
    runtimes: list[Any] = list(runtime) if isinstance(runtime, list | tuple) else [runtime] * len(bundle.stages)
    if len(runtimes) != len(bundle.stages):
        raise ValueError(f"expected a runtime, or one for each of {len(bundle.stages)} stages, found {len(runtimes)}")
    placed = place(bundle.manifest, named)
    found: dict[int, Prepared] = {}
    for kind in dict.fromkeys(runtimes):
        mine = {number: device for number, device in enumerate(placed) if runtimes[number] == kind}
        found.update(prepare(bundle, mine, kind, allow_ops=allow_ops, dense="onnxruntime" in runtimes))
    return [found[number] for number in range(len(placed))]


def prepare(
    bundle: Bundle,
    placed: "Mapping[int, str | torch.device]",
    runtime: Runtime,
    *,
    allow_ops: Collection[str] = (),
    modules: bool = False,
    types: Collection[type] = (),
    dense: bool = False,
) -> Mapping[int, Prepared]:
    """Read all of some stages, by their numbers, but their weights. Those of torch that lie on one device will share weights.

    `dense`: stages of torch get values from others that do not have the strides of the capture.

    Raises:
        DigestError, FormatError, DeviceError, OperatorError, ValueError: see `load`.
    """
    if runtime == "torch":
        from stagepack_loaders.torch import stage as in_torch  # noqa: PLC0415 - a host may have one runtime only

        return in_torch.prepare(bundle, placed, allow_ops=allow_ops, modules=modules, types=types, dense=dense)
    if runtime == "onnxruntime":
        from stagepack_loaders.onnxruntime import stage as in_onnxruntime  # noqa: PLC0415 - the same

        if modules:
            raise ValueError("modules are those of torch: ask for runtime='torch'")
        return in_onnxruntime.prepare(bundle, placed)
    raise ValueError(f"expected the runtime {' or '.join(map(repr, RUNTIMES))}, found {runtime!r}")


def assemble(bundle: Bundle, stages: Sequence[LoadedStage], types: Collection[type] = ()) -> Pipeline:
    """The pipeline of all stages of a bundle, whatever runtimes they are of."""
    if all(stage.runtime == "torch" for stage in stages):
        return Pipeline(bundle.manifest, stages, types)
    from stagepack_loaders.onnxruntime.mixed import MixedPipeline  # noqa: PLC0415 - the same

    return MixedPipeline(bundle.manifest, stages, types)


def speed_up(
    bundle: Bundle, prepared: Sequence[Prepared], compile: "Compile", compiled: str | os.PathLike[str] | None
) -> Sequence[Prepared]:
    """Stages that will run compiled; see `load`.

    Raises:
        CompiledError: see `load`.
        ValueError: `compile` is none of its values, both ways are asked for, or a stage is not of torch.
    """
    if compile is False and compiled is None:
        return prepared
    from stagepack_loaders.torch.speed import speed_up as in_torch  # noqa: PLC0415 - the same

    return in_torch(bundle, prepared, compile, compiled)
