"""Bundles on the Hugging Face Hub: the repository of a model whose root, or a folder of it, is the bundle."""

from collections.abc import Mapping
from typing import Any, Final

from huggingface_hub import HfApi, get_token, hf_hub_url
from huggingface_hub.errors import OfflineModeIsEnabled

from stagepack.errors import RemoteError
from stagepack.remote.http_store import STALL_SECONDS, HttpStore
from stagepack.remote.hub_cache import find_snapshot, offline_error
from stagepack.remote.url import BundleUrl

_SHOWN_CAUSES: Final = 3
_CONNECTION_ERRORS: Final = frozenset(("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError"))


def open_hub_store(url: BundleUrl, storage_options: Mapping[str, Any] | None = None) -> HttpStore:
    """Return the files of a bundle on the hub, at the commit that the revision names now.

    So all files are of one commit, also when the repository changes while they are downloaded.

    storage_options: ``token`` and ``endpoint`` in place of the environment's; the others go to fsspec.
    """
    options = dict(storage_options or {})
    token, endpoint = options.pop("token", None) or get_token(), options.pop("endpoint", None)
    location = url.hub_location
    api = HfApi(endpoint=endpoint, token=token)
    try:
        model = api.model_info(location.repository, revision=location.revision, timeout=STALL_SECONDS)
    except OfflineModeIsEnabled:
        raise offline_error(url) from None
    except Exception as error:  # noqa: BLE001 - errors of the HTTP client that the hub's library chose
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
