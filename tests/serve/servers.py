"""Servers as processes, and clients that speak to these and to `local_server` in the same words."""

import contextlib
import http.client
import importlib
import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import grpc
import numpy
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException, np_to_triton_dtype

from tests.process_facts import memory_bytes
from tests.waiting import wait_until
from tools.fork_server import ForkedCommand

if TYPE_CHECKING:
    import httpx2

    from tests.serve.local_server import LocalServer

STAGEPACK = str(Path(sys.executable).parent / "stagepack")
# A process inherits signals that are ignored: tests that run in the background, or under nohup, would start servers that ignore them.
WITH_SIGNALS = ("env", "--default-signal=HUP,INT")


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs, and its ports."""

    process: "subprocess.Popen[str] | ForkedCommand"
    http: int
    grpc: int
    facts: Mapping[str, Any]

    def memory(self) -> int:
        return memory_bytes(self.process.pid, "VmRSS")

    def answers(self) -> dict[str, int]:
        """The counts of its answers by status, which `stagepack serve` prints at its end."""
        counts: dict[str, int] = self.last_line()["answers"]
        return counts

    def last_line(self) -> dict[str, Any]:
        """What `stagepack serve` prints at its end."""
        assert self.process.stdout is not None
        facts: dict[str, Any] = json.loads(self.process.stdout.read())
        return facts

    def stop(self) -> int:
        """Tell it to stop, as an orchestrator does; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(timeout=60)


AnyServer: TypeAlias = "Server | LocalServer"


@contextlib.contextmanager
def stagepack_server(
    bundles: Sequence[str | Path],
    *options: str,
    prefix: Sequence[str] = (),
    is_forked: bool = True,
    errors: Path | None = None,
    constants: Mapping[str, float] | None = None,
) -> Iterator[Server]:
    """`stagepack serve`; `prefix` is a command that runs it, such as nohup. For `errors` and `constants` see `ForkedCommand`.

    A forked server starts in a third of the time. It has imported torch.
    """
    ports = ("--http-port", "0", "--grpc-port", "0")
    arguments = ("serve", *map(str, bundles), *ports, "--json", *options)
    # The number of threads is decided when torch is imported.
    if prefix or not is_forked or "--threads" in options:
        command = [*WITH_SIGNALS, *prefix, STAGEPACK, *arguments]
        process: Any = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    else:
        process = ForkedCommand(*arguments, errors=errors, constants=constants)
    assert process.stdout is not None
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            lines.append(process.stdout.readline())
            assert lines[-1], f"the server ended: {process.wait()}"
        facts = json.loads("".join(lines))
        yield Server(process, facts["http_port"], facts["grpc_port"], facts)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


_TRITON_SCRIPT = Path(__file__).parents[2] / "examples" / "run_tritonserver.sh"


def why_no_triton() -> str:
    """Why a tritonserver cannot run here; empty if it can."""
    if importlib.util.find_spec("pytriton") is None:
        return "no tritonserver: the package nvidia-pytriton is not installed, or has no wheel for this machine"
    libc_name = os.confstr("CS_GNU_LIBC_VERSION")
    assert libc_name is not None
    library, version = libc_name.split()
    if tuple(map(int, version.split("."))) < (2, 35):
        return f"no tritonserver: its wheel needs glibc 2.35, this machine has {library} {version}"
    return ""


@contextlib.contextmanager
def triton_server(repository: Path, scratch: Path, backends: Mapping[str, Path] | None = None) -> Iterator[Server]:
    """`tritonserver` of the package nvidia-pytriton on a model repository; `backends` are more than its own."""
    for backend_name, folder in (backends or {}).items():
        if not (scratch / backend_name).exists():
            shutil.copytree(folder, scratch / backend_name)
    http, grpc = free_ports(2)
    command = [
        *("sh", str(_TRITON_SCRIPT), str(repository), "--http-address=127.0.0.1", f"--http-port={http}"),
        *("--grpc-address=127.0.0.1", f"--grpc-port={grpc}", "--allow-metrics=false"),
    ]
    variables = {"BACKENDS": str(scratch), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    with (scratch / "log").open("w") as log:
        process = subprocess.Popen(
            command, env=os.environ | variables, stdout=log, stderr=log, text=True, start_new_session=True
        )
    try:
        _wait(process, http, scratch / "log")
        yield Server(process, http, grpc, {})
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[str], port: int, log: Path) -> None:
    until = time.monotonic() + 180
    with contextlib.closing(http_client(port)) as client:
        while time.monotonic() < until:
            if process.poll() is not None:
                raise AssertionError(f"tritonserver ended:\n{log.read_text()}")
            with contextlib.suppress(OSError):
                if client.is_server_ready():
                    return
            time.sleep(0.2)
    raise AssertionError(f"tritonserver does not get ready:\n{log.read_text()}")


