"""`stagepack bench` counts what a server does, and nothing else as good."""

import asyncio
import contextlib
import json
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stagepack_serving.bench.http_client import ServerUrl
from tests.hostile.attack import command_fails, run
from tests.process_facts import child_processes
from tests.serve.bundles import Bundles
from tests.serve.servers import Server, get, skips_request, stagepack_server
from tests.waiting import wait_until
from tools.fork_server import ForkedCommand

BODY = b'{"outputs": []}'
HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 15\r\n"


def bench(source: str, *options: str) -> Mapping[str, Any]:
    result = run("bench", source, "--seconds", "0.5", "--warmup-s", "0.1", "--json", *options)
    assert result.exit_code == 0, result.output
    facts: Mapping[str, Any] = json.loads(result.stdout)
    return facts


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.http}"


def answered(server: Server, model: str) -> float:
    """How many requests the server itself has answered with success."""
    page = get(server.http)[1]
    counts = re.findall(rf'^stagepack_requests_total{{model="{model}",.*status="OK".*}} (.*)$', page, re.MULTILINE)
    return sum(map(float, counts))


@contextlib.contextmanager
def scripted_server(answer: Callable[[int], bytes | None]) -> Iterator[str]:
    """A server that sends these bytes for each request by its number and closes, or keeps silent for None. Yields its URL."""
    ready, loop = threading.Event(), asyncio.new_event_loop()
    ports: list[int] = []

    async def serve_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            numbers.append(len(numbers))
            content = answer(numbers[-1])
            if content is None:
                await reader.read()
            else:
                writer.write(content)
                await writer.drain()
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(serve_connection, "127.0.0.1", 0)
        ports.append(server.sockets[0].getsockname()[1])
        ready.set()
        await ended.wait()
        server.close()

    numbers: list[int] = []
    ended = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    ready.wait()
    try:
        yield f"http://127.0.0.1:{ports[0]}"
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join()
        loop.close()


@pytest.fixture
def inference_file(tmp_path: Path) -> Path:
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(json.dumps(skips_request(rows)) for rows in (1, 2)))
    return path


@pytest.mark.process
def test_a_closed_loop_counts_what_the_server_counts(torch_server: Server) -> None:
    before = answered(torch_server, "skips")
    options = "--model skips --clients 2 --seconds 1 --warmup-s 0 --shape x=3,8 --shape weight=3,1"
    facts = bench(url(torch_server), *options.split())
    assert set(facts["outcomes"]) == {"200"}
    # One more is sent before the measurement, and one for each client is answered after it.
    assert answered(torch_server, "skips") - before == facts["requests"] + 1
    assert facts["requests"] - 2 <= facts["throughput"] <= facts["requests"]
    # Little's law: two requests are always under way.
    assert facts["latency"]["mean"] * facts["requests"] == pytest.approx(2, rel=0.3)


@pytest.mark.process
def test_an_open_loop_sends_at_its_rate(torch_server: Server, inference_file: Path) -> None:
    options = ("--model", "skips", "--requests", str(inference_file), "--rate", "40", "--arrivals", "constant")
    facts = bench(url(torch_server), *options, "--seconds", "1", "--deadline-ms", "60000")
    assert facts["requests"] == pytest.approx(40, abs=1)
    assert facts["outcomes"] == {"200": facts["requests"]}
    assert facts["good"] == facts["requests"]
    assert facts["attempts"] == facts["requests"]


@pytest.mark.process
def test_a_text_has_the_tokens_that_were_asked_for(writer: Path) -> None:
    with stagepack_server([writer]) as server:
        facts = bench(url(server), "--clients", "2", "--prompt-tokens", "5", "--output-tokens", "7")
    text_count = facts["outcomes"].pop("200")
    assert not facts["outcomes"]
    assert facts["api"] == "completions"
    assert facts["text"]["prompt_tokens"] == 5 * text_count
    assert facts["text"]["output_tokens"] <= 7 * text_count
    assert 0 < facts["text"]["ttft"]["mean"] < facts["latency"]["mean"]
    assert facts["text"]["output_tokens_per_second"] > 0


@pytest.mark.process
def test_a_bundle_has_a_server_of_its_own(bundles: Bundles) -> None:
    result = run("bench", str(bundles["skips"]), "--seconds", "0.5", "--rate", "20", "--", "--max-batch", "4")
    assert result.exit_code == 0, result.output
    assert re.search(r"^  200 +\d+  100.0%$", result.stdout, re.MULTILINE)
    assert "skips (infer) at http://127.0.0.1:" in result.stdout


