"""Mixed load on two servers for a long time, as their clients see it, and what they take meanwhile.

One server has all stages in its process, and versions that are replaced; the other has them in processes, which are killed.
"""

import contextlib
import http.client
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc

from tests.process_facts import child_processes, memory_bytes
from tests.serve.attacks import attacking
from tests.serve.servers import INFER, Server, get, grpc_stub, post, skips_message, skips_request

SAMPLE_SECONDS: Final = 2.0
_HEALTH_SECONDS: Final = 0.2
_CLIENT_SECONDS: Final = 30
# What a client may be told in the place of an answer: the server or the model is full, too late, unloaded, or starts again.
_REFUSALS: Final = frozenset({"404", "503", "504", "NOT_FOUND", "UNAVAILABLE", "DEADLINE_EXCEEDED"})


@dataclass(slots=True)
class Record:
    """What became of the requests.

    Attributes:
        outcomes: how many had which outcome: ``OK``, or the status of a refusal.
        faults: what is neither one whole answer nor one typed error.
        durations: the times of the answers since the last sample, in seconds.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    durations: list[float] = field(default_factory=list)

    def add(self, client_name: str, outcome: str, seconds: float | None = None) -> None:
        self.outcomes[outcome] += 1
        if outcome != "OK" and outcome not in _REFUSALS:
            self.faults.append(f"{client_name}: {outcome}")
        if seconds is not None:
            self.durations.append(seconds)


class Soak:
    """The load. Each client asks as fast as it is answered, and a little slower, so that the machine is busy, not full."""

    def __init__(self, local: Server, divided: Server, repository: Path) -> None:
        self.record = Record()
        self._local = local
        self._divided = divided
        self._repository = repository
        self._is_over = threading.Event()
        self._random = random.Random(0)  # noqa: S311 - no secret

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask while the context lasts."""
        servers = {"in one process": self._local, "in processes": self._divided}
        clients: list[tuple[str, Callable[[], None]]] = [
            ("versions", self._replace_versions),
            ("attacks", self._attack),
        ]
        for place, server in servers.items():
            clients += [
                (f"infer over REST, {place}", partial(self._infer_rest, server)),
                (f"infer over gRPC, {place}", partial(self._infer_grpc, server)),
                (f"requests that are given up, {place}", partial(self._give_up, server)),
                (f"overload, {place}", partial(self._overload, server)),
            ]
        clients += [("text", self._generate), ("versions asked", self._ask_version), ("kills", self._kill_stage)]
        threads = [threading.Thread(target=self._repeat, args=client, daemon=True) for client in clients]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            for thread in threads:
                thread.join(2 * _CLIENT_SECONDS)
            assert not any(thread.is_alive() for thread in threads), "a client has no answer"

    def _repeat(self, client_name: str, act: Callable[[], None]) -> None:
        while not self._is_over.wait(self._random.uniform(0.005, 0.05)):
            try:
                act()
            except grpc.RpcError as error:
                self.record.add(client_name, error.code().name)
            except Exception as error:  # noqa: BLE001 - a fault of the server, which the test shows
                self.record.add(client_name, repr(error)[:300])

    def _post(self, server: Server, path: str, fields: Any, check: Callable[[Any], bool]) -> None:
        start_time = time.monotonic()
        status, answer, _ = post(server.http, path, json.dumps(fields))
        if status != 200:
            self.record.add(path, str(status) if "error" in answer else f"{status} without an error")
        else:
            self.record.add(
                path, "OK" if check(answer) else f"wrong answer {answer}"[:300], time.monotonic() - start_time
            )

    def _infer_rest(self, server: Server) -> None:
        self._post(server, INFER, skips_request(), lambda answer: len(answer["outputs"][0]["data"]) == 16)

    def _infer_grpc(self, server: Server) -> None:
        with grpc_stub(server) as stub:
            for _ in range(20):
                start_time = time.monotonic()
                answer = stub.ModelInfer(skips_message(), timeout=_CLIENT_SECONDS)
                is_whole = len(answer.raw_output_contents) == len(answer.outputs) > 0
                self.record.add("gRPC", "OK" if is_whole else "a part of an answer", time.monotonic() - start_time)

    def _generate(self) -> None:
        fields = {"input_ids": [5, 6, 7], "parameters": {"max_tokens": 8}}
        self._post(self._local, "/v2/models/writer/generate", fields, lambda answer: len(answer["output_ids"]) <= 8)

    def _ask_version(self) -> None:
        fields = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1.0] * 3}]}
        versions = ([1.0] * 3, [2.0] * 3)
        path = "/v2/models/scale/infer"
        self._post(self._local, path, fields, lambda answer: answer["outputs"][0]["data"] in versions)

    def _replace_versions(self) -> None:
        """Load the second version, the first one again, and none."""
        second, hidden = self._repository / "scale" / "2", self._repository / "hidden"
        for action in ("load", "load", "unload"):
            if action == "load":
                source, target = (hidden, second) if hidden.exists() else (second, hidden)
                source.rename(target)
            self._post(self._local, f"/v2/repository/models/scale/{action}", {}, lambda answer: answer == {})
            self._is_over.wait(2)
        self._post(self._local, "/v2/repository/models/scale/load", {}, lambda answer: answer == {})

    def _give_up(self, server: Server) -> None:
        """Ask, and go away before the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", server.http)
        connection.request("POST", INFER, json.dumps(skips_request()))
        connection.close()
        with grpc_stub(server) as stub:
            stub.ModelInfer.future(skips_message(), timeout=_CLIENT_SECONDS).cancel()
        self._is_over.wait(0.2)

    def _overload(self, server: Server) -> None:
        """Ask more than is answered in time."""
        self._is_over.wait(10)
        threads = [threading.Thread(target=self._repeat_burst, args=(server,), daemon=True) for _ in range(60)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(_CLIENT_SECONDS)

    def _repeat_burst(self, server: Server) -> None:
        request = skips_request(64) | {"parameters": {"timeout": 50_000}}
        for _ in range(3):
            with contextlib.suppress(Exception):
                self._post(server, INFER, request, lambda answer: len(answer["outputs"][0]["data"]) == 512)
                continue
            self.record.add("overload", "no whole answer")

    def _attack(self) -> None:
        for attack_name in ("idle streams", "rapid reset", "calls without a message"):
            with attacking(attack_name, self._local.grpc):
                self._is_over.wait(3)
            self._is_over.wait(5)

    def _kill_stage(self) -> None:
        self._is_over.wait(15)
        process_ids = child_processes(self._divided.process.pid)
        if process_ids and not self._is_over.is_set():
            os.kill(self._random.choice(process_ids), signal.SIGKILL)


def watch_health(ports: Mapping[str, int], path: Path) -> None:
    """Ask for the health of servers at their operators' ports, and write how long each answer took."""
    with path.open("w", buffering=1) as file:
        while True:
            for place, port in ports.items():
                start_time = time.monotonic()
                status, _, _ = get(port, "/v2/health/live")
                file.write(json.dumps([place, status, time.monotonic() - start_time]) + "\n")
            time.sleep(_HEALTH_SECONDS)


