"""Load a bundle: all stages as a pipeline. Imports the library of a runtime only if a stage runs in it."""

import os
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Literal, Unpack, overload

from msgspec import structs

from stagepack.errors import OptionError
from stagepack.extras import explain_missing_packages
from stagepack.format.reader import Bundle
from stagepack.named_adapters import pinned_adapters
from stagepack.opening import BundleSource, DeltaSource, TrustedSigners, errors_name_bundle
from stagepack_loaders.call_limits import Limits, checked_limits, value_limit
from stagepack_loaders.distributed.launch_environment import is_launched_group, launched_size
from stagepack_loaders.local_pipeline import Pipeline, load_pipeline
from stagepack_loaders.options import (
    DEFAULT_IN_FLIGHT,
    DEFAULT_RUNTIME,
    AdapterSources,
    Compile,
    LoadKeywords,
    LoadOptions,
    LocalKeywords,
    OnLoss,
    PlacementOptions,
    ProcessOptions,
    Verify,
    adapter_list,
    device_list,
    folder_name,
    refuse_process_options,
)
from stagepack_loaders.preparation import check_runtimes, open_for_loading
from stagepack_loaders.registry import find_runtime, runtime_of_each_stage

if TYPE_CHECKING:
    import torch

    from stagepack_loaders.distributed.pipeline import DistributedPipeline
    from stagepack_loaders.entry_points import Devices


@overload
def load(  # type: ignore[overload-overlap] # False is an integer, too
    bundle: BundleSource,
    devices: "Devices | None" = ...,
    *,
    device: "str | torch.device | None" = ...,
    runtime: str | Sequence[str] = ...,
    limits: Limits | None = ...,
    processes: Literal[False] = ...,
    memory: Sequence[int | str] = ...,
    speeds: Sequence[float] = ...,
    profiles: Sequence[str] = ...,
    links: Sequence[str] = ...,
    stages_per_device: Sequence[int] = ...,
    **options: Unpack[LocalKeywords],
) -> Pipeline: ...


@overload
def load(
    bundle: BundleSource,
    devices: "Devices | None" = ...,
    *,
    device: "str | torch.device | None" = ...,
    runtime: str | Sequence[str] = ...,
    limits: Limits | None = ...,
    processes: Literal[True] | int,
    imports: Sequence[str] = ...,
    max_restarts: int = ...,
    on_loss: OnLoss = ...,
    in_flight: int = ...,
    microbatch_size: int | None = ...,
    memory: Sequence[int | str] = ...,
    speeds: Sequence[float] = ...,
    profiles: Sequence[str] = ...,
    links: Sequence[str] = ...,
    stages_per_device: Sequence[int] = ...,
    **options: Unpack[LoadKeywords],
) -> "DistributedPipeline": ...


