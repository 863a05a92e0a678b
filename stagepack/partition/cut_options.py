"""What the caller asks for when a model is cut."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from stagepack.errors import CutError
from stagepack.format import limits
from stagepack.format.dtypes import parse_byte_size
from stagepack.format.plan import Plan
from stagepack.partition.cut import WeightSharing
from stagepack.partition.device_profile import DeviceProfile, find_profile
from stagepack.partition.policies import Policy
from stagepack.partition.profile import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class CutOptions:
    """Where to cut: at most one of `stages`, `split_at`, `policy` and `plan`.

    With none of them the model is cut at the split markers in its code; without split markers it is one stage.

    Attributes:
        stages: the number of stages, which are chosen so that the slowest is as fast as possible.
        split_at: paths of modules; each starts a stage.
        policy: a function from `PolicyNode` to a stage number.
        plan: a plan saved earlier.
        memory: with `stages`: memory of the device of each stage, in bytes or as ``"24GiB"``.
        speeds: with `stages`: speed of the device of each stage, relative to the others, from 0.000001 to 1000000.
        profile: measured times of the nodes, or a device, in the place of estimates for the reference device; a name or a path becomes
            what `find_profile` returns for it. The memory of a device limits each stage where `memory` is not given.
        shared: how stages get a weight that several of them use: each holds it ("replicate"), or the first one holds it and
            sends it at each call ("transmit").

    Raises:
        CutError: more than one way to cut, `memory` or `speeds` without `stages`, or a value of the wrong form.

    Examples:
        ::

            CutOptions(stages=4, memory=["24GiB"] * 4)
    """

    stages: int | None = None
    split_at: Sequence[str] = ()
    policy: Policy | None = None
    plan: Plan | None = None
    memory: Sequence[int | str] = ()
    speeds: Sequence[float] = ()
    profile: Profile | DeviceProfile | str | os.PathLike[str] | None = None
    shared: WeightSharing = "replicate"

    def __post_init__(self) -> None:
        """Refuse options that contradict each other."""
        if isinstance(self.profile, str | os.PathLike):
            object.__setattr__(self, "profile", find_profile(self.profile))
        if self.stages is not None and (not isinstance(self.stages, int) or isinstance(self.stages, bool)):
            raise CutError(f"stages: expected a whole number, found {self.stages!r}")
        for option, items in (("split_at", self.split_at), ("memory", self.memory), ("speeds", self.speeds)):
            if isinstance(items, str | int | float):
                raise CutError(f"{option}: expected a list, found {items!r}")
        ways = {"stages": self.stages, "split_at": self.split_at, "policy": self.policy, "plan": self.plan}
        chosen = [option for option, choice in ways.items() if choice]
        if len(chosen) > 1:
            raise CutError(f"expected one way to cut, found {' and '.join(chosen)}: choose one")
        if (self.memory or self.speeds) and self.stages is None:
            raise CutError("memory and speeds select among the cuts into a number of stages: pass stages=N too")
        if self.shared not in ("replicate", "transmit"):
            raise CutError(f"shared: expected 'replicate' or 'transmit', found {self.shared!r}")
        if not all(limits.SLOWEST_SPEED <= speed <= limits.FASTEST_SPEED for speed in self.speeds):
            raise CutError(f"speeds: expected numbers from 0.000001 to 1000000, found {list(self.speeds)}")

    @property
    def has_way(self) -> bool:
        """Whether it says where to cut; if not, the split markers in the model's code do."""
        return any((self.stages, self.split_at, self.policy, self.plan))

    @property
    def memory_bytes(self) -> list[int]:
        """Bytes of memory of the device of each stage; empty for no limits."""
        if not self.memory and self.stages is not None and isinstance(self.profile, DeviceProfile):
            return [self.profile.memory] * self.stages
        try:
            return [parse_byte_size(size) for size in self.memory]
        except ValueError as error:
            raise CutError(f"memory: {error}") from None
