"""Certificates that are read again: later connections have the new ones and trust only the new authorities, on both protocols."""

import asyncio
import functools
import socket
import ssl
import threading
from collections.abc import Iterator
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding

from stagepack_serving.server.security import ServerSecurity, ServerTls, read_security
from tests.serve.certificates import Certificate, make_certificate, secret_file

REFUSED = (ssl.SSLError, ConnectionResetError)


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsServers:
    """A server of asyncio and one of gRPC with the same files.

    Attributes:
        ports: their ports by the name of the protocol in TLS.
    """

    folder: Path
    security: ServerSecurity
    ports: dict[str, int]

    def install(self, server: Certificate, authority: Certificate) -> None:
        """Replace the files of the servers, and have them read."""
        install(self.folder, server, authority)
        for files in self.security.watched_files:
            files.check()

    def connect(
        self,
        protocol: str,
        client: Certificate,
        session: ssl.SSLSession | None = None,
        version: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3,
    ) -> tuple[bytes, ssl.SSLSession, bool]:
        """The certificate of the server, and the session of a connection and whether it is that of an earlier one."""
        context = client_context(client.certificate_file, client.key_file, protocol, version)
        with (
            socket.create_connection(("127.0.0.1", self.ports[protocol]), timeout=10) as connection,
            context.wrap_socket(connection, session=session) as stream,
        ):
            # With TLS 1.3, the end of the handshake does not say whether the server accepts the client.
            if not stream.recv(1):
                raise ConnectionResetError
            certificate = stream.getpeercert(binary_form=True)
            assert certificate is not None
            assert stream.session is not None
            return certificate, stream.session, bool(stream.session_reused)


@functools.cache  # a session belongs to a context
def client_context(certificate: Path, key: Path, protocol: str, version: ssl.TLSVersion) -> ssl.SSLContext:
    """The context of a client that takes any certificate of the server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = version
    context.set_alpn_protocols([protocol])
    context.load_cert_chain(certificate, key)
    return context


def install(folder: Path, server: Certificate, authority: Certificate) -> None:
    files = (server.certificate_file, server.key_file, authority.certificate_file)
    for name, source in zip(("server.pem", "server.key", "ca.pem"), files, strict=True):
        secret_file(folder / f"{name}.new", source.read_bytes()).replace(folder / name)


async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    await writer.drain()
    writer.close()


class GreetingServer:
    """A server of asyncio in a thread of its own."""

    def __init__(self, tls: ServerTls) -> None:
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result(10)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> asyncio.Server:
        self._loop.set_exception_handler(lambda *_: None)  # of clients that are refused
        return await asyncio.start_server(greet, "127.0.0.1", 0, ssl=self._tls.context)


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


@pytest.fixture
def authority(tmp_path: Path) -> Certificate:
    return make_certificate(tmp_path, "authority")


@pytest.fixture
def client(tmp_path: Path, authority: Certificate) -> Certificate:
    return make_certificate(tmp_path, "client", authority)


@pytest.fixture
def servers(tmp_path: Path, authority: Certificate) -> Iterator[TlsServers]:
    folder = tmp_path / "installed"
    folder.mkdir()
    install(folder, make_certificate(tmp_path, "first", authority), authority)
    certificate, key, authorities = (folder / name for name in ("server.pem", "server.key", "ca.pem"))
    security = read_security(tls_certificate=certificate, tls_key=key, tls_client_ca=authorities, token_file=None)
    assert security.tls is not None
    greeting_server = GreetingServer(security.tls)
    grpc_server = grpc.server(futures.ThreadPoolExecutor(1))
    grpc_port = grpc_server.add_secure_port("127.0.0.1:0", security.tls.grpc_credentials())
    grpc_server.start()
    yield TlsServers(folder=folder, security=security, ports={"http/1.1": greeting_server.port, "h2": grpc_port})
    grpc_server.stop(None).wait()
    greeting_server.close()


@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
def test_a_certificate_with_a_key_of_another_kind(
    protocol: str,
    servers: TlsServers,
    authority: Certificate,
    client: Certificate,
    rsa_key: rsa.RSAPrivateKey,
    tmp_path: Path,
) -> None:
    for number, key in enumerate([rsa_key, None, rsa_key]):
        following = make_certificate(tmp_path, f"following_{number}", authority, key=key)
        servers.install(following, authority)
        assert servers.connect(protocol, client)[0] == following.certificate.public_bytes(Encoding.DER)


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("protocol", ["http/1.1", "h2"])
def test_an_authority_that_is_removed(
    protocol: str, version: ssl.TLSVersion, servers: TlsServers, client: Certificate, tmp_path: Path
) -> None:
    """Its clients are refused, also those that go on with the session of an earlier connection."""
    other_authority = make_certificate(tmp_path, "other_authority")
    other_client = make_certificate(tmp_path, "other_client", other_authority)
    with pytest.raises(REFUSED):
        servers.connect(protocol, other_client, version=version)
    _, session, _ = servers.connect(protocol, client, version=version)
    assert servers.connect(protocol, client, session, version)[2]
    servers.install(make_certificate(tmp_path, "following", other_authority), other_authority)
    for resumed_session in (session, None):
        with pytest.raises(REFUSED):
            servers.connect(protocol, client, resumed_session, version)
    servers.connect(protocol, other_client, version=version)


def test_an_authority_that_cannot_be_used(
    servers: TlsServers, client: Certificate, caplog: pytest.LogCaptureFixture
) -> None:
    (servers.folder / "ca.pem").write_text("nothing")
    for files in servers.security.watched_files:
        files.check()
    assert "expected a client CA in PEM" in caplog.text
    assert "the server goes on with what it read before" in caplog.text
    for protocol in servers.ports:
        servers.connect(protocol, client)
