"""Bundles on the Hugging Face Hub: the repository of a model whose root, or a folder of it, is the bundle.

- A bundle in the Hub's own cache, where ``hf download`` and transformers put files, for a machine that must not ask the Hub.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, constants, get_token, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import OfflineModeIsEnabled

from stagepack.errors import NotABundleError, RemoteError, StagepackError
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.file_checks import read_plain_file
from stagepack.format.rules import MANIFEST_NAME, MODEL_CONFIG_NAME, SIGNATURE_NAME
from stagepack.remote.store import STALL_SECONDS, HttpStore
from stagepack.remote.stream import Arrivals, FileStream
from stagepack.remote.url import BundleUrl

_SHOWN_CAUSES: Final = 3
_CONNECTION_ERRORS: Final = frozenset(("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"))


def open_hub_store(url: BundleUrl, storage_options: Mapping[str, Any] | None = None) -> HttpStore:
    """Return the files of a bundle on the hub, at the commit that the revision names now.

    So all files are of one commit, also when the repository changes while they are downloaded.

    storage_options: ``token`` and ``endpoint``, where these are not those of the environment; the others go to fsspec.
    """
    options = dict(storage_options or {})
    token, endpoint = options.pop("token", None) or get_token(), options.pop("endpoint", None)
    location = url.hub_location
    api = HfApi(endpoint=endpoint, token=token)
    try:
        model = api.model_info(location.repository, revision=location.revision, timeout=STALL_SECONDS)
    except OfflineModeIsEnabled:
        raise offline_error(url) from None
    except Exception as error:  # noqa: BLE001 - those of the HTTP client that the hub's library chose
        is_cached = _is_unreachable(error) and find_snapshot(url) is not None
        cure = ", or set HF_HUB_OFFLINE=1 to use the snapshot in its cache on this machine" if is_cached else ""
        raise RemoteError(f"{url}: {error_reason(error)}{cure}") from None

    def file_url(file_name: str) -> str:
        return hf_hub_url(location.repository, location.path(file_name), revision=model.sha, endpoint=api.endpoint)

    # Where the hub redirects to another host, the client leaves this header out.
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HttpStore(file_url, headers=headers, storage_options=options)


def error_reason(error: Exception) -> str:
    """The messages of an error and of what caused it, in one line. Clients wrap an error in one of the same words: it is said once."""
    causes = _causes(error)
    reason = ": ".join(
        dict.fromkeys(f"{type(cause).__name__}: {' '.join(str(cause).split())}"[:300] for cause in causes)
    )
    if _is_unreachable(error):
        return f"the Hugging Face Hub cannot be reached: {reason}: check the connection"
    return reason


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub was not reached. By names: which HTTP client the hub's library has differs between its versions."""
    return any(
        isinstance(cause, ConnectionError) or type(cause).__name__ in _CONNECTION_ERRORS for cause in _causes(error)
    )


def _causes(error: Exception) -> list[BaseException]:
    """An error and what caused it."""
    causes: list[BaseException] = [error]
    while causes[-1].__cause__ is not None and len(causes) < _SHOWN_CAUSES:
        causes.append(causes[-1].__cause__)
    return causes


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

    def stream(self, entries: Sequence[File]) -> FileStream:
        """Return a handle that reads files."""
        return FileStream.start(entries, self.fetch)

    def read_signature(self) -> bytes | None:
        """Read the signature file."""
        return read_plain_file(self._folder, SIGNATURE_NAME, limits.SIGNATURE_BYTES)

    def discard(self, entries: Sequence[File]) -> None:
        """Keep damaged files: the cache is not ours."""
