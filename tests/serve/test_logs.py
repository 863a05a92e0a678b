"""Records of logs say which request they belong to, in every process, and nothing that a client sends forges one."""

import contextlib
import http.client
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import stagepack
from stagepack_loaders.logs import RequestTrace, begin_trace
from tests.distributed.test_serving import stage_process_ids
from tests.serve.bundles import Bundles
from tests.serve.servers import (
    INFER,
    Server,
    get,
    grpc_channel,
    post,
    skips_message,
    skips_request,
    stagepack_server,
    wait_for_requests,
)
from tests.waiting import wait_until

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{SPAN}-01"


def records(log: Path) -> list[dict[str, Any]]:
    """The records of a log, each of which is one line of JSON in ASCII."""
    lines = log.read_bytes().decode("ascii").splitlines()
    return [json.loads(line) for line in lines]


def access_records(log: Path, count: int) -> list[dict[str, Any]]:
    """The records of so many requests, which may be written after the answers."""
    wait_until(lambda: log.read_bytes().count(b'"stagepack.access"') >= count)
    found = [record for record in records(log) if record["logger"] == "stagepack.access"]
    assert len(found) == count
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "log"
    path.touch()
    return path


JSON_LOG = ("--log-format", "json", "--access-log")
DEBUG = ("--processes", "2", "--access-log", "--log-level", "debug")


@pytest.fixture(scope="module")
def running(
    bundles: Bundles, writer: Path, slow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Server, Path]]:
    (log := tmp_path_factory.mktemp("log") / "log").touch()
    with stagepack_server([bundles["skips"], writer, slow], *JSON_LOG, errors=log) as server:
        yield server, log


@pytest.fixture
def server(running: tuple[Server, Path]) -> Server:
    return running[0]


@pytest.fixture
def server_log(running: tuple[Server, Path]) -> Path:
    """What the server logs from here on."""
    os.truncate(running[1], 0)  # the server appends
    return running[1]


@pytest.mark.parametrize(
    ("header", "is_taken"),
    [
        (TRACEPARENT, True),
        (f"00-{TRACE}-{SPAN}-00", True),
        (f"cc-{TRACE}-{SPAN}-01-of-a-later-version", True),
        (None, False),
        ("", False),
        (f"00-{TRACE}-{SPAN}-01-more", False),
        (f"ff-{TRACE}-{SPAN}-01", False),
        (f"00-{TRACE.upper()}-{SPAN}-01", False),
        (f"00-{'0' * 32}-{SPAN}-01", False),
        (f"00-{TRACE}-{'0' * 16}-01", False),
        (f" {TRACEPARENT}", False),
        (f"{TRACEPARENT}\n", False),
        (f"00-{TRACE}-{SPAN}-1", False),
    ],
)
def test_only_a_valid_traceparent_is_taken(header: str | None, is_taken: bool) -> None:
    trace = begin_trace(header)
    assert (trace.trace_id == TRACE) is is_taken
    assert (trace.parent_id == SPAN) is is_taken
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-0[01]", trace.traceparent)
    assert trace.span_id != SPAN
    assert RequestTrace.of_words(trace.words()) == RequestTrace(trace.trace_id, trace.span_id, flags=trace.flags)


@pytest.mark.process
def test_a_record_has_all_of_a_request_over_rest(server: Server, server_log: Path) -> None:
    port, body = server.http, json.dumps(skips_request(2)).encode()
    status, _, answer = post(port, f"{INFER}?token=secret", body, {"traceparent": TRACEPARENT})
    assert status == 200
    assert post(port, INFER, b'{"inputs": []}', {"Authorization": "Bearer secret"})[0] == 400
    assert post(port, "/v2/models/none/infer", b"{}")[0] == 404
    assert post(port, "/v2/health/live", b"")[0] == 405
    post(port, "/v1/completions", b'{"model": "skips", "prompt": "secret"}')
    health_trace = get(port, "/v2/health/live")[2]["traceparent"]
    whole, refused, unknown, not_allowed, text = access_records(server_log, 5)
    version, trace_id, span_id, flags = answer["traceparent"].split("-")
    assert (version, trace_id, flags) == ("00", TRACE, "01")
    assert [whole.pop(name) for name in ("trace_id", "span_id", "parent_id")] == [TRACE, span_id, SPAN]
    times = {name: whole.pop(name) for name in ("seconds", "queue_seconds", "run_seconds")}
    assert 0 < times["run_seconds"] <= times["seconds"]
    assert 0 <= times["queue_seconds"] <= times["seconds"]
    assert re.fullmatch(r"127\.0\.0\.1:\d+", whole.pop("client"))
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", whole.pop("time"))
    del whole["message"], whole["process"]
    assert whole.pop("weight_version") == dict(answer.items())["x-model-version"]
    assert whole == {
        "level": "info",
        "logger": "stagepack.access",
        "protocol": "rest",
        "model": "skips",
        "version": "1",
        "status": "OK",
        "code": 200,
        "operation": f"POST {INFER}",
        "request_bytes": len(body),
        "answer_bytes": int(answer["content-length"]),
    }
    assert (refused["status"], refused["code"], refused["run_seconds"]) == ("BAD_REQUEST", 400, None)
    assert (unknown["status"], unknown["model"]) == ("NOT_FOUND", "")
    assert (not_allowed["status"], not_allowed["operation"]) == ("405", "POST /v2/health/live")
    assert (text["protocol"], text["operation"]) == ("openai", "POST /v1/completions")
    assert len({record["trace_id"] for record in (refused, unknown, not_allowed, text)} | {TRACE}) == 5
    assert health_trace
    assert "secret" not in server_log.read_text()


