"""Drawn texts in company: each is equal to itself alone, or its request gets one typed error of its own.

`STAGEPACK_DRAWN_REQUESTS` is another number of requests of each slow case. What came of them is logged: `--log-cli-level=info`.
"""

import contextlib
import http.client
import itertools
import json
import logging
import os
import random
import re
import shutil
import signal
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import StageFailedError
from tests.distributed.test_serving import stage_process_ids
from tests.serve.servers import Server, get, stagepack_server
from tests.text.generating_families import NOT_FINITE, VOCABULARY, fragile_bundle
from tests.text.generating_model import tokenizer
from tests.text.test_text_loop import CLIENTS, MODES, ROWS, is_idle
from tests.waiting import wait_until

pytestmark = pytest.mark.xdist_group("serve")
REQUESTS, QUICK_REQUESTS = int(os.environ.get("STAGEPACK_DRAWN_REQUESTS", "2000")), 100
TIMES = 4  # that each drawn request is asked, in different ways
# Ways to ask, and their weights.
WAYS = {"whole": 8.0, "stream": 5.0, "leave": 3.0, "deadline": 2.0, "wrong": 1.0, "kill": 0.2}
# Errors by their messages, with their status; the ways to ask that they answer, where only these ones do.
ERRORS: Mapping[str, tuple[int, str, tuple[str, ...]]] = {
    "not finite": (500, "expected a finite largest value", ()),
    "wrong": (400, f"expected tokens from 0 to {VOCABULARY - 1}", ("wrong",)),
    "late": (504, "no answer before the deadline", ("deadline",)),
    "busy": (503, "(requests|tokens) wait|(requests are waiting|texts are under way)", ()),
    "lost": (503, "lost|ended|started again", ()),
}
# Clients that leave teach how long others of their address wait.
ADDRESS, ADDRESS_OF_LEAVING = "127.0.0.1", "127.0.0.2"


@dataclass(frozen=True, slots=True)
class Alone:
    """A text without company: its new tokens and their logprobs, or the tokens before its error."""

    tokens: list[int]
    logprobs: list[float]
    fails: bool


