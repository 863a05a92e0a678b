"""A bundle -> a pipeline or a stage, on devices."""

import os
from collections.abc import Collection, Iterable, Iterator, Sequence

import torch

from stagepack.format.reader import Bundle
from stagepack_loaders.pipeline import Pipeline
from stagepack_loaders.placement import place
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
) -> Pipeline:
    """Load all stages of a bundle into this process.

    Args:
        bundle: its folder, or what `stagepack.open` gave.
        devices: one a stage in order, or fewer: then consecutive stages share one.
        types: classes to build results of, where the bundle names them; else such a result is a dict of its fields.
        allow_ops: namespaces of custom operators that may run; their library must be imported already.
        verify: compare every file with its digest before it is used.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        DeviceError: a device is not there, or there are more devices than stages.
        OperatorError: an operator is missing here, not allowed, or has another schema.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    prepared = prepare_stages(opened, devices, allow_ops=allow_ops)
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
    allow_ops: Collection[str] = (),
    verify: bool = True,
) -> Stage:
    """Load one stage as a `torch.nn.Module`; only its own files and the shared files it names are read.

    Raises:
        IndexError: there is no stage of that number.
        NotABundleError, VersionError, DigestError, FormatError, DeviceError, OperatorError: see `load`.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    if not 0 <= stage < len(opened.stages):
        raise IndexError(f"expected a stage from 0 to {len(opened.stages) - 1}, found {stage}")
    prepared = prepare_stage(opened, stage, parse_device(device), allow_ops=allow_ops)
    return finish_stage(prepared, verify=verify, cache=WeightCache())