@pytest.mark.process
def test_calls_and_messages_over_grpc_have_records(server: Server, server_log: Path) -> None:
    request, metadata = skips_message(1), (("traceparent", TRACEPARENT),)
    with grpc_channel(server) as channel:
        stub = GRPCInferenceServiceStub(channel)
        response, call = stub.ModelInfer.with_call(request, metadata=metadata)
        assert len(list(stub.ModelStreamInfer(iter([request, request]), metadata=metadata))) == 2
        stub.ServerLive(pb.ServerLiveRequest())
        stub.ModelMetadata(pb.ModelMetadataRequest(name="skips"))
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(pb.ModelInferRequest(model_name="skips"))
        with pytest.raises(grpc.RpcError):
            channel.unary_unary("/no.Service/a b\x1b[2J\n")(b"")
    alone, first, second, about, refused, unknown = access_records(server_log, 6)
    (returned_trace,) = [value for key, value in call.trailing_metadata() if key == "traceparent"]
    assert returned_trace == f"00-{TRACE}-{alone['span_id']}-01"
    for record in (alone, first, second):
        assert (record["trace_id"], record["parent_id"], record["protocol"]) == (TRACE, SPAN, "grpc")
        assert (record["model"], record["version"], record["status"], record["code"]) == ("skips", "1", "OK", None)
        assert record["request_bytes"] == request.ByteSize()
        assert record["answer_bytes"] == response.ByteSize()
        assert record["run_seconds"] > 0
    assert len({record["span_id"] for record in (alone, first, second)}) == 3
    assert alone["operation"] == "/inference.GRPCInferenceService/ModelInfer"
    assert first["operation"] == "/inference.GRPCInferenceService/ModelStreamInfer"
    assert (about["status"], about["operation"]) == ("OK", "/inference.GRPCInferenceService/ModelMetadata")
    assert refused["status"] == "BAD_REQUEST"
    assert unknown["status"] == "UNIMPLEMENTED"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", alone["client"])


def check_forgery(server: Server, log: Path) -> None:
    forged = "a%0A2026-01-01 rest skips 1 OK\x1b[2J".replace(" ", "%20").replace("\x1b", "%1b")
    assert post(server.http, f"/v2/models/{forged}/infer", b"{}", {"traceparent": "x\x9b31m"})[0] == 404
    assert post(server.http, "/v1/completions", json.dumps({"model": "a\nb c\x1b", "prompt": ""}))[0] == 404
    wait_until(lambda: log.read_bytes().count(b"\n") >= 2)
    content = log.read_bytes()
    assert len(content.splitlines()) == 2
    assert all(line.decode().isprintable() for line in content.split(b"\n"))
    assert len(content.decode().splitlines()) == 2
    assert b"rest skips 1 OK" not in content


@pytest.mark.process
def test_nothing_that_a_client_sends_forges_a_record_of_json(server: Server, server_log: Path) -> None:
    check_forgery(server, server_log)


@pytest.mark.process
def test_nothing_that_a_client_sends_forges_a_line_of_text(bundles: Bundles, log: Path) -> None:
    with stagepack_server([bundles["skips"]], "--access-log", errors=log) as server:
        check_forgery(server, log)


