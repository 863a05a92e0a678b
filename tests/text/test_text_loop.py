"""Texts of many clients are generated as one batch: what each says, who waits, and what ends before its time."""

import contextlib
import json
import os
import pty
import random
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from tests.serve.local_server import local_server, serving
from tests.serve.servers import (
    STAGEPACK,
    WITH_SIGNALS,
    AnyServer,
    Server,
    begin_stream,
    post,
    post_json,
)
from tests.serve.test_serve import metrics
from tests.text.generating_families import POSITIONS, VOCABULARY, export_qwen
from tests.text.generating_model import tokenizer
from tests.waiting import wait_until

ROWS, CLIENTS = 4, 12
GENERATE = "/v2/models/qwen/generate"
MODES: Mapping[str, tuple[str, ...]] = {
    "one process": (),
    "processes": ("--processes", "2", "--max-restarts", "1000000"),
    "ONNX Runtime": ("--runtime", "onnxruntime"),
    "exact": ("--exact",),
}
Request = tuple[dict[str, Any], list[int]]


@pytest.fixture(scope="module")
def requests(qwen: Path) -> list[Request]:
    """Requests of drawn lengths, greedy and sampled, and the new tokens of each alone."""
    drawn, pipeline = random.Random(0), stagepack.load(qwen)  # noqa: S311 - of a test
    requests = []
    for number in range(40):
        length = drawn.choice((1, 2, 5, 17, 40))
        tokens = [drawn.randrange(2, VOCABULARY) for _ in range(length)]
        settings: dict[str, Any] = {"max_new_tokens": drawn.randint(1, 20)}
        if number % 2:
            settings |= {"do_sample": True, "temperature": 0.8, "seed": number}
        generated = pipeline.generate(torch.tensor([tokens]), **settings)
        requests.append(({"input_ids": tokens, "parameters": settings}, generated[0, length:].tolist()))
    return requests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(mode, marks=() if mode in ("one process", "processes") else pytest.mark.slow) for mode in MODES
    ],
)
def server(request: pytest.FixtureRequest, qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[AnyServer]:
    with mode_server(qwen, request.param, tmp_path_factory.mktemp("mode"), "--deadline-s", "50") as server:
        yield server


@contextlib.contextmanager
def mode_server(qwen: Path, mode: str, folder: Path, *options: str) -> Iterator[AnyServer]:
    bundle = Path(shutil.copytree(qwen, folder / qwen.name))
    if mode == "ONNX Runtime":
        stagepack.add_onnx(bundle)
    with serving([bundle], *MODES[mode], *options) as server:
        yield server


def with_tokenizer(qwen: Path, folder: Path, *more_tokens: str) -> Path:
    """A copy of the bundle whose prompts may be texts."""
    made = tokenizer()
    made.add_tokens(list(more_tokens))
    (folder / "tokenizer.json").write_text(made.to_str())
    bundle = Path(shutil.copytree(qwen, folder / qwen.name))
    stagepack.add_assets(bundle, [folder / "tokenizer.json"])
    return bundle


def generate(server: AnyServer, body: Mapping[str, Any]) -> tuple[int, Any]:
    return post_json(server, GENERATE, **body)


def is_idle(server: AnyServer, model: str = "qwen") -> bool:
    found = metrics(server)
    names = ("texts", "cache_tokens", "sequences", "pending_requests")
    return all(found[f"stagepack_{name}", model] == 0 for name in names)


def test_each_client_gets_the_tokens_of_its_text_alone(server: AnyServer, requests: list[Request]) -> None:
    with ThreadPoolExecutor(CLIENTS) as clients:
        answers = list(clients.map(lambda request: generate(server, request[0]), requests * 2))
    assert [(status, answer["output_ids"]) for status, answer in answers] == [
        (200, tokens) for _, tokens in requests * 2
    ]
    assert is_idle(server)


def test_texts_that_nobody_waits_for_leave_their_rows(server: AnyServer, requests: list[Request]) -> None:
    endless = {"input_ids": [3], "parameters": {"max_new_tokens": POSITIONS}}
    for connection in [begin_stream(server, f"{GENERATE}_stream", endless) for _ in range(2 * ROWS)]:
        connection.close()
    body, tokens = requests[0]
    assert generate(server, body) == (200, {**generate(server, body)[1], "output_ids": tokens})
    wait_until(lambda: is_idle(server), 10)


def test_what_is_measured(server: AnyServer, requests: list[Request]) -> None:
    before = metrics(server)
    counts = [len(generate(server, body)[1]["output_ids"]) for body, _ in requests[:5]]
    after = metrics(server)

    def added(name: str) -> float:
        found: float = after[f"stagepack_{name}", "qwen"] - before[f"stagepack_{name}", "qwen"]
        return found

    assert added("generated_tokens_total") == sum(counts)
    assert added("first_token_seconds_count") == len(counts)
    assert added("token_seconds_count") == sum(counts) - len(counts)


def test_prompts_wait_up_to_a_number_of_tokens(qwen: Path) -> None:
    body = {"input_ids": [3] * 30, "parameters": {"max_new_tokens": 35}}
    with local_server([qwen], "--max-batch", "1", "--max-tokens-waiting", "70") as server:
        with ThreadPoolExecutor(CLIENTS) as clients:
            answers = list(clients.map(lambda _: generate(server, body), range(CLIENTS)))
        refused = [answer["error"] for status, answer in answers if status == 503]
        assert all("tokens wait already, and at most 70 may: try again later" in error for error in refused)
        assert {status for status, _ in answers} == {200, 503}
        assert generate(server, body)[0] == 200


def test_a_terminal_shows_how_fast_texts_are_generated(qwen: Path, requests: list[Request]) -> None:
    ours, theirs = pty.openpty()
    command = [STAGEPACK, "serve", str(qwen), "--http-port", "0", "--grpc-port", "0", "--access-log"]
    process = subprocess.Popen([*WITH_SIGNALS, *command], stdin=theirs, stdout=theirs, stderr=theirs, text=True)
    os.close(theirs)
    shown = ""

    def read_until(pattern: str) -> re.Match[str]:
        nonlocal shown
        while not (match := re.search(pattern, shown)):
            shown += os.read(ours, 1000).decode()
        return match

    try:
        server = Server(process, int(read_until(r"http://127.0.0.1:(\d+)")[1]), 0, {})
        assert f"qwen: 2 stages on cpu; up to {ROWS} texts at once" in shown
        assert "tokens/s" not in shown
        with ThreadPoolExecutor(2) as clients:
            is_shown = threading.Event()

            def ask_until_shown(request: Request) -> None:
                while not is_shown.is_set():
                    assert generate(server, request[0])[1]["output_ids"] == request[1]

            asking = [clients.submit(ask_until_shown, request) for request in requests[-2:]]
            read_until(r"[12] texts? under way, [1-9]\d* tokens/s")
            is_shown.set()
            for future in asking:
                future.result()
        process.send_signal(signal.SIGINT)
        read_until("stopped: .* OK\r\n")
        assert process.wait(timeout=60) == 0
        assert shown.rindex("\x1b[?25h") < shown.index("stopped")  # the cursor is back
        assert re.search(r"[\d:]{8},\d{3} rest qwen 1 OK", shown)
        assert not re.search(r"tokens/s\d", shown)  # the line makes room for what is logged
    finally:
        process.kill()
        os.close(ours)


def test_a_text_whose_call_fails_does_not_end_the_others(qwen: Path, tmp_path: Path) -> None:
    """The tokenizer of a bundle may have tokens that its model has not."""
    bundle = with_tokenizer(qwen, tmp_path, "<more>")
    settings: dict[str, Any] = {"max_new_tokens": 50}
    prompts = [[3, 4], [5], [6, 7, 8]]
    pipeline = stagepack.load(bundle)
    expected = [pipeline.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist() for prompt in prompts]
    with local_server([bundle]) as server, ThreadPoolExecutor(CLIENTS) as clients:
        wrong = clients.map(lambda _: generate(server, {"input_ids": [9, VOCABULARY]}), range(4))
        pending = [clients.submit(generate, server, {"input_ids": text, "parameters": settings}) for text in prompts]
        assert all(status in (400, 500) for status, _ in wrong)
        assert [(answer.result()[0], answer.result()[1]["output_ids"]) for answer in pending] == [
            (200, tokens) for tokens in expected
        ]
        wait_until(lambda: is_idle(server), 10)


def test_texts_that_are_too_large_together_are_generated_with_fewer(qwen: Path) -> None:
    body = {"input_ids": [3] * 30, "parameters": {"max_new_tokens": 5}}
    with local_server([qwen], "--max-value-bytes", "40000") as server, ThreadPoolExecutor(CLIENTS) as clients:
        assert generate(server, body)[0] == 200
        answers = list(clients.map(lambda _: generate(server, body), range(CLIENTS)))
        assert [status for status, _ in answers] == [200] * CLIENTS


def test_texts_of_a_cache_for_one_take_turns(tmp_path: Path) -> None:
    path = export_qwen(tmp_path, batch=1)
    assert "cache_moves" not in {edge.name for edge in stagepack.open(path).inputs}
    with local_server([path]) as server, ThreadPoolExecutor(CLIENTS) as clients:
        long = [
            clients.submit(generate, server, {"input_ids": [3], "parameters": {"max_new_tokens": POSITIONS}})
            for _ in range(6)
        ]
        wait_until(lambda: metrics(server)["stagepack_texts", "qwen"] == len(long), 10)
        assert generate(server, {"input_ids": [4], "parameters": {"max_new_tokens": 1}})[0] == 200
        assert not any(answer.done() for answer in long)
        assert len({tuple(answer.result()[1]["output_ids"]) for answer in long}) == 1


@pytest.mark.parametrize("count", [1, 3 * ROWS])
def test_a_request_for_many_texts_does_not_wait_for_itself(qwen: Path, tmp_path: Path, count: int) -> None:
    with local_server([with_tokenizer(qwen, tmp_path)], "--max-tokens-waiting", "5") as server:
        body = {"model": "qwen", "prompt": [3] * 30, "n": count, "max_tokens": 3}
        status, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
        assert (status, len(answer["choices"])) == (200, count)


def test_requests_of_more_texts_than_rows_are_those_of_each_alone(qwen: Path, tmp_path: Path) -> None:
    """Beside clients who leave; each of n texts has the tokens of its seed."""
    bundle, count = with_tokenizer(qwen, tmp_path), 2 * ROWS + 1
    pipeline, made = stagepack.load(bundle), tokenizer()
    prompts = [[3 + number, 4] for number in range(6)]
    settings: dict[str, Any] = {"max_new_tokens": 9, "do_sample": True, "top_k": 0}
    expected = [
        [
            made.decode(pipeline.generate(torch.tensor([prompt]), seed=seed, **settings)[0, 2:].tolist())
            for seed in range(count)
        ]
        for prompt in prompts
    ]

    def ask_for(server: AnyServer, prompt: list[int]) -> list[str]:
        body = {"model": "qwen", "prompt": prompt, "n": count, "max_tokens": 9, "seed": 0}
        begin_stream(server, "/v1/completions", body | {"stream": True}).close()
        status, answer, _ = post(server.http, "/v1/completions", json.dumps(body))
        assert status == 200, answer
        return [choice["text"] for choice in answer["choices"]]

    with local_server([bundle]) as server, ThreadPoolExecutor(CLIENTS) as clients:
        assert list(clients.map(lambda prompt: ask_for(server, prompt), prompts)) == expected
        wait_until(lambda: is_idle(server), 20)
