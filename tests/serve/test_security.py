"""Who may use `stagepack serve`: TLS, client certificates and tokens, asked by curl, tritonclient and the health service of gRPC."""

# Long because all its tests ask one server, which has every defence.

import contextlib
import importlib
import json
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy
import pytest
import tritonclient.grpc
import tritonclient.http
from cryptography.hazmat.primitives.asymmetric import rsa
from geventhttpclient.response import HTTPConnectionClosed
from grpc_health.v1 import health_pb2, health_pb2_grpc
from tritonclient.utils import InferenceServerException

from tests.serve.bundles import Bundles
from tests.serve.certificates import Certificate, make_certificate, secret_file
from tests.serve.servers import Server, refused, stagepack_server
from tests.waiting import wait_until
from tools.fork_server import run_forked

TOKEN = "right-token-0123456789"  # noqa: S105 - of these tests
SECOND_TOKEN = "second-token-0123456789="  # noqa: S105 - of these tests
GEVENT_SSL = importlib.import_module("gevent.ssl")  # the sockets of tritonclient.http are those of gevent
BEARER = f"Authorization: Bearer {TOKEN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """Certificates, good ones and others, and a file with tokens."""

    authority: Certificate
    server: Certificate
    client: Certificate
    expired_client: Certificate
    other_authority: Certificate
    other_client: Certificate
    token_file: Path

    def server_options(self) -> list[str]:
        return ["--tls-certificate", str(self.server.certificate_file), "--tls-key", str(self.server.key_file)]

    def channel(self, server: Server) -> Any:
        files = (self.authority.certificate_file, self.client.key_file, self.client.certificate_file)
        credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in files))
        return grpc.secure_channel(f"127.0.0.1:{server.grpc}", credentials)


@pytest.fixture(scope="module")
def credentials(tmp_path_factory: pytest.TempPathFactory) -> Credentials:
    folder = tmp_path_factory.mktemp("credentials")
    authority, other_authority = make_certificate(folder, "authority"), make_certificate(folder, "other_authority")
    token_file = secret_file(folder / "tokens", f"# of these tests\n\n{TOKEN}\n  {SECOND_TOKEN}  \n")
    return Credentials(
        authority=authority,
        server=make_certificate(folder, "server", authority),
        client=make_certificate(folder, "client", authority),
        expired_client=make_certificate(folder, "expired_client", authority, has_expired=True),
        other_authority=other_authority,
        other_client=make_certificate(folder, "other_client", other_authority),
        token_file=token_file,
    )


@pytest.fixture(scope="module")
def guarded(bundles: Bundles, credentials: Credentials, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server that requires a certificate and a token, and the file with what it writes to standard error."""
    options = [
        *credentials.server_options(),
        *("--tls-client-ca", str(credentials.authority.certificate_file)),
        *("--token-file", str(credentials.token_file), "--first-request-s", "1"),
        *("--access-log", "--log-level", "debug"),
    ]
    log = tmp_path_factory.mktemp("log") / "stderr"
    with stagepack_server([bundles["skips"]], *options, prefix=["sh", "-c", f'exec "$@" 2> {log}', "sh"]) as server:
        yield server, log


@pytest.fixture
def server(guarded: tuple[Server, Path]) -> Server:
    return guarded[0]


def curl(url: str, *arguments: object) -> tuple[int, str, str]:
    """The exit status of curl, its output, and the status of the answer."""
    command = ["curl", "--silent", "--max-time", "20", "--include", *map(str, arguments), url]
    completed = subprocess.run(command, capture_output=True, text=True, check=False)
    status = completed.stdout.split(" ", 2)[1] if completed.stdout else ""
    return completed.returncode, completed.stdout, status


def curl_options(credentials: Credentials, client: Certificate | None = None) -> list[object]:
    """The options with which curl trusts the server, and shows a certificate."""
    client = client or credentials.client
    return [
        *("--cacert", credentials.authority.certificate_file),
        *("--cert", client.certificate_file, "--key", client.key_file),
    ]


def test_curl_is_refused_without_the_right_certificates(server: Server, credentials: Credentials) -> None:
    url, options = f"https://127.0.0.1:{server.http}/v2/health/live", curl_options(credentials)
    trust, mine = options[:2], options[2:]
    wrong_authority = ["--cacert", credentials.other_authority.certificate_file]
    assert curl(url, *options)[2] == "200"
    assert curl(url, *mine)[0] == 60  # the certificate of the server is of an unknown authority
    assert curl(url, *wrong_authority, *mine)[0] == 60
    for refusal in (
        curl(url.replace("https", "http")),
        curl(url, *trust),
        curl(url, *curl_options(credentials, credentials.other_client)),
        curl(url, *curl_options(credentials, credentials.expired_client)),
        curl(url, *trust, *mine, "--tls-max", "1.1", "--ciphers", "DEFAULT@SECLEVEL=0"),
    ):
        assert refusal[0] != 0
        assert refusal[1:] == ("", "")
    assert curl(url, *trust, *mine)[2] == "200"