@dataclass(slots=True)
class Received:
    """What an answer says of a text."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DrawnRequest:
    """A request for one text of Triton's extension, or for several ones of OpenAI's API, and each text alone."""

    path: str
    body: dict[str, Any]
    texts: list[Alone]

    @property
    def fails(self) -> bool:
        return any(text.fails for text in self.texts)


def draw_request(drawn: random.Random, pipeline: Any) -> DrawnRequest:
    prompt = [drawn.randrange(2, NOT_FINITE) for _ in range(drawn.choice((1, 2, 5, 17, 40)))]
    if drawn.random() < 0.1:
        prompt[drawn.randrange(len(prompt))] = NOT_FINITE
    count, seed = drawn.choice((1, 2, ROWS + 1, 2 * ROWS + 1)), drawn.randrange(99)
    body: dict[str, Any] = {"max_tokens": drawn.randint(1, 20), "temperature": drawn.choice((0, 0.8)), "seed": seed}
    settings = {"max_new_tokens": body["max_tokens"]}
    if body["temperature"]:
        body |= {"top_k": 0}
        settings |= {"do_sample": True, "temperature": 0.8, "top_k": 0}
    texts = [text_alone(pipeline, prompt, {**settings, "seed": seed + number}) for number in range(count)]
    if drawn.random() < 0.5:
        return DrawnRequest("/v2/models/m/generate", {"input_ids": prompt, "parameters": body}, texts[:1])
    body |= {"model": "m", "prompt": prompt, "n": count, "logprobs": drawn.choice((None, 0, 3))}
    return DrawnRequest("/v1/completions", body, texts)


def text_alone(pipeline: Any, prompt: list[int], settings: Mapping[str, Any]) -> Alone:
    tokens: list[int] = []
    try:
        _, logprobs = pipeline.generate(
            torch.tensor([prompt]), on_tokens=lambda new: tokens.append(int(new[0])), return_logprobs=True, **settings
        )
    except StageFailedError:
        return Alone(tokens, [], fails=True)
    return Alone(tokens, logprobs[0].tolist(), fails=False)


class Company:
    """Clients of one server, and what came of their requests."""

    def __init__(self, server: Server, *, has_kills: bool) -> None:
        self.counts = Counter[str]()
        self._server = server
        self._has_kills = has_kills
        self._tokenizer = tokenizer()

    def ask(self, request: DrawnRequest, seed: int) -> None:
        """Ask in a drawn way."""
        drawn = random.Random(seed)  # noqa: S311 - of a test
        [way] = drawn.choices(list(WAYS), list(WAYS.values()))
        path, body = request.path, dict(request.body)
        is_stream = way == "stream" or drawn.random() < 0.3
        if way == "wrong":
            body |= {"input_ids" if "input_ids" in body else "prompt": [VOCABULARY + drawn.randrange(9)]}
        if way == "deadline" and "parameters" in body:
            body["parameters"] = body["parameters"] | {"timeout": drawn.choice((1, 2000, 10_000, 100_000))}
        if way == "kill" and self._has_kills:
            with contextlib.suppress(IndexError, ProcessLookupError):  # one of them is started just now
                os.kill(drawn.choice(stage_process_ids(self._server)), signal.SIGKILL)
                self.counts["kills"] += 1
        if is_stream:
            path, body = (path, body | {"stream": True}) if "prompt" in body else (f"{path}_stream", body)
        host = ADDRESS_OF_LEAVING if way == "leave" else ADDRESS
        connection = http.client.HTTPConnection(ADDRESS, self._server.http, timeout=100, source_address=(host, 0))
        with contextlib.closing(connection):
            connection.request("POST", path, json.dumps(body))
            if way == "leave":
                self.counts["texts whose client left"] += len(request.texts)
                if drawn.random() < 0.7:
                    connection.getresponse().read(drawn.randrange(300))
                return
            response = connection.getresponse()
            content = response.read().decode()
        outcome = self._check(request, way, response.status, content)
        self.counts[f"texts: {outcome}"] += len(request.texts)
        if outcome == "lost":  # else few requests meet a server that answers
            wait_until(lambda: get(self._server.http, "/v2/models/m/ready")[0] == 200, 60)

    def _check(self, request: DrawnRequest, way: str, status: int, content: str) -> str:
        """Compare an answer with the texts alone; return `equal`, or the name of its error."""
        received = [Received() for _ in request.texts]
        event_count, message = read_answer(content, received)
        for alone, found in zip(request.texts, received, strict=True):
            assert found.tokens == alone.tokens[: len(found.tokens)]
            assert self._tokenizer.decode(alone.tokens).startswith(found.text)
            if not alone.fails:
                assert found.logprobs == pytest.approx(alone.logprobs[: len(found.logprobs)], abs=1e-4)
        if message is not None:
            [name] = [name for name, (_, says, _) in ERRORS.items() if re.search(says, message)] or [message]
            expected_status, _, ways = ERRORS[name]
            assert status == (200 if event_count else expected_status)
            assert not ways or way in ways
            assert name != "not finite" or request.fails
            assert name != "lost" or self._has_kills
            return name
        assert (status, request.fails, way == "wrong") == (200, False, False)
        for alone, found in zip(request.texts, received, strict=True):
            assert found.text == self._tokenizer.decode(alone.tokens)
            assert found.tokens == (alone.tokens if "input_ids" in request.body else [])
            # The token that ends a text is not part of it.
            assert len(found.logprobs) == (
                len(alone.tokens) - (alone.tokens[-1] == 1) if request.body.get("logprobs") is not None else 0
            )
        return "equal"


def read_answer(content: str, received: list[Received]) -> tuple[int, str | None]:
    """Read a whole answer or one of events; return the number of its events, and the message of the error that ends it."""
    parts = content.split("\n\n") if content.startswith("data: ") else [content]
    events = [json.loads(part.removeprefix("data: ")) for part in parts if part not in ("", "data: [DONE]")]
    for event_count, event in enumerate(events):
        if "error" in event:
            error = event["error"]
            return event_count, error["message"] if isinstance(error, dict) else error
        for choice in event.get("choices", [event]):
            found = received[choice.get("index", 0)]
            found.text += choice.get("text", choice.get("text_output"))
            found.tokens += choice.get("output_ids", [])
            found.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
    return len(events), None


@pytest.mark.parametrize(
    ("family", "mode", "seed", "count"),
    [
        ("gemma3", "one process", 0, QUICK_REQUESTS),
        ("qwen3", "processes", 1, QUICK_REQUESTS),
        *(
            pytest.param(family, mode, seed, REQUESTS, marks=pytest.mark.slow)
            for seed, (family, mode) in enumerate(itertools.product(("gemma3", "mistral", "qwen3"), MODES), 2)
        ),
    ],
)
def test_drawn_texts(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, family: str, mode: str, seed: int, count: int
) -> None:
    """Some are not finite, some lose their clients, and some requests have more texts than there are rows; stage processes are killed."""
    bundle, runtime = Path(shutil.copytree(fragile_bundle(tmp_path_factory, family), tmp_path / "m.stagepack")), "torch"
    if mode == "ONNX Runtime":
        stagepack.add_onnx(bundle)
        runtime = "onnxruntime"
    drawn, pipeline = random.Random(seed), stagepack.load(bundle, runtime=runtime)  # noqa: S311 - of a test
    asked = [draw_request(drawn, pipeline) for _ in range(count // TIMES)] * TIMES
    drawn.shuffle(asked)
    seeds, warm_count = [drawn.randrange(2**32) for _ in asked], count // 10
    with stagepack_server([f"m={bundle}"], *MODES[mode]) as server, ThreadPoolExecutor(CLIENTS) as clients:
        company = Company(server, has_kills=mode == "processes")
        list(clients.map(company.ask, asked[:warm_count], seeds[:warm_count]))
        bytes_before = server.memory()
        list(clients.map(company.ask, asked[warm_count:], seeds[warm_count:]))
        wait_until(lambda: is_idle(server, "m"), 20)
        assert server.memory() - bytes_before < 60_000_000
        assert server.stop() == 0
    logging.getLogger(__name__).info("%s, %s, seed %d: %s", family, mode, seed, dict(company.counts))
    assert company.counts["texts: equal"] > sum(company.counts.values()) / 4
