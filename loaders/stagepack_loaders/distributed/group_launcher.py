"""The interface of what starts the processes of a pipeline."""

from collections.abc import Callable
from typing import Protocol

from stagepack.errors import StageLostError
from stagepack.format.reader import Bundle
from stagepack.partition.placement import Placement
from stagepack_loaders.distributed.front import FrontProcess
from stagepack_loaders.distributed.membership import VersionPlace


class GroupLauncher(Protocol):
    """What starts the processes of a pipeline, and starts them again."""

    @property
    def chosen(self) -> Placement | None:
        """The placement of the stages, if it was chosen."""

    def start(self, report_loss: Callable[[StageLostError], None], check: Callable[[], None]) -> FrontProcess:
        """Return the front of a new group, when all processes have loaded their stages.

        Args:
            report_loss: called when a process of the group is lost.
            check: called while this process waits for the others; raises when there is no use in waiting.

        Raises:
            StagepackError: the processes could not be started, or could not load their stages.
        """

    def find_version(self, bundle: Bundle) -> VersionPlace:
        """Return where the processes find the bundle of a version."""

    def use_version(self, bundle: Bundle) -> None:
        """Start processes with another version from now on.

        Args:
            bundle: its bundle, in the stages that run.
        """

    def leave_out(self, lost: StageLostError) -> None:
        """Place the stages on the processes that are left when one is lost, if the caller has asked for that.

        Args:
            lost: the error that names the stages of the process.

        Raises:
            StagepackError: the stages do not fit on the others.
        """

    def stop(self, *, wait: bool) -> None:
        """End the processes of the last group.

        Args:
            wait: they are about to end by themselves.
        """