def test_curl_is_refused_without_a_token(server: Server, credentials: Credentials) -> None:
    url, options = f"https://127.0.0.1:{server.http}/v2", curl_options(credentials)
    for path in ("", "/health/live/", "/models/skips/ready", "/models/skips/infer", "/../metrics", "/../openapi.json"):
        status, answer, code = curl(f"{url}{path}", "--path-as-is", *options)
        assert (status, code) == (0, "401"), path
        assert 'www-authenticate: Bearer realm="stagepack"\n' in answer
    for value in (TOKEN[:-1], f"{TOKEN}0", "", "\xff" * 20, f"{TOKEN} {TOKEN}"):
        _, answer, code = curl(url, *options, "--header", f"Authorization: Bearer {value}")
        assert code == "401"
        assert 'error="invalid_token"' in answer or not value
    assert curl(url, *options, "--header", f"Authorization: Basic {TOKEN}")[2] == "401"
    assert curl(url, *options, "--header", BEARER, "--header", BEARER)[2] == "401"
    status, answer, code = curl(f"{url}/../v1/chat/completions", *options, "--data", "x" * 100_000)
    assert (status, code) == (0, "401")
    assert json.loads(answer.split("\n\n")[-1])["error"]["code"] == "invalid_api_key"


def test_curl_is_answered_with_a_token(server: Server, credentials: Credentials) -> None:
    url, options = f"https://127.0.0.1:{server.http}", curl_options(credentials)
    for value in (f"Bearer {TOKEN}", f"bearer {TOKEN}", f"Bearer {SECOND_TOKEN}"):
        assert curl(f"{url}/v2/models/skips", *options, "--header", f"authorization: {value}")[2] == "200"
    for path in ("/v1/models", "/metrics", "/openapi.json", "/v2/models/skips/ready"):
        assert curl(f"{url}{path}", *options, "--header", BEARER)[2] == "200"
    for path in ("/v2/health/live", "/v2/health/ready"):
        assert curl(f"{url}{path}", *options)[2] == "200"
    _, page, _ = curl(f"{url}/metrics", *options, "--header", BEARER)
    assert 'status="UNAUTHENTICATED"' in page
    _, answer, _ = curl(f"{url}/openapi.json", *options, "--header", BEARER)
    document = json.loads(answer.split("\n\n")[-1])
    assert document["security"] == [{"token": []}]
    open_paths = [path for path in document["paths"] if document["paths"][path].get("get", {}).get("security") == []]
    assert open_paths == ["/v2/health/live", "/v2/health/ready"]


@contextlib.contextmanager
def triton_client(
    protocol: str, server: Server, authority: Certificate | None, client: Certificate | None
) -> Iterator[Any]:
    """A client of `tritonclient` with TLS, or without it."""
    if protocol == "grpc":
        files = {
            "root_certificates": authority and str(authority.certificate_file),
            "private_key": client and str(client.key_file),
            "certificate_chain": client and str(client.certificate_file),
        }
        raw = tritonclient.grpc.InferenceServerClient(f"127.0.0.1:{server.grpc}", ssl=authority is not None, **files)
    else:

        def context(**_: Any) -> Any:
            context = GEVENT_SSL.create_default_context(cafile=authority and authority.certificate_file)
            if client is not None:
                context.load_cert_chain(client.certificate_file, client.key_file)
            return context

        options = {"ssl": True, "ssl_options": {}, "ssl_context_factory": context} if authority else {}
        raw = tritonclient.http.InferenceServerClient(f"127.0.0.1:{server.http}", **options)
    with contextlib.closing(raw):
        yield raw


def infer(protocol: str, raw: Any, **options: Any) -> numpy.ndarray:
    """The answer of the bundle ``skips``."""
    module = {"http": tritonclient.http, "grpc": tritonclient.grpc}[protocol]
    arrays = {"x": numpy.ones((2, 8), "float32"), "weight": numpy.ones((2, 1), "float32")}
    inputs = [
        module.InferInput(input_name, list(array.shape), "FP32").set_data_from_numpy(array)
        for input_name, array in arrays.items()
    ]
    return raw.infer("skips", inputs, **options).as_numpy("y")


