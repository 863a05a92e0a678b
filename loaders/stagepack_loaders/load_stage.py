"""Load one stage of a bundle, or several as one."""

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Unpack, overload

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters, with_adapters
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, errors_name_bundle
from stagepack.partition.joined_bundle import join_bundle
from stagepack_loaders.base import Loading
from stagepack_loaders.options import (
    DEFAULT_RUNTIME,
    AdapterSources,
    Compile,
    LoadOptions,
    LocalKeywords,
    Verify,
    adapter_list,
    folder_name,
)
from stagepack_loaders.preparation import compile_prepared, open_for_loading, prepare, reading_progress
from stagepack_loaders.registry import choose_runtime

if TYPE_CHECKING:
    import torch

    from stagepack_loaders.torch.stage import TorchStage


@overload
def load_stage(
    bundle: BundleSource,
    stage: int | None = ...,
    device: "str | torch.device" = ...,
    *,
    stages: range | None = ...,
    modules: bool = ...,
    **options: Unpack[LocalKeywords],
) -> "TorchStage": ...


@overload
def load_stage(
    bundle: BundleSource,
    stage: int | None = ...,
    device: "str | torch.device" = ...,
    *,
    stages: range | None = ...,
    runtime: str,
    modules: bool = ...,
    **options: Unpack[LocalKeywords],
) -> Any: ...


@errors_name_bundle
def load_stage(
    bundle: BundleSource,
    stage: int | None = None,
    device: "str | torch.device" = "cpu",
    *,
    stages: range | None = None,
    runtime: str = DEFAULT_RUNTIME,
    modules: bool = False,
    types: Collection[type] = (),
    allow_ops: Collection[str] = (),
    verify: Verify = "full",
    require_signature: TrustedSigners | None = None,
    deltas: Sequence[DeltaSource] = (),
    copy: bool = False,
    compile: Compile = False,
    compiled: str | os.PathLike[str] | None = None,
    stream: bool = False,
    device_memory: int | str | None = None,
    adapters: AdapterSources = None,
) -> Any:
    """Load one stage of a bundle, or several consecutive ones as one. Only their own files and the shared files that they name are read.

    With `modules`, the stage holds the modules of the original model under their names. Each module that is complete in the stage can
    be called on its own, as the model called it, and replaced by another one that takes the same call. A module that the model calls
    several times is one module; a call that runs another graph than the first is a module beside it, named ``layer@1``. Modules that do
    nothing, or are called in branches and loops, cannot be called or replaced. Arguments that were constants in the model may be left
    out of a call.

    Args:
        bundle: the folder of the bundle, its URL (see `stagepack.open`), or an opened bundle.
        stage: the stage number, from 0.
        device: the device that the stage runs on.
        stages: the numbers of consecutive stages that are joined, such as ``range(4, 9)``, in the place of `stage`; only in torch.
        runtime: the name of the runtime that executes the stage, such as ``"torch"`` or ``"onnxruntime"``; by default as of `load`.
        modules: run by calls of the model's modules; only in torch.
        types: classes to build arguments and results of modules of, where the bundle names them; others are dicts of their fields.
        allow_ops: see `load`.
        verify: see `load`.
        require_signature: see `load`.
        deltas: see `load`.
        copy: see `load`.
        compile: see `load`.
        compiled: see `load`.
        stream: see `load`; not with `modules`.
        device_memory: see `load`; not with `modules`.
        adapters: see `load`; not with `modules`. Calls of the stage then have the keyword ``adapter``: give all stages the same one.

    Returns:
        A callable that takes the inputs of the stage, by position or by edge name, and returns a tuple of its outputs: in torch a
        `torch.nn.Module` (`stagepack_loaders.torch.stage.TorchStage`), in ONNX Runtime a
        `stagepack_loaders.onnxruntime.stage.OnnxRuntimeStage`.

    Raises:
        IndexError: there is no stage of that number.
        OptionError: neither `stage` nor `stages` is given, or both; a runtime is unknown, or an option does not go with the runtime or
            with another option.
        NotABundleError, VersionError, DigestError, FormatError, SignatureError, RemoteError, WriteError, DeviceError, OperatorError,
            AdapterError, CompiledError, MissingPackageError: see `load`.

    Examples:
        >>> stage = stagepack.load_stage("m.stagepack", 1, device="cuda:0")
        >>> (hidden,) = stage(hidden)
        >>> layers = stagepack.load_stage("m.stagepack", stages=range(4, 9), device="cuda:1")
    """
    opened_bundle = open_for_loading(bundle, verify, require_signature, deltas)
    if (stage is None) == (stages is None):
        raise OptionError(
            "stage, stages: expected one of them: the number of a stage, or the numbers of consecutive stages as a range"
        )
    if stages is not None:
        opened_bundle, stage = _join_range(opened_bundle, stages, runtime)
    assert stage is not None
    opened_bundle.stage(stage)
    options = LoadOptions(
        devices=[device],
        runtime=choose_runtime(runtime, opened_bundle, [stage]).name,
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile,
        compiled=folder_name(compiled),
        stream=stream,
        device_memory=device_memory,
        modules=modules,
        adapters=pinned_adapters(opened_bundle, adapter_list(adapters), require_signature),
    )
    opened_bundle = with_adapters(opened_bundle, options.adapters)
    with reading_progress(opened_bundle, [stage], Loading(options=options, types=types)) as loading:
        ready_stages = compile_prepared(opened_bundle, prepare(opened_bundle, loading, [stage]), options)
        return ready_stages[stage].finish(verify=options.verifies_weights)


def _join_range(bundle: Bundle, numbers: range, runtime_name: str) -> tuple[Bundle, int]:
    """Return a bundle in which some consecutive stages are one, and the number of this one."""
    if not isinstance(numbers, range) or numbers.step != 1 or not numbers:
        raise OptionError(f"stages: expected consecutive numbers, such as range(4, 9), found {numbers!r}")
    bundle.stage(numbers[0])
    bundle.stage(numbers[-1])
    runtime = choose_runtime(runtime_name, bundle, numbers)
    if not runtime.joins and len(numbers) > 1:
        raise OptionError(f"stages: {runtime.title} does not join stages: load each alone, or choose runtime='torch'")
    counts = [*[1] * numbers[0], len(numbers), *[1] * (len(bundle.stages) - numbers[-1] - 1)]
    return join_bundle(bundle, counts), numbers[0]
