"""Files at the URLs of all file systems of fsspec but HTTP: S3, Google Cloud Storage, Azure, SFTP and so on."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import fsspec

from stagepack.errors import MissingPackageError, OptionError, RemoteError
from stagepack.extras import install_command
from stagepack.remote.store import (
    ByteSink,
    FetchError,
    MissingFileError,
    PermanentFetchError,
    RemoteStore,
    WrongSizeError,
)
from stagepack.remote.url import without_secrets

_Result = TypeVar("_Result")
# Bytes of one request where the store is read from its first byte to its last.
_WHOLE_STEP = 16 * 2**20
_S3_SCHEMES = ("s3", "s3a")


class FsspecStore(RemoteStore):
    """The folder of a bundle in a file system of fsspec."""

    def __init__(self, url: str, storage_options: Mapping[str, Any] | None = None) -> None:
        self._folder_scheme = scheme = url.partition("://")[0]
        try:
            self._file_system, self._folder = fsspec.url_to_fs(url, **(storage_options or {}))
        except ImportError as error:
            message = f"{scheme}://: a package is not installed: {error}"
            if scheme in _S3_SCHEMES:
                message += f". {install_command('remote')} installs it"
            raise MissingPackageError(message, name=error.name) from None
        except (TypeError, ValueError) as error:
            raise OptionError(f"{scheme}://: {without_secrets(str(error))}") from None
        except Exception as error:  # noqa: BLE001 - some connect at once, and have errors of their own
            raise RemoteError(f"{scheme}://: {_reason(error)}") from None

    def read_small(self, file_name: str, max_bytes: int) -> bytes:
        """See `RemoteStore.read_small`."""
        path = self._path(file_name)
        size: int | None = self._call(lambda: self._file_system.info(path)["size"])
        if not size:
            return b""
        content: bytes = self._call(lambda: self._file_system.cat_file(path, start=0, end=min(size, max_bytes + 1)))
        return content

    def read_range(self, file_name: str, start: int, end: int, size: int, sink: ByteSink) -> None:
        """See `RemoteStore.read_range`."""
        path = self._path(file_name)
        try:
            content: bytes = self._call(lambda: self._file_system.cat_file(path, start=start, end=end))
        except MissingFileError:
            raise
        except FetchError:
            self._check_size(path, size)  # most file systems have no error of their own for a range past the end
            raise
        if len(content) != end - start:
            self._check_size(path, size)
            raise FetchError(f"expected the bytes {start} to {end - 1}, found {len(content)} bytes")
        sink(content)

    def read_whole(self, file_name: str, size: int, sink: ByteSink) -> None:
        """See `RemoteStore.read_whole`."""
        for start in range(0, size, _WHOLE_STEP):
            self.read_range(file_name, start, min(start + _WHOLE_STEP, size), size, sink)

    def cancel(self) -> None:
        """Do nothing: fsspec cannot end a read. It ends by itself, and nobody takes its bytes."""

    def _check_size(self, path: str, size: int) -> None:
        self._file_system.invalidate_cache()
        actual_size: int | None = self._call(lambda: self._file_system.info(path)["size"])
        if actual_size not in (None, size):
            raise WrongSizeError(f"expected {size} bytes, found a file of {actual_size}")

    def _path(self, file_name: str) -> str:
        return f"{self._folder.rstrip('/')}/{file_name}"

    def _call(self, read: Callable[[], _Result]) -> _Result:
        """Convert the errors of a file system, which have no common base."""
        try:
            return read()
        except FileNotFoundError as error:
            raise MissingFileError(f"there is no such file: {error}") from None
        except PermissionError as error:
            raise PermanentFetchError(_reason(error)) from None
        except Exception as error:  # noqa: BLE001 - each file system has errors of its own
            if _lacks_credentials(error):
                # fsspec would give the same client, without credentials, to the next call after the user has set them.
                self._file_system.clear_instance_cache()
                cure = "give credentials as the client of the store takes them"
                if self._folder_scheme in _S3_SCHEMES:
                    cure = "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or FSSPEC_S3_ANON=true for a public bucket"
                raise PermanentFetchError(f"{_reason(error)}: {cure}") from None
            raise FetchError(_reason(error)) from None


def _lacks_credentials(error: Exception) -> bool:
    """Whether a client has no credentials, or cannot use its settings: another try has the same end. By names: no client is imported."""
    class_names = [base.__name__ for base in type(error).__mro__]
    if "BotoCoreError" in class_names:
        return "HTTPClientError" not in class_names
    return any("Credential" in name or name == "ClientAuthenticationError" for name in class_names)


def _reason(error: Exception) -> str:
    """The kind and the message of an error, in one line."""
    return without_secrets(f"{type(error).__name__}: {' '.join(str(error).split())}")[:300]