def free_ports(port_count: int) -> list[int]:
    """Ports that nothing listens at, for programs that cannot choose one themselves."""
    ports: list[int] = []
    # Below the ports that the kernel gives to connections, which could take one before the program listens.
    for port in random.sample(range(20_000, 30_000), 1000):
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.bind(("127.0.0.1", port))
            ports.append(port)
        if len(ports) == port_count:
            return ports
    raise AssertionError("no free port")


def http_client(address: "int | httpx2.Client", **options: Any) -> Any:
    """`tritonclient.http` at a port, or over the client of a `LocalServer`."""
    module = importlib.import_module("tritonclient.http")
    if isinstance(address, int):
        return module.InferenceServerClient(f"127.0.0.1:{address}", **options)
    client = module.InferenceServerClient("127.0.0.1:1", **options)
    client._client_stub = importlib.import_module("tests.serve.asgi").TritonStub(address)
    return client


def grpc_client(port: int) -> Any:
    return importlib.import_module("tritonclient.grpc").InferenceServerClient(f"127.0.0.1:{port}")


# Where the bundle ``skips`` is asked.
INFER = "/v2/models/skips/infer"


class Client:
    """One client of `tritonclient`, of either protocol."""

    def __init__(self, protocol: str, server: AnyServer) -> None:
        self.protocol = protocol
        self.module = importlib.import_module(f"tritonclient.{protocol}")
        self.raw = http_client(server.http) if protocol == "http" else grpc_client(server.grpc)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.raw.close()

    def input(self, input_name: str, array: numpy.ndarray, datatype: str | None = None, **options: Any) -> Any:
        datatype = datatype or np_to_triton_dtype(array.dtype)
        tensor = self.module.InferInput(input_name, list(array.shape), datatype)
        return tensor.set_data_from_numpy(array, **options)

    def ask(
        self, model: str, arrays: Mapping[str, numpy.ndarray], *, binary: bool = True, **options: Any
    ) -> dict[str, Any]:
        how: dict[str, Any] = {} if self.protocol == "grpc" else {"binary_data": binary}
        inputs = [self.input(input_name, array, **how) for input_name, array in arrays.items()]
        output_names = options.pop("outputs", None) or [output["name"] for output in self.metadata(model)["outputs"]]
        outputs = [self.module.InferRequestedOutput(output_name, **how) for output_name in output_names]
        answer = self.raw.infer(model, inputs, outputs=outputs, **options)
        return {output_name: answer.as_numpy(output_name) for output_name in output_names}

    def metadata(self, model: str) -> Mapping[str, Any]:
        if self.protocol == "http":
            return self.raw.get_model_metadata(model)
        return self.raw.get_model_metadata(model, as_json=True)

    def config(self, model: str) -> Mapping[str, Any]:
        if self.protocol == "http":
            return self.raw.get_model_config(model)
        return self.raw.get_model_config(model, as_json=True)["config"]


def post(address: "int | httpx2.Client", path: str, body: Any, headers: Any = None) -> tuple[int, Any, Any]:
    """The status, the JSON and the headers of an answer."""
    status, text, answer_headers = send_request(address, "POST", path, body, headers)
    return status, json.loads(text or "null"), answer_headers


def send_request(
    address: "int | httpx2.Client", method: str, path: str, body: Any = None, headers: Any = None
) -> tuple[int, str, Any]:
    """The status, the text and the headers of an answer."""
    if not isinstance(address, int):
        response = address.request(method, path, content=body, headers=headers)
        return response.status_code, response.text, response.headers
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", address, timeout=60)) as connection:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers


def get(
    address: "int | httpx2.Client",
    path: str = "/metrics",
    headers: Mapping[str, str] | None = None,
    method: str = "GET",
) -> tuple[int, str, Any]:
    """The status, the text and the headers of the answer to a request without a body."""
    return send_request(address, method, path, headers=headers)


def post_json(server: AnyServer, path: str, **fields: Any) -> tuple[int, Any]:
    status, answer, _ = post(server.http, path, json.dumps(fields))
    return status, answer


def infer_json(server: AnyServer, model: str, **inputs: numpy.ndarray) -> tuple[int, Any]:
    fields = [
        {"name": name, "shape": array.shape, "datatype": np_to_triton_dtype(array.dtype), "data": array.tolist()}
        for name, array in inputs.items()
    ]
    return post_json(server, f"/v2/models/{model}/infer", inputs=fields)


