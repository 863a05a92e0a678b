"""Clients that hold calls, open too many, take them back or ask for pages: others are answered meanwhile."""

import asyncio
import collections
import itertools
import json
import re
import time
from collections.abc import Iterator

import grpc
import pytest
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from stagepack_serving.server.errors import RequestError
from stagepack_serving.server.grpc_limits import OpenCall, OpenCalls
from tests.serve.attacks import ATTACK_NAMES, attacking
from tests.serve.bundles import Bundles
from tests.serve.local_server import local_server
from tests.serve.servers import (
    INFER,
    Server,
    get,
    grpc_stub,
    http_client,
    post,
    refused,
    skips_message,
    skips_request,
    stagepack_server,
)

# A rapid reset takes half a second to end, in which few of them fall.
CALLS = 1000
# p99 at most doubles on a quiet machine; here, others take processors away.
GENEROUS_RATIO, GENEROUS_SECONDS = 4, 0.02


@pytest.fixture(scope="module")
def server(bundles: Bundles) -> Iterator[Server]:
    with stagepack_server([bundles["skips"]]) as server:
        yield server


def slow_seconds(server: Server) -> float:
    """How long the slowest hundredth of calls takes, all of which are answered, as are those for the health of the server."""
    request, durations = skips_message(), []
    with grpc_stub(server) as stub, http_client(server.http) as client:
        for call_number in range(CALLS):
            start_time = time.monotonic()
            assert stub.ModelInfer(request, timeout=20).outputs
            durations.append(time.monotonic() - start_time)
            if call_number % 10 == 0:
                assert stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready
                assert client.is_server_ready()
    return sorted(durations)[-CALLS // 100]


@pytest.fixture(scope="module")
def quiet_seconds(server: Server) -> float:
    return slow_seconds(server)


@pytest.mark.parametrize("attack_name", ATTACK_NAMES)
def test_an_attack_keeps_no_other_client_waiting(server: Server, quiet_seconds: float, attack_name: str) -> None:
    with attacking(attack_name, server.http if attack_name == "pages" else server.grpc):
        attacked_seconds = slow_seconds(server)
    assert attacked_seconds < GENEROUS_RATIO * max(quiet_seconds, GENEROUS_SECONDS)


def test_calls_beyond_the_limit_are_refused_and_counted(bundles: Bundles) -> None:
    call_count, channel_count = 3000, 6

    async def ask_all(address: str) -> collections.Counter[str]:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [grpc.aio.insecure_channel(address, options) for _ in range(channel_count)]
        stubs = itertools.cycle(map(GRPCInferenceServiceStub, channels))
        calls = [stub.ModelInfer(skips_message(), timeout=60) for stub in itertools.islice(stubs, call_count)]
        statuses = collections.Counter([(await call.code()).name for call in calls])
        trailers = [
            dict(await call.trailing_metadata()) for call in calls if await call.code() is not grpc.StatusCode.OK
        ]
        assert all("grpc-retry-pushback-ms" in trailer for trailer in trailers)
        for channel in channels:
            await channel.close()
        return statuses

    # The calls that have places wait for others to join them: a batch of 64 rows, the most that the bundle takes, needs 32 calls.
    waiting = ("--max-delay-ms", "200", "--max-batch", "256")
    with stagepack_server([bundles["skips"]], "--max-connections", "16", *waiting) as server:
        statuses = asyncio.run(ask_all(f"127.0.0.1:{server.grpc}"))
        page = get(server.http)[1]
    assert set(statuses) == {"OK", "UNAVAILABLE"}
    samples = re.findall(r'^stagepack_requests_total{.*status="(\w+)".*} (.*)$', page, re.MULTILINE)
    counts = collections.Counter({status: round(float(count)) for status, count in samples})
    assert counts == {"OK": statuses["OK"], "BUSY": statuses["UNAVAILABLE"]}


def test_a_stream_ends_at_the_deadline_without_a_request(bundles: Bundles) -> None:
    def ask_sometimes() -> Iterator[pb.ModelInferRequest]:
        for _ in range(4):
            yield skips_message()
            time.sleep(0.5)
        time.sleep(60)

    with local_server([bundles["skips"]], "--deadline-s", "1.5") as server, grpc_stub(server) as stub:
        responses = stub.ModelStreamInfer(ask_sometimes())
        assert [next(responses).error_message for _ in range(4)] == [""] * 4
        with refused("DEADLINE_EXCEEDED"):
            next(responses)
        assert post(server.http, INFER, json.dumps(skips_request()))[0] == 200


def open_call(*, is_watch: bool = False) -> OpenCall:
    return OpenCall(is_watch=is_watch, idle_seconds=60, count_refusal=lambda: None)


def test_longest_idle_call_makes_place_first() -> None:
    async def fill() -> list[str]:
        open_calls, ended_calls, never = OpenCalls(3), [], asyncio.Event()

        async def wait(call_name: str, *, is_watch: bool) -> None:
            call = open_call(is_watch=is_watch)
            open_calls.add(call, is_health=False)
            try:
                await call.wait(never.wait())
            except RequestError:
                ended_calls.append(call_name)
                open_calls.remove(call)

        async with asyncio.TaskGroup() as waiting:
            for call_name in ("watch", "older", "newer", "fourth", "fifth", "sixth"):
                waiting.create_task(wait(call_name, is_watch=call_name == "watch"))
                await asyncio.sleep(0.01)
            never.set()
        return ended_calls

    assert asyncio.run(fill()) == ["older", "newer", "fourth"]


def test_calls_at_work_make_no_place() -> None:
    async def fill() -> None:
        open_calls, never = OpenCalls(1), asyncio.Event()
        call = open_call()
        open_calls.add(call, is_health=False)
        waiting = asyncio.create_task(call.wait(never.wait()))
        await asyncio.sleep(0)
        with call.working():
            with pytest.raises(RequestError, match="1 calls are open already"):
                open_calls.add(open_call(), is_health=False)
            open_calls.add(open_call(), is_health=True)
        never.set()
        assert await waiting

    asyncio.run(fill())
