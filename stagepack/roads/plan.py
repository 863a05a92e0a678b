"""The cut that `stagepack.export` or `stagepack.recut` would make: the function `stagepack.plan`."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagepack.errors import OptionError
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.opening import opened
from stagepack.partition.cut_options import CutOptions, Policy, Stages, WeightSharing
from stagepack.partition.profile import DeviceProfile, Profile
from stagepack.remote.url import is_bundle
from stagepack.roads.recut import plan_bundle

if TYPE_CHECKING:
    import torch
    from torch.export import ExportedProgram

    from stagepack.capture.stated_inputs import StatedInputs


def plan_model(
    model: "torch.nn.Module | ExportedProgram | Bundle | str | os.PathLike[str] | Callable[[], torch.nn.Module]",
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    inputs: "StatedInputs | None" = None,
    stages: Stages | None = None,
    split_at: Sequence[str] = (),
    policy: Policy | None = None,
    memory: Sequence[int | str] = (),
    speeds: Sequence[float] = (),
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None,
    shared: WeightSharing = "replicate",
    dtype: "str | torch.dtype | None" = None,
    dynamic_shapes: Any = None,
) -> Plan:
    """Return the cut that an export or a recut would make, with its estimated costs. Writes nothing.

    Args:
        model: a model as `stagepack.export` takes it; or a bundle, its folder or its URL, which needs no torch.
        args: example inputs by position; not for a bundle, which has its own.
        kwargs: example inputs by name.
        inputs: see `stagepack.export`; not for a bundle.
        stages: see `stagepack.export`.
        split_at: see `stagepack.export`.
        policy: see `stagepack.export`.
        memory: see `stagepack.export`.
        speeds: see `stagepack.export`.
        profile: see `stagepack.export`.
        shared: see `stagepack.export`.
        dtype: see `stagepack.export`; not for a bundle.
        dynamic_shapes: see `stagepack.export`; not for a bundle.

    Returns:
        The plan: ``plan.stages[i]`` has the weights, memory, compute and time of a stage. ``stagepack.export(plan=...)`` cuts so.

    Raises:
        CutError: the model cannot be cut as requested.
        OptionError: there are example inputs for a bundle.
        StagepackError: see `stagepack.export` and `stagepack.open`.

    Examples:
        >>> plan = stagepack.plan("llama.stagepack", stages=4)
        >>> [stage.weight_bytes for stage in plan.stages]
    """
    cut_options = CutOptions(
        stages=stages, split_at=split_at, policy=policy, memory=memory, speeds=speeds, profile=profile, shared=shared
    )
    if isinstance(model, Bundle) or is_bundle(model):
        if args or kwargs or inputs is not None or dynamic_shapes is not None or dtype is not None:
            raise OptionError("args, kwargs, inputs, dynamic_shapes, dtype: a bundle has its own: leave them out")
        return plan_bundle(opened(model), cut_options).plan  # type: ignore[arg-type]
    from stagepack.capture.source import FORWARD, ModelSource  # noqa: PLC0415 - torch, which a bundle does not need
    from stagepack.capture.stated_inputs import Example  # noqa: PLC0415 - the same
    from stagepack.roads.capture_writer import plan_capture  # noqa: PLC0415 - the same

    example = Example.of_call(args, kwargs, dynamic_shapes, inputs)
    captures = ModelSource.of(model, dtype=dtype).captures(example)
    if FORWARD not in captures:
        raise OptionError(
            f"model: expected one entry point, found {', '.join(captures)}: export it, and plan the bundle"
        )
    partition, _ = plan_capture(captures[FORWARD], cut_options)
    return partition.plan
