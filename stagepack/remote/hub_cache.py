"""Bundles in the Hub's own cache, where ``hf download`` and transformers put files, for a machine that must not ask the Hub."""

from collections.abc import Sequence
from pathlib import Path

from huggingface_hub import constants, try_to_load_from_cache

from stagepack.errors import NotABundleError, RemoteError, StagepackError
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.file_checks import read_plain_file
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME, SIGNATURE_NAME
from stagepack.remote.stream import Arrivals, DownloadStream
from stagepack.remote.url import BundleUrl


def is_offline() -> bool:
    """Whether the Hub must not be asked: ``HF_HUB_OFFLINE`` is set."""
    return constants.HF_HUB_OFFLINE


def find_snapshot(url: BundleUrl) -> Path | None:
    """Return the folder of a bundle in the Hub's cache; None if that has no manifest."""
    manifest_path = _find_file(url, MANIFEST_NAME)
    return None if manifest_path is None else manifest_path.parent


def _find_file(url: BundleUrl, file_name: str) -> Path | None:
    """Return the path of a file of a URL in the Hub's cache; None if that does not have it."""
    location = url.hub_location
    path = try_to_load_from_cache(
        location.repository, location.path(file_name), cache_dir=constants.HF_HUB_CACHE, revision=location.revision
    )
    return Path(path) if isinstance(path, str) else None


def offline_error(url: BundleUrl) -> StagepackError:
    """Return the error for a bundle whose manifest is in no cache, while the Hub must not be asked."""
    if (config_path := _find_file(url, MODEL_CONFIG_NAME)) is None:
        return RemoteError(offline_message(url, MANIFEST_NAME))
    repository = url.hub_location.repository
    return NotABundleError(
        f"{url}: not a stagepack bundle: expected a {MANIFEST_NAME} in its snapshot {config_path.parent}, found "
        f"{MODEL_CONFIG_NAME}: it is a model and no bundle: 'stagepack export {repository} -o FOLDER' writes a bundle of it [M1]"
    )


def offline_message(url: BundleUrl, file_name: str) -> str:
    """Say that a file of a bundle is in no cache, and how it comes there."""
    location = url.hub_location
    revision = f" --revision {location.revision}" if location.revision else ""
    return (
        f"{url}: HF_HUB_OFFLINE is set, and no cache on this machine has {file_name}: unset it, or copy the cache of a machine that ran "
        f"'hf download {location.repository}{revision}'"
    )


class HubSnapshot:
    """The files of a snapshot, which are all there or missing: a `stagepack.format.file_source.FileSource`. It is never written."""

    def __init__(self, url: BundleUrl, folder: Path) -> None:
        self.location = str(url)
        self.url: str | None = url.with_secrets
        self._url = url
        self._folder = folder

    def fetch(self, entries: Sequence[File], arrivals: Arrivals | None = None) -> None:
        """Refuse files that the snapshot does not have."""
        for entry in entries:
            path = (self._folder / entry.name).resolve()  # the Hub's cache is links to files
            if not path.exists():
                raise RemoteError(offline_message(self._url, entry.name))
            if arrivals is not None:
                arrivals.completed(entry, path)

    def stream(self, entries: Sequence[File]) -> DownloadStream:
        """Return a handle that reads files."""
        return DownloadStream.start(entries, self.fetch)

    def read_signature(self) -> bytes | None:
        """Read the signature file."""
        return read_plain_file(self._folder, SIGNATURE_NAME, limits.SIGNATURE_BYTES)

    def discard(self, entries: Sequence[File]) -> None:
        """Keep damaged files: the cache is not ours."""
