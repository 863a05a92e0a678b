"""How the processes of a group load a version beside the one that runs: what each is told, and what the front waits for."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future

import msgspec
from msgspec import Struct
from torch.distributed import DistError
from torch.distributed.distributed_c10d import Store

from stagepack.errors import ClosedError, NotABundleError, StageLostError, repeated_error
from stagepack.format.reader import Bundle
from stagepack.format.rules import rule_error
from stagepack.opening import open_bundle, open_delta, with_deltas
from stagepack_loaders.distributed.meeting import Members
from stagepack_loaders.distributed.routes import FRONT_RANK
from stagepack_loaders.distributed.status import VersionStaged
from stagepack_loaders.update_sources import known_bundle


class VersionDescription(Struct, frozen=True, kw_only=True):
    """What a process needs to know of a version.

    Attributes:
        number: its number in the group.
        base: the number of the version that it takes the place of.
        name: its name.
        location: the folder of its bundle, or its URL.
        digest: the digest of the bundle there.
        result: the digest of the bundle of the version.
        deltas: the folders, or URLs, of the deltas that make the bundle of it.
        delta_digests: the digests of these deltas.
        adapters: of a version with the weights of its base: its adapters, see `adapter_texts`. None for one with other weights.
    """

    number: int
    base: int
    name: str
    location: str = ""
    digest: str = ""
    result: str = ""
    deltas: tuple[str, ...] = ()
    delta_digests: tuple[str, ...] = ()
    adapters: tuple[str, ...] | None = None

    def open(self, running: Bundle) -> Bundle:
        """Open the bundle; refuse another one than the front has.

        running: the bundle that runs; its deltas are not opened again, since their folders may be gone.
        """
        known = {} if running.patches is None else running.patches.open_deltas
        base = self._open_base(running)
        deltas = [
            known.get(digest) or open_delta(path, digest=digest)
            for path, digest in zip(self.deltas, self.delta_digests, strict=True)
        ]
        bundle = with_deltas(base, deltas)
        if bundle.digest != self.result:
            raise rule_error("D3", bundle.location, f"expected the bundle {self.result}, found {bundle.digest}")
        return bundle

    def _open_base(self, running: Bundle) -> Bundle:
        """Open the bundle at the location. The front may have written it, of a chain of deltas, where other machines do not find it."""
        try:
            return open_bundle(self.location, digest=self.digest)
        except NotABundleError:
            if (base := known_bundle(running, self.digest)) is None:
                raise
            return base


def read_description(store: Store, number: int) -> VersionDescription:
    """Return the description of a version that the front has published."""
    return msgspec.json.decode(store.get(_key(number)), type=VersionDescription)


def _key(number: int) -> str:
    return f"version {number}"


class GroupStaging:
    """Has all processes of a group load a version, and waits for what they report. Its methods may be called from any thread.

    members: the group, whose store is closed with it.
    announce: tells them to load a version by its number.
    stage_own: loads the stages of the front; None if it has none.
    """

    def __init__(
        self,
        members: Members,
        announce: Callable[[int], None],
        stage_own: Callable[[VersionDescription], VersionStaged] | None,
    ) -> None:
        self._members = members
        self._announce = announce
        self._stage_own = stage_own
        self._lock = threading.Lock()
        self._reports: dict[tuple[int, int], Future[VersionStaged]] = {}
        self._lost: StageLostError | None = None

    def stage(self, description: VersionDescription) -> dict[int, VersionStaged]:
        """Have all processes load a version beside those that run; return what each reports, by rank, when all have."""
        if (store := self._members.store) is None:
            raise ClosedError("the pipeline is closed")
        try:
            store.set(_key(description.number), msgspec.json.encode(description).decode())
        except DistError as error:
            raise StageLostError(f"the processes are gone: {error}") from None
        reports = {
            (rank, description.number): Future[VersionStaged]()
            for rank in range(1 + FRONT_RANK, self._members.group.size)
        }
        with self._lock:
            if self._lost is not None:
                raise repeated_error(self._lost)
            self._reports.update(reports)
        self._announce(description.number)
        own = {} if self._stage_own is None else {FRONT_RANK: self._stage_own(description)}
        staged = own | {rank: report.result() for (rank, _), report in reports.items()}
        with contextlib.suppress(DistError, AttributeError):  # the group may be closed meanwhile, and its store with it
            self._members.store.delete_key(_key(description.number))
        return staged

    def add(self, rank: int, report: VersionStaged) -> None:
        """Add the report of a process."""
        with self._lock:
            waiting = self._reports.pop((rank, report.version), None)
        if waiting is not None:
            waiting.set_result(report)

    def fail(self, lost: StageLostError) -> None:
        """Fail all reports, since a process is lost."""
        with self._lock:
            self._lost, reports = lost, list(self._reports.values())
            self._reports.clear()
        for report in reports:
            report.set_exception(repeated_error(lost))
