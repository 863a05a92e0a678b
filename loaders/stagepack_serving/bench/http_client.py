"""HTTP/1.1 connections of a load generator, which does little for a request, since it competes with the server for processors."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import quote, urlsplit

import h11

from stagepack.errors import OptionError
from stagepack.remote.url import without_secrets

# Why a request has no whole answer, as the table of results names it.
NO_CONNECTION: Final = "no connection"
CUT_OFF: Final = "cut off"


class NoAnswerError(Exception):
    """A request has no whole answer; `outcome` says why in few words."""

    def __init__(self, outcome: str) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerUrl:
    """Where a server is, and what each request to it has.

    Attributes:
        prefix: the path before those of the protocols, without a slash at its end.
        token: sent as ``Authorization: Bearer TOKEN``; None for none.
        tls: how to check the server's certificate; None for no encryption.
    """

    host: str
    port: int
    prefix: str = ""
    token: str | None = None
    tls: ssl.SSLContext | None = None

    @classmethod
    def parse(cls, url: str, token: str | None = None, authority_file: str | None = None) -> Self:
        """Parse a URL such as ``http://127.0.0.1:8000``."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        is_host = (
            bool(parts.hostname) and parts.netloc.isascii() and parts.netloc.isprintable() and "@" not in parts.netloc
        )
        if parts.scheme not in ("http", "https") or not is_host or port == -1 or parts.query:
            raise OptionError(f"{without_secrets(url)}: expected the URL of a server, such as http://127.0.0.1:8000")
        is_encrypted = parts.scheme == "https"
        return cls(
            host=parts.hostname or "",
            port=port or (443 if is_encrypted else 80),
            prefix=quote(parts.path.rstrip("/"), safe="/%"),
            token=token,
            tls=_tls_context(authority_file) if is_encrypted else None,
        )

    def encode(
        self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[str, str]] = ()
    ) -> "EncodedRequest":
        """Return a request to a path of the server, whose names are not encoded yet; it can be sent many times."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        all_headers = [("host", f"{host}:{self.port}"), ("content-length", str(len(body))), *headers]
        if self.token is not None:
            all_headers.append(("authorization", f"Bearer {self.token}"))
        head = h11.Request(method=method, target=self.prefix + quote(path), headers=all_headers)
        return EncodedRequest(head=head, body=body)


def _tls_context(authority_file: str | None) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=authority_file)
    except OSError as error:  # those of ssl are such, and do not name the file
        message = f"{authority_file}: expected a PEM file with certificates of authorities: {error.strerror or error}"
        raise OptionError(message) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request, ready to be sent."""

    head: h11.Request
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerHead:
    """The status of an answer, and the seconds after which the server asks to be asked again; None if it does not say it."""

    status: int
    retry_after: float | None


class _Connection(asyncio.Protocol):
    """A connection, which has at most one request under way."""

    def __init__(self) -> None:
        self._http = h11.Connection(h11.CLIENT)
        self._on_data: Callable[[bytes], None] = lambda _: None
        self._answer: asyncio.Future[AnswerHead] | None = None
        self._head: AnswerHead | None = None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # uvloop's is of no class of asyncio
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._fail(CUT_OFF)

    def data_received(self, data: bytes) -> None:
        self._read(data)

    def eof_received(self) -> None:
        self._read(b"")

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and self._http.our_state is h11.IDLE

    def send(self, request: EncodedRequest, on_data: Callable[[bytes], None]) -> asyncio.Future[AnswerHead]:
        """Send a request; the result is there when the whole answer is."""
        answer = asyncio.get_running_loop().create_future()
        self._answer, self._on_data, self._head = answer, on_data, None
        assert self._transport is not None
        parts = [self._http.send(request.head)]
        if request.body:
            parts.append(self._http.send(h11.Data(request.body)))
        parts.append(self._http.send(h11.EndOfMessage()))
        self._transport.write(b"".join(part for part in parts if part))
        return answer

    def close(self) -> None:
        """Close the connection at once, as a client that waits no longer."""
        if self._transport is not None:
            self._transport.abort()

    def _read(self, data: bytes) -> None:
        """Read what the server has sent; nothing if it sends no more."""
        try:
            self._http.receive_data(data)
            while True:
                event = self._http.next_event()
                if isinstance(event, h11.Response):
                    self._head = _answer_head(event)
                elif isinstance(event, h11.Data):
                    self._on_data(bytes(event.data))
                elif isinstance(event, h11.EndOfMessage):
                    self._finish()
                    return
                elif not isinstance(event, h11.InformationalResponse):
                    return  # more data is needed, or the connection is closed
        except h11.RemoteProtocolError:
            self._fail(CUT_OFF)
            self.close()

    def _finish(self) -> None:
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self.close()
        if self._answer is not None and not self._answer.done():
            assert self._head is not None
            self._answer.set_result(self._head)

    def _fail(self, outcome: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(NoAnswerError(outcome))


def _answer_head(response: h11.Response) -> AnswerHead:
    retry_after = next((value for name, value in response.headers if name == b"retry-after"), b"")
    return AnswerHead(status=response.status_code, retry_after=float(retry_after) if retry_after.isdigit() else None)


class HttpClient:
    """Connections to one server, which are used again."""

    def __init__(self, url: ServerUrl) -> None:
        self._url = url
        self._idle: list[_Connection] = []

    async def ask(self, request: EncodedRequest, on_data: Callable[[bytes], None]) -> AnswerHead:
        """Send a request and return the head of its whole answer; the parts of the body go to `on_data` as they come.

        A cancelled request closes its connection.
        """
        connection = await self._connect()
        try:
            answer = await connection.send(request, on_data)
        except BaseException:
            connection.close()
            raise
        if connection.is_open:
            self._idle.append(connection)
        return answer

    async def fetch(self, request: EncodedRequest) -> tuple[int, bytes]:
        """Return the status and the body of an answer."""
        parts: list[bytes] = []
        head = await self.ask(request, parts.append)
        return head.status, b"".join(parts)

    async def _connect(self) -> _Connection:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self._url.host, self._url.port, ssl=self._url.tls)
        except OSError:
            raise NoAnswerError(NO_CONNECTION) from None
        return connection

    def close(self) -> None:
        """Close the connections that are not used."""
        for connection in self._idle:
            connection.close()


@contextlib.asynccontextmanager
async def http_client(url: ServerUrl) -> AsyncIterator[HttpClient]:
    """A client whose connections end with the context."""
    client = HttpClient(url)
    try:
        yield client
    finally:
        client.close()