@pytest.mark.process
@pytest.mark.parametrize(
    ("content", "outcome"),
    [
        (HEAD + b"\r\n" + BODY[:7], "cut off"),
        (b'HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{"out', "cut off"),
        (b"nonsense\r\n\r\n", "cut off"),
        (b"", "cut off"),
        (b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\nretry-after: 100\r\n\r\n", "503"),
        (b"HTTP/1.1 500 Bug\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", "500"),
        (None, "timed out"),
    ],
)
def test_what_is_no_whole_answer_is_not_good(content: bytes | None, outcome: str, inference_file: Path) -> None:
    def answer(number: int) -> bytes | None:
        return HEAD + b"\r\n" + BODY if number % 2 == 0 else content

    with scripted_server(answer) as server_url:
        timeout = "0.1" if content is None else "20"
        options = ("--model", "m", "--requests", str(inference_file), "--timeout-s", timeout, "--clients", "1")
        facts = bench(server_url, *options)
    assert set(facts["outcomes"]) == {"200", outcome}
    assert facts["good"] == facts["outcomes"]["200"]
    assert abs(facts["outcomes"]["200"] - facts["outcomes"][outcome]) <= 1
    assert facts["attempts"] == facts["requests"]


@pytest.mark.process
@pytest.mark.parametrize(
    "events",
    [
        'data: {"choices": [{"text": "a"}]}\n\n',
        'data: {"choices": [{"text": "a"}]}\n\ndata: {"error": {"message": "late"}}\n\ndata: [DONE]\n\n',
        "data: [DONE]\n\n",
        "data: {]\n\ndata: [DONE]\n\n",
    ],
)
def test_a_stream_without_its_end_or_with_an_error_is_not_good(events: str, tmp_path: Path) -> None:
    usage = '{"choices": [], "usage": {"completion_tokens": 3}}'
    whole = f'data: {{"choices": [{{"text": "a"}}], "usage": null}}\n\ndata: {usage}\n\ndata: [DONE]\n\n'
    path = tmp_path / "requests.jsonl"
    path.write_text('{"prompt": "a", "model": "m"}')

    def answer(number: int) -> bytes:
        content = (whole if number % 2 == 0 else events).encode()
        return b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(content), content)

    with scripted_server(answer) as server_url:
        facts = bench(server_url, "--requests", str(path))
    assert set(facts["outcomes"]) == {"200", "not whole"}
    assert facts["text"]["output_tokens"] == 3 * facts["outcomes"]["200"]


@pytest.mark.process
def test_a_client_asks_again(inference_file: Path) -> None:
    contents = [HEAD + b"\r\n" + BODY, b"HTTP/1.1 503 Busy\r\nconnection: close\r\ncontent-length: 0\r\n\r\n", None]
    with scripted_server(lambda number: contents[number % 3]) as server_url:
        options = ("--model", "m", "--requests", str(inference_file), "--deadline-ms", "50", "--retry", "2")
        facts = bench(server_url, *options)
    assert facts["timeout"] == 0.05
    # The last one may end with the measurement.
    assert facts["outcomes"]["200"] >= facts["requests"] - 1
    assert facts["attempts"] == pytest.approx(3 * facts["requests"], abs=3)
    assert facts["latency"]["p50"] > 0.05


@pytest.mark.process
def test_a_server_that_stalls_delays_no_request_of_an_open_loop(inference_file: Path) -> None:
    # For half a second of a run of a second, nothing is answered: the requests of that time wait a quarter of a second on average.
    stall_start: list[float] = []

    def answer(number: int) -> bytes:
        if number == 10:
            stall_start.append(time.perf_counter())
            time.sleep(0.5)
        return HEAD + b"\r\n" + BODY

    with scripted_server(answer) as server_url:
        options = ("--model", "m", "--requests", str(inference_file), "--rate", "50", "--arrivals", "constant")
        facts = bench(server_url, *options, "--seconds", "1")
    assert facts["requests"] == pytest.approx(50, abs=1)
    assert facts["latency"]["max"] > 0.45
    assert facts["latency"]["mean"] > 0.1


