"""Files at HTTP URLs, the Hugging Face Hub among them.

fsspec has the session and its settings; the answers are checked here. What fsspec itself reads is not bounded: a server that answers a
request for a range with more bytes would fill the memory.
"""

import asyncio
import contextlib
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import CancelledError, Future
from typing import Any, Final

import aiohttp
from fsspec.implementations.http import HTTPFileSystem

from stagepack.remote.store import (
    ByteSink,
    FetchError,
    MissingFileError,
    PermanentFetchError,
    RangesIgnoredError,
    RemoteStore,
    WrongSizeError,
)
from stagepack.remote.url import without_secrets

# Seconds without a byte, and to a connection, after which a try has failed.
STALL_SECONDS = 30.0
# A try may take this many seconds more for each byte; a slower server has failed. 16 KiB a second.
_SECONDS_PER_BYTE: Final = 1 / 2**14
_TEMPORARY_STATUSES: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_MISSING_STATUSES: Final = frozenset({404, 410})
_RANGE_PATTERN: Final = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)", re.ASCII)
_UNSATISFIED_PATTERN: Final = re.compile(r"bytes \*/(\d{1,19})", re.ASCII)


class HttpStore(RemoteStore):
    """The folder of a bundle on an HTTP server."""

    def __init__(
        self,
        file_url: Callable[[str], str],
        headers: Mapping[str, str] | None = None,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        options = dict(storage_options or {})
        client_options = {"auto_decompress": False, "trust_env": True} | options.pop("client_kwargs", {})
        self._file_url = file_url
        self._headers = dict(headers or {}) | options.pop("headers", {}) | {"Accept-Encoding": "identity"}
        self._file_system = HTTPFileSystem(skip_instance_cache=True, client_kwargs=client_options, **options)
        self._pending: set[Future[Any]] = set()
        self._lock = threading.Lock()

    def read_small(self, file_name: str, max_bytes: int) -> bytes:
        """See `RemoteStore.read_small`."""
        content = bytearray()
        self._wait(
            self._read(file_name, {}, max_bytes, lambda response: self._copy_up_to(response, max_bytes, content))
        )
        return bytes(content)

    def read_range(self, file_name: str, start: int, end: int, size: int, sink: ByteSink) -> None:
        """See `RemoteStore.read_range`."""

        async def copy(response: aiohttp.ClientResponse) -> None:
            if response.status != 206 and (start, end) != (0, size):
                raise RangesIgnoredError("the server sends whole files alone")
            if response.status == 206:
                _check_range(response, start, end, size)
            await _copy(response, end - start, sink)

        self._wait(self._read(file_name, {"Range": f"bytes={start}-{end - 1}"}, end - start, copy))

    def read_whole(self, file_name: str, size: int, sink: ByteSink) -> None:
        """See `RemoteStore.read_whole`."""
        self._wait(self._read(file_name, {}, size, lambda response: _copy(response, size, sink)))

    def cancel(self) -> None:
        """End all reads that other threads wait for."""
        with self._lock:
            for future in self._pending:
                future.cancel()

    async def _read(
        self,
        file_name: str,
        headers: Mapping[str, str],
        byte_count: int,
        copy: Callable[[aiohttp.ClientResponse], Coroutine[Any, Any, None]],
    ) -> None:
        """Request a file, and pass a successful response to `copy`."""
        file_system = self._file_system
        session = await file_system.set_session()
        timeout = aiohttp.ClientTimeout(
            total=2 * STALL_SECONDS + byte_count * _SECONDS_PER_BYTE,
            sock_connect=STALL_SECONDS,
            sock_read=STALL_SECONDS,
        )
        url = self._file_url(file_name)
        options = {"timeout": timeout, **file_system.kwargs, "headers": self._headers | headers}
        try:
            async with session.get(file_system.encode_url(url), **options) as response:
                _check_status(response)
                if url.startswith("https:") and response.url.scheme != "https":
                    raise PermanentFetchError("the server redirects from https to http")
                encoding = response.headers.get("Content-Encoding", "identity")
                if encoding not in ("", "identity"):
                    raise PermanentFetchError(f"expected the bytes of the file, found the encoding {encoding[:40]!r}")
                await copy(response)
        except TimeoutError:
            raise FetchError("the server does not answer, or too slowly") from None
        except aiohttp.TooManyRedirects:
            raise PermanentFetchError("the server redirects in a circle") from None
        except aiohttp.ClientPayloadError:
            raise FetchError("the connection ended before the whole answer was there") from None
        except (aiohttp.InvalidURL, aiohttp.ClientSSLError) as error:
            raise PermanentFetchError(_http_reason(error)) from None
        except (aiohttp.ClientError, OSError) as error:
            raise FetchError(_http_reason(error)) from None

    async def _copy_up_to(self, response: aiohttp.ClientResponse, max_bytes: int, content: bytearray) -> None:
        content.clear()
        async for piece in _pieces(response):
            content.extend(piece[: max_bytes + 1 - len(content)])
            if len(content) > max_bytes:
                response.close()
                return

    def _wait(self, read: Coroutine[Any, Any, None]) -> None:
        """Run a read in fsspec's event loop, and wait for it."""
        future = asyncio.run_coroutine_threadsafe(read, self._file_system.loop)
        with self._lock:
            self._pending.add(future)
        try:
            future.result()
        except CancelledError:
            raise PermanentFetchError("cancelled") from None
        finally:
            if future.cancel() or future.cancelled():  # also if the waiting was interrupted
                # The sink may be writing to a file that is closed next. After one turn of the loop, it is done.
                asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._file_system.loop).result()
            with self._lock:
                self._pending.discard(future)
            del future  # which has the error, whose traceback has this frame: what the callers hold would wait for the garbage collector


