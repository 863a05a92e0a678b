"""What joined batches change in answers: the last bits, or with `--exact` nothing."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy

from tests.serve.bundles import Bundles
from tests.serve.local_server import LocalServer, local_server
from tests.serve.servers import Client, get

REQUESTS, CLIENTS = 96, 16
INPUTS = {
    "input_ids": numpy.arange(8, dtype="int64")[None] + 5,
    "attention_mask": numpy.ones((1, 8), "int64"),
    "token_type_ids": numpy.zeros((1, 8), "int64"),
}


def answers_of_many(server: LocalServer) -> list[Any]:
    """An answer while nobody else asks, and those of many clients at the same time."""

    def ask(request_count: int) -> list[Any]:
        with Client("grpc", server) as client:
            inputs = {entry["name"]: INPUTS[entry["name"]] for entry in client.metadata("minilm")["inputs"]}
            return [client.ask("minilm", inputs)["last_hidden_state"] for _ in range(request_count)]

    first_answers = ask(1)
    with ThreadPoolExecutor(CLIENTS) as pool:
        others = pool.map(ask, [REQUESTS // CLIENTS] * CLIENTS)
        return first_answers + [answer for answers in others for answer in answers]


def largest_batch_is_one(server: LocalServer) -> bool:
    """Whether no request has run beside another one."""
    page = get(server.http)[1]
    buckets = dict(line.rsplit(" ", 1) for line in page.splitlines() if line.startswith("stagepack_batch_rows_bucket"))
    counts = {float(count) for labels, count in buckets.items() if 'le="1.0"' in labels or 'le="+Inf"' in labels}
    return len(counts) == 1


def test_exact_answers_have_the_same_bits_whoever_else_asks(bundles: Bundles) -> None:
    with local_server([bundles["minilm"]], "--exact") as server:
        alone, *others = answers_of_many(server)
        assert largest_batch_is_one(server)
    assert all(numpy.array_equal(answer, alone) for answer in others)


def test_joined_answers_differ_by_rounding_alone(bundles: Bundles) -> None:
    with local_server([bundles["minilm"]]) as server:
        alone, *others = answers_of_many(server)
        assert not largest_batch_is_one(server)
    for answer in others:
        numpy.testing.assert_allclose(answer, alone, rtol=1e-4, atol=1e-5)
