"""Updates and rollbacks at drawn moments under load, with kills: each answer is that of the version that it names."""

import contextlib
import os
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Final

import pytest
import torch

import stagepack
from stagepack.distributed import DistributedPipeline
from stagepack.errors import StageLostError, StagepackError
from stagepack.format.reader import Bundle
from tests.distributed.bundles import Counting, Layers, has_restarts, in_processes, process_ids
from tests.process_facts import memory_bytes
from tests.waiting import wait_until

# How many updates are drawn; 500 before a release: the test is then to be chosen with `-m slow`.
_COUNT_VARIABLE: Final = "STAGEPACK_DRAWN_UPDATES"
_WAIT_SECONDS: Final = 60.0
_IDS: Final = torch.arange(7)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    """Versions of one model by name."""
    folder, bundles = tmp_path_factory.mktemp("versions"), {}
    shapes = {"ids": {0: torch.export.Dim("n", min=1, max=4096)}}
    for number in range(3):
        torch.manual_seed(number)
        bundles[f"step {number}"] = stagepack.export(
            Layers().eval(),
            (torch.arange(5),),
            out=folder / str(number),
            split_at=["first", "second"],
            dynamic_shapes=shapes,
        )
    return bundles


class Load:
    """Calls of several threads, each of which has the answer of its version or fails with a process."""

    def __init__(self, pipeline: DistributedPipeline, versions: dict[str, Bundle]) -> None:
        self._pipeline = pipeline
        with torch.no_grad():
            self._expected = {name: stagepack.load(bundle)(_IDS) for name, bundle in versions.items()}
        self._has_ended = threading.Event()
        self.counts, self.faults = Counter[str](), list[str]()

    def check(self) -> None:
        """Call the newest version."""
        assert torch.equal(self._pipeline(_IDS), self._expected[self._pipeline.version])

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(call,)) for call in (self._call, self._generate)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            for thread in threads:
                thread.join(_WAIT_SECONDS)
        assert not any(thread.is_alive() for thread in threads)
        assert self.faults == []

    def _run(self, call: object) -> None:
        assert callable(call)
        while not self._has_ended.is_set():
            try:
                call()
            except StageLostError:
                self.counts["lost"] += 1
                time.sleep(0.01)  # the processes are started again
            except Exception as error:  # noqa: BLE001 - told by the thread of the test
                self.faults.append(repr(error))
                return

    def _call(self) -> None:
        answer = self._pipeline(_IDS)
        names = [name for name, expected in self._expected.items() if torch.equal(answer, expected)]
        assert len(names) == 1, f"an answer of {names}"
        self.counts[names[0]] += 1

    def _generate(self) -> None:
        """Calls of one sequence, all on its version."""
        with self._pipeline.sequence() as sequence:
            for _ in range(5):
                assert torch.equal(sequence(_IDS), self._expected[sequence.version]), sequence.version
        self.counts["sequences"] += 1


def kill_soon(pipeline: DistributedPipeline, draw: random.Random) -> threading.Timer:
    """Kill a drawn process in so many milliseconds."""
    kill = partial(os.kill, process_ids(pipeline)[draw.choice([1, 2, 3])], signal.SIGKILL)
    timer = threading.Timer(draw.choice([0.0, draw.random() * 0.03]), kill)
    timer.start()
    return timer


def drawn_update(pipeline: DistributedPipeline, load: Load, versions: dict[str, Bundle], draw: random.Random) -> str:
    """Update to a drawn version, with a kill or without one; return what happened."""
    name, previous, restarts = draw.choice(list(versions)), pipeline.version, pipeline.restart_count
    kill = kill_soon(pipeline, draw) if draw.random() < 0.3 else None
    result = "updated"
    try:
        pipeline.update(versions[name], version=name, keep_previous=draw.random() < 0.3)
    except StageLostError:
        assert kill is not None
        result, name = "lost", previous
    if kill is not None:
        kill.join()
        wait_until(partial(has_restarts, pipeline, restarts + 1), _WAIT_SECONDS)
    assert pipeline.version == name
    load.check()
    return result if kill is None else f"{result}, killed"