@pytest.fixture(scope="module")
def two_stages(bundles: Bundles, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("two_stages") / "skips.stagepack"
    return stagepack.recut(bundles["skips"], out=out, stages=2).path


def ask_processes(server: Server) -> tuple[str, str]:
    """Ask one request that has a trace and one that has none; return the ids of the trace and the span of the first answer."""
    status, _, answer = post(server.http, INFER, json.dumps(skips_request()), {"traceparent": TRACEPARENT})
    assert status == 200
    assert post(server.http, INFER, json.dumps(skips_request()))[0] == 200
    _, trace_id, span_id, _ = answer["traceparent"].split("-")
    return trace_id, span_id


@pytest.mark.process
def test_processes_of_stages_name_the_request_in_a_log_of_text(log: Path, two_stages: Path) -> None:
    with stagepack_server([two_stages], *DEBUG, errors=log) as server:
        assert ask_processes(server)[0] == TRACE
    lines = [line for line in log.read_text().splitlines() if line.endswith(f" trace={TRACE}")]
    assert sum("rest skips 1 OK" in line for line in lines) == 1
    debugged = {line.split("DEBUG ")[1].split(":")[0] for line in lines if "DEBUG" in line}
    assert debugged == {"process 1", "process 2"}


@pytest.mark.process
def test_the_texts_of_a_batch_belong_to_no_request_alone(server: Server, server_log: Path) -> None:
    for number in range(2):
        fields = {"model": "writer", "prompt": "a", "max_tokens": 3}
        header = f"00-{number + 1:032x}-{SPAN}-01"
        assert post(server.http, "/v1/completions", json.dumps(fields), {"traceparent": header})[0] == 200
    written = access_records(server_log, 2)
    assert [int(record["trace_id"], 16) for record in written] == [1, 2]
    assert [record["status"] for record in written] == ["OK", "OK"]
    assert {record["protocol"] for record in written} == {"openai"}


class Inverse(torch.nn.Module):
    """Fails on matrices that have no inverse, in its second stage."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        doubled = x * 2
        stagepack.split_here()
        return torch.linalg.inv(doubled)


@pytest.mark.process
def test_records_of_processes_of_stages_name_the_request_also_when_a_stage_fails_or_the_server_is_killed(
    log: Path, two_stages: Path, tmp_path: Path
) -> None:
    inverse = stagepack.export(Inverse(), (torch.eye(2)[None],), out=tmp_path / "inverse.stagepack").path
    matrix = {"name": "x", "shape": [1, 2, 2], "datatype": "FP32", "data": [0] * 4}
    header = {"traceparent": f"00-{'a' * 32}-{SPAN}-01"}
    with stagepack_server([two_stages, inverse], *DEBUG, *JSON_LOG, errors=log) as server:
        trace_id, span_id = ask_processes(server)
        status, answer, _ = post(server.http, "/v2/models/inverse/infer", json.dumps({"inputs": [matrix]}), header)
        process_ids = stage_process_ids(server)
        # torch may write lines of text where the store has gone, which depends on what is on the way at that moment.
        for process_id in process_ids:
            assert b"TORCH_CPP_LOG_LEVEL=ERROR" in Path(f"/proc/{process_id}/environ").read_bytes().split(b"\0")
    wait_until(lambda: not any(Path(f"/proc/{process_id}").exists() for process_id in process_ids))
    assert {record["process"] for record in records(log)} >= set(process_ids)
    found = [record for record in records(log) if record.get("trace_id") == TRACE == trace_id]
    assert sorted(record["rank"] for record in found if record["logger"] == "stagepack") == [1, 2]
    # Each record of the request, in three processes, has the span that the client was told.
    assert {record["span_id"] for record in found} == {span_id}
    assert len({record["process"] for record in found}) == 3
    assert (status, "stage 1 failed" in answer["error"]) == (500, True)
    failed = [record for record in records(log) if record.get("trace_id") == "a" * 32 and record["level"] != "debug"]
    in_process, at_front, access = failed
    assert (in_process["level"], in_process["rank"], in_process["stage"]) == ("info", 2, 1)
    assert (at_front["level"], at_front["logger"]) == ("warning", "stagepack.serve")
    assert (access["status"], access["code"]) == ("MODEL_FAILED", 500)


@pytest.mark.process
def test_a_client_that_hangs_up_has_a_record(server: Server, server_log: Path) -> None:
    x = {"name": "x", "shape": [256, 512], "datatype": "FP32", "data": [1.0] * 256 * 512}
    times = {"name": "times", "shape": [1], "datatype": "INT64", "data": [300]}
    body = json.dumps({"inputs": [x, times]})
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.http)) as connection:
        connection.request("POST", "/v2/models/slow/infer", body)
        wait_for_requests(server, "slow")
    wait_until(lambda: "HUNG_UP" in server_log.read_text())
    (record,) = [record for record in records(server_log) if record.get("model") == "slow"]
    assert (record["status"], record["request_bytes"]) == ("HUNG_UP", len(body))