@pytest.mark.parametrize("protocol", ["http", "grpc"])
def test_tritonclient_needs_a_certificate_and_a_token(server: Server, credentials: Credentials, protocol: str) -> None:
    with triton_client(protocol, server, credentials.authority, credentials.client) as raw:
        assert raw.is_server_live()
        assert raw.is_server_ready()
        assert infer(protocol, raw, headers={"authorization": f"Bearer {TOKEN}"}).shape == (2, 8)
        for headers in ({}, {"authorization": "Bearer wrong-token-0123456789"}):
            with refused("401", "UNAUTHENTICATED"):
                infer(protocol, raw, headers=headers)
    for authority, client in (
        (None, None),
        (credentials.authority, None),
        (credentials.authority, credentials.other_client),
        (credentials.authority, credentials.expired_client),
        (credentials.other_authority, credentials.client),
    ):
        with (
            triton_client(protocol, server, authority, client) as raw,
            pytest.raises((InferenceServerException, OSError, HTTPConnectionClosed)) as refusal,
        ):
            raw.is_server_live()
        if isinstance(refusal.value, InferenceServerException):
            assert refusal.value.status() == "StatusCode.UNAVAILABLE"


def test_the_health_service_of_grpc(server: Server, credentials: Credentials) -> None:
    with credentials.channel(server) as channel:
        health = health_pb2_grpc.HealthStub(channel)

        def status(service: str, **options: Any) -> Any:
            return health.Check(health_pb2.HealthCheckRequest(service=service), **options).status

        assert status("") == status("inference.GRPCInferenceService") == health_pb2.HealthCheckResponse.SERVING
        with_token = {"metadata": (("authorization", f"Bearer {TOKEN}"),)}
        assert status("skips", **with_token) == health_pb2.HealthCheckResponse.SERVING
        for service in ("skips", "nothing"):
            with refused("UNAUTHENTICATED") as caught:
                status(service)
            assert ("www-authenticate", 'Bearer realm="stagepack"') in caught.value.trailing_metadata()
        with refused("UNAUTHENTICATED"):
            next(health.Watch(health_pb2.HealthCheckRequest()))
        assert next(health.Watch(health_pb2.HealthCheckRequest(), **with_token)).status == 1


def test_a_refused_message_is_not_read(server: Server, credentials: Credentials) -> None:
    """Neither the body over HTTP, nor a message over gRPC, is waited for."""
    context = ssl.create_default_context(cafile=str(credentials.authority.certificate_file))
    context.load_cert_chain(str(credentials.client.certificate_file), str(credentials.client.key_file))
    plain = socket.create_connection(("127.0.0.1", server.http), timeout=20)
    with context.wrap_socket(plain, server_hostname="127.0.0.1") as encrypted:
        encrypted.sendall(b"POST /v2/models/skips/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 60000000\r\n\r\n")
        assert encrypted.recv(12) == b"HTTP/1.1 401"
    with credentials.channel(server) as channel:
        call = channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")
        with refused("UNAUTHENTICATED"):
            call(_never(), timeout=10)


def test_only_who_has_a_token_learns_which_methods_of_grpc_there_are(server: Server, credentials: Credentials) -> None:
    with credentials.channel(server) as channel:
        service, token = "inference.GRPCInferenceService", (("authorization", f"Bearer {TOKEN}"),)
        for method in (f"/{service}/Nothing", "/nothing/Nothing", f"/{service}/TraceSetting"):
            for metadata, status in (((), "UNAUTHENTICATED"), (token, "UNIMPLEMENTED")):
                with refused(status):
                    channel.unary_unary(method)(b"", metadata=metadata, timeout=20)


def test_a_handshake_that_does_not_end(server: Server) -> None:
    with contextlib.ExitStack() as stack:
        connections = []
        for port in (server.http, server.grpc):
            for sent in (b"", b"\x16\x03\x01"):
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=20))
                connection.sendall(sent)
                connections.append(connection)
        start_time = time.monotonic()
        for connection in connections:
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
        assert time.monotonic() - start_time < 10


def _never() -> Iterator[bytes]:
    """Messages that do not come while the call lasts."""
    time.sleep(0.5)
    yield b""


def test_the_token_is_nowhere_to_be_read(guarded: tuple[Server, Path], credentials: Credentials) -> None:
    server, log = guarded
    url = f"https://127.0.0.1:{server.http}/v2/models/skips"
    assert curl(url, *curl_options(credentials), "--header", BEARER)[2] == "200"
    process = Path(f"/proc/{server.process.pid}")
    shown = [(process / "cmdline").read_bytes(), (process / "environ").read_bytes(), log.read_bytes()]
    assert not [content for content in shown if b"right-token" in content or b"wrong-token" in content]
    assert b"PRIVATE KEY" not in shown[2]


