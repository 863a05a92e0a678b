"""Where a server finds the next version of a model: a folder of deltas on this machine, or one at a URL."""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import msgspec

from stagepack.deltas.delta import Delta
from stagepack.deltas.document import DELTA_FORMAT
from stagepack.errors import RemoteError, StagepackError
from stagepack.extras import explain_missing_packages
from stagepack.format import limits
from stagepack.format.file_checks import open_regular_file
from stagepack.format.quantities import format_bytes
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack.remote.cache import Cache, default_cache_folder
from stagepack.remote.url import BundleUrl
from stagepack_serving.server.bundle_listings import LoggedErrors, folder_state
from stagepack_serving.server.security import file_state

_LOGGER: Final = logging.getLogger("stagepack.serve")
# Clients choose among the names of a folder, and never a path.
NAME: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,199}", re.ASCII)
_FOLDER_SECONDS: Final = 0.5
# Between two requests for the next delta of a model, at first and, after errors, at most.
URL_SECONDS = 2.0
_MOST_URL_SECONDS: Final = 60.0
_MOST_ERRORS: Final = 16
# A delta may have so many bytes more than its bundle, of which it could hold each file as a whole.
_MORE_BYTES: Final = 64 * 2**20


class Step(NamedTuple):
    """A delta on what a model runs.

    Attributes:
        source: what the model is updated from.
        name: names the delta among those of the source.
        state: changes when the delta changes.
    """

    source: Path | Delta
    name: str
    state: object


class WatchedDeltas(Protocol):
    """Deltas that appear while a server runs. Its methods are called in any thread, one at a time."""

    @property
    def location(self) -> str:
        """The folder or the URL, for messages."""

    @property
    def pause_seconds(self) -> float:
        """The time between two looks."""

    def steps(self, model_name: str, digest: str) -> Iterator[Step]:
        """Yield the deltas on the bundle of a digest, which a model runs.

        Raises:
            StagepackError: they cannot be looked for.
        """

    def fetch(self, step: Step, bundle: Bundle) -> None:
        """Return when the files of a delta on a bundle are on this machine, and compared with their digests.

        Raises:
            StagepackError: they cannot be fetched, or are others, or too large.
        """


class _Base(msgspec.Struct):
    """What a document says of its place in a chain, if it is that of a delta."""

    format: str = ""
    base: str = ""


@dataclass
class DeltaFolder:
    """Deltas in a folder, under any names. A model has those of the folder of its name, if there is one."""

    folder: Path
    # The base of each entry of the folder of a model by name, with the state of the file that says it.
    _bases: dict[str, dict[str, tuple[object, str]]] = field(default_factory=dict)
    _errors: LoggedErrors = field(default_factory=lambda: LoggedErrors(_LOGGER))

    @property
    def location(self) -> str:
        """See `WatchedDeltas`."""
        return str(self.folder)

    @property
    def pause_seconds(self) -> float:
        """See `WatchedDeltas`."""
        return _FOLDER_SECONDS

    def of_model(self, model_name: str) -> Path:
        """The folder of the deltas of a model."""
        own = self.folder / model_name
        return own if os.path.isdir(own) and not os.path.exists(own / MANIFEST_NAME) else self.folder

    def steps(self, model_name: str, digest: str) -> Iterator[Step]:
        """See `WatchedDeltas`. In the order of their names."""
        folder = self.of_model(model_name)
        try:
            names = sorted(os.listdir(folder))
        except OSError as error:
            raise StagepackError(f"{folder}: the folder of updates cannot be read: {error.strerror}") from None
        known, bases = self._bases.get(model_name, {}), {}
        for name in filter(NAME.fullmatch, names):
            state = file_state(folder / name / MANIFEST_NAME)
            if name in known and known[name][0] == state:
                bases[name] = known[name]
            else:
                bases[name] = state, self._read_base(folder / name)
        self._bases[model_name] = bases
        for path in (folder / name for name, (_, base) in bases.items() if base == digest):
            yield Step(path, str(path), folder_state(str(path)))

    def _read_base(self, path: Path) -> str:
        """The digest of the base of a delta; empty for anything else. What cannot be read is logged."""
        try:
            base = _read_base(path)
        except OSError as error:
            self._errors.add(path.name, f"{path}: cannot be read: {error.strerror or error}")
            return ""
        self._errors.forget(path.name)
        return base

    def fetch(self, step: Step, bundle: Bundle) -> None:
        """See `WatchedDeltas`: they are there."""


class DeltaUrl:
    """Deltas in a folder at a URL, each under the digest of its base (SPEC section 13). They are fetched into the cache.

    The next look comes later after an error, up to a minute.
    """

    def __init__(self, url: str) -> None:
        with explain_missing_packages("remote"):
            from stagepack.remote import remote_bundle  # noqa: PLC0415 - fsspec and aiohttp are optional

        self._open_next = remote_bundle.open_next
        self._url = BundleUrl.parse(url)
        self.cache = Cache(default_cache_folder())
        self._error_count = 0

    @property
    def location(self) -> str:
        """See `WatchedDeltas`."""
        return str(self._url)

    @property
    def pause_seconds(self) -> float:
        """See `WatchedDeltas`."""
        return min(_MOST_URL_SECONDS, URL_SECONDS * 2.0**self._error_count)

    def steps(self, model_name: str, digest: str) -> Iterator[Step]:
        """See `WatchedDeltas`. A delta that is not taken, since it was refused, counts as an error: it is looked for less often."""
        self._error_count = min(self._error_count + 1, _MOST_ERRORS)
        delta = self._open_next(self._url, self.cache, None, digest)
        if delta is None:
            self._error_count = 0
        else:
            yield Step(delta, delta.location, delta.digest)

    def fetch(self, step: Step, bundle: Bundle) -> None:
        """See `WatchedDeltas`."""
        assert isinstance(step.source, Delta)
        size, most = (sum(file.size for file in listed.listed) for listed in (step.source, bundle))
        if size > most + _MORE_BYTES:
            message = f"expected a delta of at most the {format_bytes(most)} of its bundle, found {format_bytes(size)}"
            raise RemoteError(f"{step.name}: {message}: load the bundle that it makes")
        step.source.check_digests(step.source.files)
        self._error_count = 0


def _read_base(path: Path) -> str:
    """The digest of the base of a delta; empty for anything else. `OSError` if it cannot be read."""
    try:
        with open_regular_file(path / MANIFEST_NAME) as file:
            document = msgspec.json.decode(file.read(limits.MANIFEST_BYTES), type=_Base)
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return ""
    return document.base if document.format == DELTA_FORMAT else ""