@pytest.mark.process
@pytest.mark.parametrize(("stop_signal", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_signal_ends_the_command_and_its_server(
    bundles: Bundles, tmp_path: Path, stop_signal: signal.Signals, status: int
) -> None:
    arguments = ("bench", str(bundles["skips"]), "--seconds", "600", "--", "--access-log")
    (log := tmp_path / "log").touch()
    process = ForkedCommand(*arguments, errors=log)
    with process.stdout:
        wait_until(lambda: log.read_text().count("rest skips 1 OK") > 3)
        (server_id,) = child_processes(process.pid)
        process.send_signal(stop_signal)
        assert process.wait(timeout=60) == status
    assert not Path(f"/proc/{server_id}").exists()
    assert "Traceback" not in log.read_text()


@pytest.mark.process
def test_a_server_that_is_gone_is_asked_ten_times_a_second(bundles: Bundles, inference_file: Path) -> None:
    with stagepack_server([bundles["skips"]]) as server:
        stopping = threading.Timer(0.5, server.process.kill)
        stopping.start()
        facts = bench(url(server), "--model", "skips", "--requests", str(inference_file), "--seconds", "2")
        stopping.join()
    assert facts["outcomes"]["200"] > 0
    assert 1 <= facts["outcomes"]["no connection"] <= 20


def test_wrong_uses_are_refused(inference_file: Path, tmp_path: Path) -> None:
    nowhere = "http://127.0.0.1:9"
    assert "does not answer" in command_fails("bench", nowhere)
    assert "no connection" in command_fails("bench", nowhere, "--model", "m", "--requests", str(inference_file))
    assert "expected the URL of a server" in command_fails("bench", "http://a b:x/", "--model", "m")
    (tmp_path / "bad.jsonl").write_text('{"inputs": []}\n[]')
    assert "line 2: expected a JSON object" in command_fails(
        "bench", nowhere, "--requests", str(tmp_path / "bad.jsonl")
    )
    (tmp_path / "bad.jsonl").write_text('{"inputs": []}\n{"prompt": "a"}')
    assert "expected requests of one kind" in command_fails("bench", nowhere, "--requests", str(tmp_path / "bad.jsonl"))
    result = run("bench", nowhere, "--", "--max-batch", "2")
    assert result.exit_code == 2
    assert "options after '--' are those of one that is started" in result.output


@pytest.mark.parametrize("source", ["http://bücher:80", "http://a\x01b", "http://me:secret@a", "http://@a"])
def test_url_that_names_no_server_is_refused(source: str) -> None:
    message = command_fails("bench", source, "--model", "m")
    assert "expected the URL of a server" in message
    assert "secret" not in message


@pytest.mark.parametrize("content", [b"", b"# comment\n\n", "bücher".encode(), b"a\0b"])
def test_file_without_a_token_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokens").write_bytes(content)
    assert "tokens: expected a token" in command_fails(
        "bench", "http://127.0.0.1:9", "--token-file", str(tmp_path / "tokens")
    )


def test_file_without_authorities_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.pem").write_text("x")
    for file_name in ("bad.pem", "none.pem"):
        message = command_fails("bench", "https://127.0.0.1:9", "--tls-ca", str(tmp_path / file_name))
        assert f"{file_name}: expected a PEM file with certificates of authorities: " in message


def test_names_are_encoded_in_requests() -> None:
    request = ServerUrl.parse("http://a/é b/%41/").encode("GET", "/v2/models/é ?#%41")
    assert request.head.target == b"/%C3%A9%20b/%41/v2/models/%C3%A9%20%3F%23%2541"


@pytest.mark.process
def test_bench_asks_whatever_model_serve_has(bundles: Bundles, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"# of clients\n\n{'a' * 32}\n{'b' * 32}\n")
    tokens.chmod(0o600)
    options = ("--token-file", str(tokens))
    result = run("bench", f"é ?={bundles['skips']}", "--seconds", "0.5", *options, "--", *options, "--host", "::1")
    assert result.exit_code == 0, result.output
    assert "é ? (infer) at http://[::1]:" in result.stdout


@pytest.mark.process
def test_a_server_refuses_the_first_request(torch_server: Server) -> None:
    options = "--model minilm --shape input_ids=1,9999 --shape attention_mask=1,9999"
    message = command_fails("bench", url(torch_server), *options.split())
    assert "the first request to the model minilm has the answer 400" in message
    assert "name one of" in command_fails("bench", url(torch_server))
    assert "no such input" in command_fails("bench", url(torch_server), "--model", "skips", "--shape", "z=1")