@pytest.mark.slow
def test_tls_without_client_certificates(bundles: Bundles, credentials: Credentials) -> None:
    with stagepack_server([bundles["skips"]], *credentials.server_options()) as server:
        assert curl(f"https://127.0.0.1:{server.http}/v2", *curl_options(credentials)[:2])[2] == "200"
        assert curl(f"http://127.0.0.1:{server.http}/v2")[0] != 0
        for protocol in ("http", "grpc"):
            with triton_client(protocol, server, credentials.authority, None) as raw:
                assert infer(protocol, raw).shape == (2, 8)


@pytest.mark.slow
def test_files_that_change_while_the_server_runs(bundles: Bundles, credentials: Credentials, tmp_path: Path) -> None:
    """Connections and requests that are made afterwards have the new certificate and the new tokens."""
    served = make_certificate(tmp_path, "served", credentials.authority)
    key_of_another_kind = rsa.generate_private_key(65537, 2048)
    following = make_certificate(tmp_path, "following", credentials.other_authority, key=key_of_another_kind)
    token_file = secret_file(tmp_path / "tokens", TOKEN)
    options = ["--tls-certificate", str(served.certificate_file), "--tls-key", str(served.key_file)]
    with stagepack_server([bundles["skips"]], *options, "--token-file", str(token_file)) as server:

        def answers(protocol: str, authority: Certificate, token: str) -> bool:
            try:
                with triton_client(protocol, server, authority, None) as raw:
                    return infer(protocol, raw, headers={"authorization": f"Bearer {token}"}).shape == (2, 8)
            except (InferenceServerException, OSError, HTTPConnectionClosed):
                return False

        for protocol in ("http", "grpc"):
            assert answers(protocol, credentials.authority, TOKEN)
            assert not answers(protocol, credentials.other_authority, TOKEN)
        served.certificate_file.write_bytes(following.certificate_file.read_bytes())
        served.key_file.write_bytes(following.key_file.read_bytes())
        token_file.write_text(SECOND_TOKEN)
        wait_until(lambda: answers("http", credentials.other_authority, SECOND_TOKEN), 20)
        for protocol in ("http", "grpc"):
            assert answers(protocol, credentials.other_authority, SECOND_TOKEN)
            assert not answers(protocol, credentials.other_authority, TOKEN)
            assert not answers(protocol, credentials.authority, SECOND_TOKEN)


SERVER_OF_PYTHON = """
import sys

import stagepack

pipeline = stagepack.load(sys.argv[1])
stagepack.serve(
    {"skips": pipeline},
    http_port=0,
    grpc_port=0,
    check_token=lambda token: token.startswith("for-skips-"),
    on_listening=lambda addresses: print(addresses.http_port, addresses.grpc_port, flush=True),
)
"""


@pytest.mark.slow
def test_a_function_of_python_checks_the_tokens(bundles: Bundles) -> None:
    command = [sys.executable, "-c", SERVER_OF_PYTHON, str(bundles["skips"])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            http_port, grpc_port = map(int, process.stdout.readline().split())
            server = Server(process, http_port, grpc_port, {})
            for protocol in ("http", "grpc"):
                with triton_client(protocol, server, None, None) as raw:
                    assert infer(protocol, raw, headers={"authorization": "Bearer for-skips-1"}).shape == (2, 8)
                    with pytest.raises(InferenceServerException):
                        infer(protocol, raw, headers={"authorization": "Bearer for-others-1"})
        finally:
            process.terminate()


@pytest.mark.slow
def test_tokens_without_tls(bundles: Bundles, credentials: Credentials) -> None:
    with stagepack_server([bundles["skips"]], "--token-file", str(credentials.token_file)) as server:
        for protocol in ("http", "grpc"):
            with triton_client(protocol, server, None, None) as raw:
                assert raw.is_server_ready()
                assert infer(protocol, raw, headers={"authorization": f"Bearer {SECOND_TOKEN}"}).shape == (2, 8)
                with pytest.raises(InferenceServerException):
                    infer(protocol, raw)
        assert curl(f"http://127.0.0.1:{server.http}/v2")[2] == "401"


@pytest.mark.slow
def test_an_error_ends_the_command_before_it_listens(
    bundles: Bundles, credentials: Credentials, tmp_path: Path
) -> None:
    token_file = secret_file(tmp_path / "tokens", TOKEN, 0o644)
    completed = run_forked("serve", str(bundles["skips"]), "--token-file", str(token_file))
    assert completed.returncode == 1
    [line] = completed.stderr.splitlines()
    assert "permissions 0644" in line
    assert completed.stdout == ""