def skips_request(rows: int = 2) -> dict[str, Any]:
    data = numpy.arange(rows * 8, dtype="float32")
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [rows, 8], "data": data.tolist()},
        {"name": "weight", "datatype": "FP32", "shape": [rows, 1], "data": [0.5] * rows},
    ]
    return {"inputs": inputs, "outputs": [{"name": "y"}]}


def begin_stream(server: AnyServer, path: str, body: Mapping[str, Any]) -> "socket.socket | httpx2.Response":
    """A connection over which the head of an answer has come."""
    if not isinstance(server, Server):
        response = server.http.send(server.http.build_request("POST", path, json=body), stream=True)
        assert response.status_code == 200
        return response
    connection = begin_post(server, path, json.dumps(body).encode())
    assert connection.recv(15) == b"HTTP/1.1 200 OK"
    return connection


def skips_message(rows: int = 2) -> pb.ModelInferRequest:
    contents = [numpy.ones((rows, size), "float32").tobytes() for size in (8, 1)]
    request = pb.ModelInferRequest(model_name="skips", raw_input_contents=contents)
    for input_name, size in (("x", 8), ("weight", 1)):
        request.inputs.add(name=input_name, datatype="FP32", shape=[rows, size])
    return request


@contextlib.contextmanager
def grpc_channel(server: AnyServer, **options: int) -> Iterator[grpc.Channel]:
    """A channel to a server, with options such as ``max_send_message_length``."""
    channel_options = [(f"grpc.{name}", value) for name, value in options.items()]
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc}", options=channel_options) as channel:
        yield channel


@contextlib.contextmanager
def grpc_stub(server: AnyServer, **options: int) -> Iterator[GRPCInferenceServiceStub]:
    with grpc_channel(server, **options) as channel:
        yield GRPCInferenceServiceStub(channel)


def refused(*statuses: str, says: str = "") -> Any:
    """A context in which a call ends with one of these statuses, such as ``404`` or ``NOT_FOUND``, and with such a message."""

    def has_status(error: Any) -> bool:
        status, message = (
            (error.code(), error.details()) if isinstance(error, grpc.RpcError) else (error.status(), error.message())
        )
        return str(status).removeprefix("StatusCode.") in statuses and says in message

    return pytest.raises((grpc.RpcError, InferenceServerException), check=has_status)


def begin_post(server: Server, path: str, body: bytes, body_bytes: int | None = None) -> socket.socket:
    """A connection over which a request with a body was sent, or only so much of it that there are more bytes to come."""
    connection = socket.create_connection(("127.0.0.1", server.http), timeout=20)
    length = len(body) if body_bytes is None else body_bytes
    connection.sendall(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode() + body)
    return connection


def request_counts(server: AnyServer, model_name: str) -> tuple[float, float]:
    """How many requests to a model are accepted and not answered yet, and how many are answered."""
    page = get(server.http)[1]

    def total(metric_name: str) -> float:
        samples = re.findall(rf'^{metric_name}{{model="{model_name}",.*}} (.*)$', page, re.MULTILINE)
        return sum(map(float, samples))

    return total("stagepack_pending_requests"), total("stagepack_requests_total")


def wait_for_requests(server: AnyServer, model_name: str, request_count: int = 1) -> None:
    wait_until(lambda: sum(request_counts(server, model_name)) >= request_count)


def wait_until_not_ready(server: Server) -> None:
    wait_until(lambda: get(server.http, "/v2/health/ready")[0] == 503)


def ask_slow(server: AnyServer, times: int, protocol: str = "http", **options: Any) -> numpy.ndarray:
    """The answer of the bundle ``slow`` after so many products."""
    with Client(protocol, server) as client:
        inputs = {"x": numpy.ones((256, 512), "float32"), "times": numpy.array([times])}
        return client.ask("slow", inputs, outputs=["output"], **options)["output"]


def openai_client(server: AnyServer) -> Any:
    """A client of OpenAI's API, which does not ask again."""
    import openai

    if not isinstance(server, Server):
        http_client = importlib.import_module("httpx2").Client(transport=server.http._transport, trust_env=False)
        url = "http://127.0.0.1/v1"
        return openai.OpenAI(base_url=url, api_key="none", max_retries=0, http_client=http_client)
    return openai.OpenAI(base_url=f"http://127.0.0.1:{server.http}/v1", api_key="none", max_retries=0)