def soak(local: Server, divided: Server, repository: Path, seconds: float, folder: Path) -> dict[str, Any]:
    """Run the load for some time; return what was seen."""
    health_file = folder / "health"
    ports = {"one process": local.facts["operator_port"], "processes": divided.facts["operator_port"]}
    # A process of its own: the threads of the load would delay it.
    watch = multiprocessing.get_context("spawn").Process(target=watch_health, args=(ports, health_file), daemon=True)
    watch.start()
    load, samples, start_time = Soak(local, divided, repository), [], time.monotonic()
    try:
        with load.running():
            for sample_number in itertools.count(1):
                time.sleep(max(0.0, start_time + sample_number * SAMPLE_SECONDS - time.monotonic()))
                durations, load.record.durations = sorted(load.record.durations), []
                elapsed_seconds = time.monotonic() - start_time
                samples.append(
                    {
                        "seconds": round(elapsed_seconds, 1),
                        "memory": memory_bytes(local.process.pid),
                        "front_memory": memory_bytes(divided.process.pid),
                        "p50": statistics.median(durations) if durations else None,
                        "p99": durations[int(0.99 * len(durations))] if durations else None,
                        "outcomes": dict(load.record.outcomes),
                    }
                )
                if elapsed_seconds >= seconds:
                    break
    finally:
        watch.kill()
        watch.join()
    health = [json.loads(line) for line in health_file.read_text().splitlines() if line.endswith("]")]
    return {
        "seconds": seconds,
        "samples": samples,
        "outcomes": dict(load.record.outcomes),
        "faults": load.record.faults,
        "health": {
            place: sorted(round(duration, 5) for other, _, duration in health if other == place) for place in ports
        },
        "health_statuses": dict(Counter(status for _, status, _ in health)),
    }