@errors_name_bundle
def load(
    bundle: BundleSource,
    devices: "Devices | None" = None,
    *,
    device: "str | torch.device | None" = None,
    runtime: str | Sequence[str] = DEFAULT_RUNTIME,
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
    limits: Limits | None = None,
    processes: bool | int = False,
    imports: Sequence[str] = (),
    max_restarts: int = 0,
    on_loss: OnLoss = "restart",
    in_flight: int = DEFAULT_IN_FLIGHT,
    microbatch_size: int | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profiles: Sequence[str] = (),
    links: Sequence[str] = (),
    stages_per_device: Sequence[int] = (),
) -> "Pipeline | DistributedPipeline":
    """Load all stages of a bundle into this process, or each into a process of its own on this machine.

    The pipeline is called like the model and returns what the model returns. It takes the arrays of any runtime (torch tensors, numpy
    arrays), and returns arrays of the kind that it is called with. Stages pass their values on without a copy when their devices are
    the same.

    In torch, results carry gradients as the results of the model do: its parameters require gradients if they did at the export. Results
    carry no gradients under ``torch.no_grad()`` and ``torch.inference_mode()``, with `processes`, with `compiled`, and where weights
    pass through `device_memory`.

    Args:
        bundle: the folder of the bundle, its URL (see `stagepack.open`), or an opened bundle.
        devices: the device of each stage, in order, or one device; by default the CPU. With several devices, but fewer than stages,
            consecutive stages are joined into one for each device, as a cut into fewer stages would have them: a bundle that is cut
            finely loads on any set of devices. The slowest device is as fast as possible. ``"auto"``: those devices of this machine
            on which one call takes least, or, with `processes`, many calls. `bundle` of the result has the joined stages, and
            `placement` says which they are.
        device: the device of all stages, in the place of `devices`.
        runtime: the name of the runtime that executes the stages, such as ``"torch"`` or ``"onnxruntime"``; or a list with a name for
            each stage. ONNX Runtime needs the ONNX files that ``stagepack onnx`` adds, and no torch. By default torch; where it is not
            installed, ONNX Runtime, if the bundle has these files. `stages` of the result have the name, `runtime`.
        types: classes to build results of, where the bundle names them; other such results are dicts of their fields,
            which are attributes too.
        allow_ops: namespaces of custom operators that may run, whose library must be imported already, and operators of ATen and prims
            that do not run by default, such as ``aten._foreach_add``.
        verify: how much is compared with the digests that the manifest lists. ``"full"``: every file, weights before anything is
            computed with them. ``"manifest"``: the manifest, graphs and ONNX files; of weight files the size and the header.
            ``"off"``: as ``"manifest"``, but no digest of a graph or an ONNX file, for files that were edited on purpose. The rules of
            the format are checked in any case.
        require_signature: a PEM file with the public key of a signer, or with certificates of authorities, or several: a bundle without a
            signature of one of them is refused; see `stagepack.sign`. Only with ``verify="full"``: the signature is over the digests.
        deltas: load the bundle that these deltas make of it, each on the result of the one before; see `stagepack.delta`. Weights are
            changed in memory: on the CPU those pages of mapped files that have changes become memory of this process. Nothing is written.
        copy: read the weights into memory of this process. By default the CPU uses weight files where they are, mapped: they are ready
            in milliseconds, take no memory of the process, and are shared between processes. Before one of them is changed, the process
            copies it, so that calls answer as before; files for which the kernel does not promise that are copied at once. Devices other
            than the CPU have copies anyway.
        compile: True compiles each distinct region once, ``"whole"`` each stage as a whole, by ``torch.compile`` at the first call.
        compiled: a folder that ``stagepack compile`` wrote for this bundle and this kind of device. Its native code is run.
        stream: return at once; threads read the weights into memory in the order of their first use, and a call waits for each weight
            at its first use. With ``verify="full"``, its bytes are compared with their digests before they are computed with, so it
            is a call that raises `DigestError`. `state_dict`, `load_state_dict`, `to` and copies wait too; before you read or write
            the content of ``parameters()``, call `TorchStage.wait_for_weights`: until then it is undefined, and what you write may be
            overwritten. Of a remote bundle, the first chunk of each weight file is waited for, and the others are downloaded
            meanwhile. Not with `compile`, `compiled` and `processes`; only in torch.
        device_memory: the memory for weights on each device, in bytes or as ``"8GiB"``. If the weights are larger, some stay there, and
            the others pass through a part of it in each call, read ahead from their files; `TorchStage.residency` says how many.
            `state_dict` and ``parameters()`` have those on the CPU; what is written into them is used
            from the next call on, and conversions such as ``double()`` are refused. Not with `stream`, `copy`, `compile`, `compiled` and
            `processes`; only in torch.
        adapters: folders that ``stagepack adapter`` wrote for this bundle, their URLs, or opened adapters; or these by name, otherwise
            the last part is the name. ``@sha256:DIGEST`` after a folder or URL refuses another adapter. With `require_signature`, each
            must be signed, too. Calls then have the keyword ``adapter``: a name, or a list with a name or None for each row of the batch.
            The weights of the bundle are in memory once. `load_adapter` and `unload_adapter` change them while calls go on; an empty list
            is for a pipeline that begins without any, None for one that takes none. In torch and in ONNX Runtime; not with `compiled`.
        limits: how large values may be, and, with `processes`, how long a call may take, see `Limits`. None for no limits.
        processes: True for a process for each stage, or the number of processes; with fewer than stages, consecutive stages are joined.
            Close the pipeline to end the processes, or use it in a ``with`` statement. For processes on several machines see
            `stagepack.distributed.connect`.
        imports: with `processes`, modules that each process imports first, such as those that register custom operators.
        max_restarts: with `processes`, how often within an hour all processes are started again after one was lost.
        on_loss: with `max_restarts`: ``"restart"`` starts the same processes again; ``"regroup"`` places the stages on the processes that
            are left, without the device of the lost one; where they do not fit there, the same processes start again.
        in_flight: with `processes`, the largest number of calls on their way through the stages.
        microbatch_size: with `processes`, the largest number of rows of a batch on its way: larger ones go in parts, on which the stages
            work at the same time. Their kernels may then round otherwise than for the whole batch. None to leave batches whole.
        memory: the memory of each device, in bytes or as ``"24GB"``: it gets no more stages than fit with their weights, state,
            activations and what arrives, at the sizes of the example.
        speeds: the speed of each device, relative to the others.
        profiles: times of devices, in the place of those that the plan of the bundle estimates: a file that ``stagepack profile`` wrote,
            or the name of a kind of device such as ``"h100"``; ``"cuda=times.json"`` for some devices, by their name or kind.
        links: how fast values are sent, such as ``"host=25GB/s,rtt=0.1ms"``; see the guide "Run one bundle anywhere".
        stages_per_device: the number of stages of each device, such as ``[4, 3, 1]``, in the place of a choice by times and memory.

    Returns:
        The loaded stages as one callable; with `processes` a `DistributedPipeline`, whose ``submit`` does not wait for the result.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        EntryPointError: the bundle has several entry points, and none is selected: see `stagepack.open` and `load_entry_points`.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        SignatureError: `require_signature` is given, and the bundle, a delta or an adapter has no such signature.
        RemoteError, WriteError: a file of a remote bundle cannot be downloaded, or written into the cache.
        DeviceError: a device does not exist here, or has not enough memory for the weights, or there are more devices than stages.
        OperatorError: an operator is missing, not allowed, or has another schema; or a stage has no ONNX model, or one that this
            onnxruntime cannot run.
        AdapterError: an adapter is of another bundle, or does not fit it.
        CompiledError: `compiled` is of another bundle, for another device or torch, or damaged.
        MissingPackageError: the library of a runtime is not installed.
        OptionError: a runtime is unknown, or an option does not go with the runtime or with another option.
        ValueSizeError: a value of the bundle is larger than `limits` allow, at any sizes of the inputs.
        GroupError, StageLostError: with `processes`, a process did not come, or ended.

    Examples:
        >>> pipeline = stagepack.load("m.stagepack", devices=["cuda:0", "cuda:1"])
        >>> logits = pipeline(input_ids)
        >>> pipeline = stagepack.load("m.stagepack", runtime="onnxruntime")
        >>> logits = pipeline(numpy_input_ids)
        >>> with stagepack.load("m.stagepack", processes=True) as pipeline:
        ...     logits = pipeline(input_ids)
    """
    limits = checked_limits(limits)
    opened_bundle = open_for_loading(bundle, verify, require_signature, deltas)
    options = LoadOptions(
        devices=device_list(devices, device),
        runtime=runtime,
        allow_ops=allow_ops,
        verify=verify,
        copy=copy,
        compile=compile,
        compiled=folder_name(compiled),
        stream=stream,
        device_memory=device_memory,
        adapters=pinned_adapters(opened_bundle, adapter_list(adapters), require_signature),
        placement=PlacementOptions(
            memory=memory, speeds=speeds, profiles=profiles, links=links, stages_per_device=stages_per_device
        ),
    )
    if processes is False:
        refuse_process_options(
            imports=imports,
            max_restarts=max_restarts,
            on_loss=on_loss != "restart",
            in_flight=in_flight != DEFAULT_IN_FLIGHT,
            stall_seconds=limits.stall_seconds,
            microbatch_size=microbatch_size,
        )
        local = load_pipeline(opened_bundle, options, types, limits)
        local.trusted_signers = require_signature
        return local
    if not isinstance(processes, int):
        raise OptionError(f"processes: expected True or a number of processes, found {processes!r}")
    process_options = ProcessOptions(
        imports=imports,
        max_restarts=max_restarts,
        on_loss=on_loss,
        in_flight=in_flight,
        microbatch_size=microbatch_size,
    )
    process_count = len(opened_bundle.stages) if processes is True else processes
    pipeline = load_in_processes(opened_bundle, process_count, options, process_options, types, limits)
    pipeline.trusted_signers = require_signature
    return pipeline


