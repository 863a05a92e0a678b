"""Clients that wait for a row of the cache take turns."""

import asyncio
import contextlib
import contextvars
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import tritonclient.grpc

from stagepack_loaders.decoders import DecoderFacts
from stagepack_serving.server.access_log import begin_record
from stagepack_serving.server.admission import Admission
from stagepack_serving.server.limits import ServerLimits
from stagepack_serving.server.metrics import Metrics
from stagepack_text.server.text_loop import ClientQueue, TextLoop
from stagepack_text.settings import GenerationSettings
from tests.serve.certificates import secret_file
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import grpc_client, post
from tests.serve.test_serve import metrics
from tests.text.generating_families import POSITIONS, VOCABULARY
from tests.text.generating_model import served_text
from tests.waiting import wait_until

ROWS = 2
FLOOD = 24
LOGITS: Any = SimpleNamespace(dtype="float32")
TOKENS = {"busy": "a" * 32, "other": "b" * 32}


def add(queue: ClientQueue, client: str, *numbers: int) -> list[Any]:
    added = [SimpleNamespace(number=number) for number in numbers]

    def append() -> None:
        begin_record(None, f"{client}:1", "POST /", "rest").sender = client
        for text in added:
            queue.append(text)  # type: ignore[arg-type]

    contextvars.copy_context().run(append)
    return added


def test_clients_take_turns_and_the_texts_of_each_keep_their_order() -> None:
    queue = ClientQueue()
    add(queue, "a", 1, 2, 3, 4)
    add(queue, "token", 10)
    gone, *_ = add(queue, "b", 20, 21)
    assert len(queue) == 7
    served = [queue.popleft()]
    queue.remove(gone)
    queue.remove(gone)
    served += [queue.popleft() for _ in range(2)]
    add(queue, "c", 30)
    served += [queue.popleft() for _ in range(len(queue))]
    assert [text.number for text in served] == [1, 10, 21, 2, 30, 3, 4]  # type: ignore[attr-defined]
    assert list(queue) == []


@pytest.fixture(scope="module")
def server(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalServer]:
    tokens = secret_file(tmp_path_factory.mktemp("tokens") / "tokens", "\n".join(TOKENS.values()))
    with local_server([qwen], "--token-file", str(tokens), "--max-batch", str(ROWS)) as server:
        yield server


def ask(server: LocalServer, client: str) -> int:
    body = {"input_ids": [3], "parameters": {"max_new_tokens": POSITIONS}}
    headers = {"authorization": f"Bearer {TOKENS[client]}"}
    status, answer, _ = post(server.http, "/v2/models/qwen/generate", json.dumps(body), headers)
    assert status == 200, answer
    return len(answer["output_ids"])


def ask_over_grpc(server: LocalServer, client: str) -> int:
    tensor = tritonclient.grpc.InferInput("input_ids", [1, 1], "INT64").set_data_from_numpy(numpy.array([[3]]))
    with contextlib.closing(grpc_client(server.grpc)) as connection:
        headers = {"authorization": f"Bearer {TOKENS[client]}"}
        answer = connection.infer("qwen", [tensor], parameters={"max_tokens": POSITIONS}, headers=headers)
    return len(answer.as_numpy("output_ids"))


@pytest.mark.parametrize("ask_other", [ask, ask_over_grpc])
def test_a_client_of_one_text_does_not_wait_for_all_of_another(server: LocalServer, ask_other: Any) -> None:
    with ThreadPoolExecutor(FLOOD) as clients:
        flood = [clients.submit(ask, server, "busy") for _ in range(FLOOD)]
        wait_until(
            lambda: metrics(server, authorization=f"Bearer {TOKENS['other']}")["stagepack_texts", "qwen"] >= FLOOD / 2,
            10,
        )
        waiting_count = sum(not answer.done() for answer in flood)
        assert ask_other(server, "other") == POSITIONS
        # Texts that had a row, and as many that got one while this text was generated.
        assert waiting_count - sum(not answer.done() for answer in flood) <= 4 * ROWS
        assert {answer.result() for answer in flood} == {POSITIONS}