def _check_status(response: aiohttp.ClientResponse) -> None:
    """Raise the error of a response that is not successful."""
    status = response.status
    if status in (200, 206):
        return
    message = f"HTTP status {status} {without_secrets(response.reason or '')[:100]}".rstrip()
    if status in _MISSING_STATUSES:
        raise MissingFileError(message)
    if status == 416:
        match = _UNSATISFIED_PATTERN.fullmatch(response.headers.get("Content-Range", ""))
        raise WrongSizeError(f"the server has {f'a file of {match[1]} bytes' if match else 'a smaller file'}")
    if status in (401, 403):
        message += ": give the credentials that the server asks for"
    if status not in _TEMPORARY_STATUSES:
        raise PermanentFetchError(message)
    retry_seconds = None
    with contextlib.suppress(ValueError):
        retry_seconds = max(0.0, float(response.headers.get("Retry-After", "")))
    raise FetchError(message, retry_seconds=retry_seconds)


def _check_range(response: aiohttp.ClientResponse, start: int, end: int, size: int) -> None:
    """Compare the range of a response with the one that was asked for."""
    content_range = response.headers.get("Content-Range", "")
    match = _RANGE_PATTERN.fullmatch(content_range)
    if match is None or (int(match[1]), int(match[2])) != (start, end - 1):
        raise FetchError(f"expected the bytes {start} to {end - 1}, found Content-Range {content_range[:80]!r}")
    if match[3] not in ("*", str(size)):
        raise WrongSizeError(f"the server has a file of {match[3]} bytes")


async def _pieces(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yield the body of a response as it comes."""
    deadline = time.monotonic() + 2 * STALL_SECONDS
    while True:
        async with asyncio.timeout(min(STALL_SECONDS, deadline - time.monotonic())):
            piece = await response.content.readany()
        if not piece:
            return
        deadline += len(piece) * _SECONDS_PER_BYTE
        yield piece


async def _copy(response: aiohttp.ClientResponse, byte_count: int, sink: ByteSink) -> None:
    """Pass the body of a response on, which must have `byte_count` bytes."""
    length = response.content_length
    if length is not None and length != byte_count:
        message = f"expected {byte_count} bytes, found Content-Length {length}"
        raise FetchError(message) if response.status == 206 else WrongSizeError(message)
    remaining = byte_count
    async for piece in _pieces(response):
        if len(piece) > remaining:
            raise WrongSizeError(f"the server sends more than {byte_count} bytes")
        sink(piece)
        remaining -= len(piece)
    if remaining:
        raise FetchError(f"the connection ended after {byte_count - remaining} of {byte_count} bytes")


def _http_reason(error: Exception) -> str:
    """The message of an error of the client, in one line."""
    return without_secrets(" ".join(str(error).split()) or type(error).__name__)[:300]