@errors_name_bundle
def load_in_processes(
    bundle: BundleSource,
    process_count: int,
    options: LoadOptions,
    process_options: ProcessOptions,
    types: Collection[type],
    limits: Limits,
) -> "DistributedPipeline":
    """Load stages into processes of their own on this machine; see `load`."""
    opened_bundle = open_for_loading(bundle, options.verify)
    runtimes = runtime_of_each_stage(options.runtime, opened_bundle)
    if options.arriving is not None:
        raise OptionError(f"{options.arriving} excludes processes: leave out one of them")
    check_runtimes(runtimes, options)
    if is_launched_group():
        raise OptionError(
            f"processes: torchrun has started this process as one of {launched_size()}, each of which would start processes: call "
            "stagepack.distributed.connect(bundle), which runs the stages in these, or start one process without torchrun"
        )
    limit = value_limit(opened_bundle, limits)
    with explain_missing_packages():
        from stagepack_loaders.distributed.membership import absolute_bundle, group_options  # noqa: PLC0415 - imports torch
        from stagepack_loaders.distributed.pipeline import DistributedPipeline  # noqa: PLC0415 - the same
        from stagepack_loaders.distributed.process_launcher import LocalLauncher, ProcessGrouping  # noqa: PLC0415 - the same

    # The processes open the folder of the bundle, which must have all their files.
    opened_bundle.fetch(
        file_name
        for stage_number, stage_runtime in enumerate(runtimes)
        for file_name in stage_runtime.stage_files(opened_bundle, stage_number)
    )
    group = structs.replace(group_options(options, process_options, limits), is_local=True)
    grouping = ProcessGrouping(absolute_bundle(opened_bundle), process_count, group)
    placed = grouping.placed
    for runtime_name, device in zip(placed.options.runtime, placed.options.devices, strict=True):
        find_runtime(runtime_name).parse_device(device)
    launcher = LocalLauncher(*grouping.placed_group(), grouping)
    return DistributedPipeline(placed.bundle, launcher, types, process_options, limit)


def start_processes(
    bundle: Bundle,
    process_count: int | None,
    options: LoadOptions,
    process_options: ProcessOptions,
    limits: Limits,
) -> "DistributedPipeline | None":
    """Load stages into processes of their own on this machine, or, without a number of them, into those that torchrun has started.

    The result is None in a process that torchrun started to run stages, when the pipeline is closed.
    """
    if process_count is not None:
        return load_in_processes(bundle, process_count, options, process_options, (), limits)
    from stagepack_loaders.distributed.connect import connect_launched  # noqa: PLC0415 - imports torch

    return connect_launched(bundle, options, process_options, (), limits)