class GatedDecoder:
    """Answers calls when the test says so."""

    name, version, lane_count = "gated", "1", 1
    interface = SimpleNamespace(outputs=["logits"])

    def __init__(self) -> None:
        self.limits, self.metrics = ServerLimits(max_batch_size=1, max_sequences=1), Metrics()
        self.weights = SimpleNamespace(adapters=SimpleNamespace(names=()))
        self.admission = Admission(self.name, 256, 2)
        self.prompts: list[int] = []
        self.sequence_count = self.abandoned_count = 0
        self.may_answer = asyncio.Semaphore(0)

    def weights_with(self, _: object) -> tuple[object, object]:
        return self.weights, self.weights

    @contextlib.asynccontextmanager
    async def reserve_sequence(self, weights: object) -> AsyncIterator[None]:
        self.sequence_count += 1
        try:
            yield
        finally:
            self.sequence_count -= 1

    async def call(self, inputs: Mapping[str, Any], sequence: None, finish: Any, *, adapter: Any, weights: Any) -> Any:
        self.prompts.append(int(inputs["input_ids"][0, 0]))
        try:
            await self.may_answer.acquire()
        except asyncio.CancelledError:
            self.abandoned_count += 1
            raise
        return finish({"logits": numpy.zeros((1, VOCABULARY), numpy.float32)})


def test_who_comes_when_a_row_becomes_free_does_not_overtake_who_waits() -> None:
    facts: Any = SimpleNamespace(
        max_positions=POSITIONS,
        max_batch=1,
        has_rows=True,
        moves_rows=False,
        takes_encoder=False,
        encoder_positions=None,
        logits=LOGITS,
    )

    async def run() -> list[int]:
        decoder: Any = GatedDecoder()
        texts = TextLoop(decoder, facts)

        async def generate_text(prompt: int) -> None:
            text = served_text(facts, GenerationSettings(max_new_tokens=1), prompt=[prompt, prompt])
            texts.begin(text)
            try:
                await text.parts.get()
            finally:
                texts.end(text)

        tasks = []
        for prompt in (1, 2):
            tasks.append(asyncio.create_task(generate_text(prompt)))
            await asyncio.sleep(0.01)
        tasks[0].cancel()  # while its call is under way
        await asyncio.sleep(0.01)
        tasks.append(asyncio.create_task(generate_text(3)))
        await asyncio.sleep(0.01)
        for _ in tasks:
            decoder.may_answer.release()
        await asyncio.gather(*tasks, return_exceptions=True)
        return list(decoder.prompts)

    assert asyncio.run(run()) == [1, 2, 3]


@pytest.mark.parametrize("has_begun", [True, False])
def test_a_text_in_a_sequence_of_its_own_that_nobody_waits_for_gives_up_its_call(has_begun: bool) -> None:
    facts = DecoderFacts(max_positions=POSITIONS, logits=LOGITS, takes_encoder=False, encoder_positions=None)

    async def run() -> None:
        decoder: Any = GatedDecoder()
        texts = TextLoop(decoder, facts)
        gone, other = (served_text(facts, GenerationSettings(max_new_tokens=2), prompt=[prompt]) for prompt in (1, 2))
        texts.begin(gone)
        texts.begin(other)
        assert texts.text_count == 2
        if has_begun:
            await asyncio.sleep(0)
            assert decoder.sequence_count == 2
        texts.end(gone)
        await asyncio.sleep(0)
        assert (texts.text_count, decoder.sequence_count, decoder.abandoned_count) == (1, 1, int(has_begun))
        decoder.may_answer.release()
        decoder.may_answer.release()
        parts = [await other.parts.get() for _ in range(2)]
        assert [part.finish_reason for part in parts if not isinstance(part, Exception)] == [None, "length"]
        assert (texts.text_count, decoder.sequence_count) == (0, 0)
        assert decoder.prompts == ([1, 2, 0] if has_begun else [2, 0])

    asyncio.run(run())