@pytest.mark.parametrize(
    ("seed", "count"),
    [(3, 10), pytest.param(1, int(os.environ.get(_COUNT_VARIABLE, "60")), marks=pytest.mark.slow)],
)
def test_drawn_updates_with_kills(seed: int, count: int, versions: dict[str, Bundle]) -> None:
    draw, results = random.Random(seed), Counter[str]()  # noqa: S311 - the same moments in each run
    with in_processes(versions["step 0"], max_restarts=count) as pipeline:
        pipeline.update(versions["step 0"], version="step 0")
        load = Load(pipeline, versions)
        with load.running():
            for _ in range(count):
                results[drawn_update(pipeline, load, versions, draw)] += 1
        print(f"seed {seed}: {dict(results)}, calls: {dict(load.counts)}")  # noqa: T201 - shown if the test fails
        assert results["updated"]
        assert load.counts["sequences"]


def test_a_version_that_one_process_cannot_load_is_loaded_by_none(versions: dict[str, Bundle], tmp_path: Path) -> None:
    torch.manual_seed(9)
    shapes = {"ids": {0: torch.export.Dim("n", min=1, max=4096)}}
    damaged = stagepack.export(
        Layers().eval(), (torch.arange(5),), out=tmp_path / "m", split_at=["first", "second"], dynamic_shapes=shapes
    )
    path = damaged.path / damaged.stages[1].weights[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with in_processes(versions["step 0"]) as pipeline:
        load = Load(pipeline, versions)
        pipeline.update(versions["step 1"], version="step 1")
        with load.running():
            for _ in range(3):
                with pytest.raises(StagepackError, match=r"process 2 on \S+, stage 1.*\[D"):
                    pipeline.update(damaged)
                load.check()
            pipeline.update(versions["step 2"], version="step 2")
            load.check()
        assert pipeline.restart_count == 0
        assert not load.counts["lost"]


def test_the_state_of_calls_without_a_sequence_passes_on(tmp_path: Path) -> None:
    bundles = []
    for seed in range(2):
        torch.manual_seed(seed)
        bundles.append(
            stagepack.export(Counting().eval(), (torch.ones(4),), out=tmp_path / str(seed), split_at=["layer"])
        )
    one, x = stagepack.load(bundles[0]), torch.ones(4)
    with in_processes(bundles[0]) as pipeline, pipeline.sequence() as sequence, one.sequence() as own_sequence:
        for each in (pipeline, one, sequence, own_sequence):
            each(x)
        for updated in (pipeline, one):
            updated.update(bundles[1])
        with torch.no_grad():
            for call, expected in ((pipeline, one), (sequence, own_sequence)):
                assert all(map(torch.equal, call(x), expected(x)))
            pipeline.reset_state()
            assert all(map(torch.equal, pipeline(x), stagepack.load(bundles[1])(x)))


def test_the_weights_of_the_first_version_are_freed(tmp_path: Path) -> None:
    bundles, x = [], torch.ones(2, 2000)
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(2000, 2000), torch.nn.Linear(2000, 2000))  # 16 MB each
        bundles.append(stagepack.export(model.eval(), (x,), out=tmp_path / str(seed), stages=2, dynamic_shapes={}))
    with stagepack.load(bundles[0], processes=2, copy=True) as pipeline:
        processes = list(process_ids(pipeline).values())
        pipeline(x)
        first_bytes = sum(map(memory_bytes, processes))
        pipeline.update(bundles[1])
        pipeline(x)
        wait_until(lambda: sum(map(memory_bytes, processes)) < first_bytes + 16_000_000, 20)


def test_an_update_ends_when_its_pipeline_is_closed(versions: dict[str, Bundle]) -> None:
    errors: list[Exception] = []
    with in_processes(versions["step 0"]) as pipeline:

        def update() -> None:
            try:
                while True:
                    pipeline.update(versions["step 1"])
            except StagepackError as error:
                errors.append(error)

        thread = threading.Thread(target=update)
        thread.start()
        time.sleep(0.2)
    thread.join(_WAIT_SECONDS)
    assert not thread.is_alive()
    assert isinstance(errors[0], StageLostError)
