"""A running pipeline takes the changes of a delta: what has not changed stays in memory, and all that has is verified."""

import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.deltas.patches import MOST_DELTAS
from stagepack.errors import ClosedError, DigestError, FormatError, UpdateError
from stagepack.format.reader import Bundle
from stagepack.remote.cache import Cache
from stagepack.remote.cache_contents import cached_bundles
from stagepack_loaders.distributed import process_launcher
from stagepack_loaders.distributed.membership import GroupOptions, VersionPlace, place_of_version, places_of_deltas
from tests.deltas.conftest import Trainer, Versions, net, replace_some
from tests.distributed.bundles import has_restarts, in_processes, process_ids
from tests.remote.http_server import HttpServer
from tests.waiting import wait_until

X = torch.linspace(-1, 1, 128).reshape(2, 64).bfloat16()


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Versions:
    """Versions whose graphs are the same: a graph says which buffers are zeros, as those of an untrained model are."""
    folder, model = tmp_path_factory.mktemp("versions"), net()
    for seed, name in enumerate("abc"):
        replace_some(model, 0.01 if seed else 1.0, seed)
        stagepack.export(model, (X,), out=folder / f"{name}.stagepack", stages=3)
    for old, new, version in [("a", "b", "step 1"), ("b", "c", "step 2")]:
        paths = (folder / f"{old}.stagepack", folder / f"{new}.stagepack")
        stagepack.delta(*paths, out=folder / f"{new}.delta", version=version)
    return Versions(folder)


def answer(bundle: Path) -> torch.Tensor:
    """What a pipeline answers that nobody updates."""
    return stagepack.load(bundle)(X)


@pytest.mark.parametrize("copy", [False, True])
def test_each_delta_gives_the_weights_of_its_result(versions: Versions, copy: bool) -> None:
    pipeline = stagepack.load(versions.a, copy=copy)
    for delta, bundle in [(versions.a_to_b, versions.b), (versions.b_to_c, versions.c)]:
        pipeline.update(delta)
        assert torch.equal(pipeline(X), answer(bundle))
        expected = stagepack.load(bundle)
        assert pipeline.bundle.digest == expected.bundle.digest
        weights, expected_weights = pipeline.state_dict(), expected.state_dict()
        assert all(torch.equal(weight, expected_weights[name]) for name, weight in weights.items())
        assert pipeline.version == stagepack.open_delta(delta).version
    pipeline.update(versions.a)
    pipeline.update([versions.a_to_b, stagepack.open_delta(versions.b_to_c)], version="both")
    assert torch.equal(pipeline(X), answer(versions.c))
    assert pipeline.version == "both"


def test_weights_that_a_delta_does_not_change_stay_where_they_are(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("old", "new")]
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).bfloat16()
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    stagepack.export(model, (x,), out=folders[0], stages=2)
    with torch.no_grad():
        model.get_parameter("1.weight")[3, 5] += 1
        model.get_parameter("2.bias").fill_(7)
    stagepack.export(model, (x,), out=folders[1], stages=2)
    delta = stagepack.delta(*folders, out=tmp_path / "step", version="7")
    pipeline = stagepack.load(folders[0])
    before = pipeline.state_dict()
    shutil.rmtree(folders[1])
    assert pipeline.update(delta.path).version == "7"
    after = pipeline.state_dict()
    assert {name for name in after if after[name].data_ptr() != before[name].data_ptr()} == {"1.weight", "2.bias"}
    assert torch.equal(pipeline(x), model(x))


def test_small_tied_and_rearranged_weights_are_changed(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        whole: torch.Tensor
        part: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.small = torch.nn.ParameterList(torch.randn(5) for _ in range(300))
            self.table = torch.nn.Embedding(30, 8)
            self.head = torch.nn.Linear(8, 30, bias=False)
            self.head.weight = self.table.weight
            self.turned = torch.nn.Parameter(torch.randn(8, 5).t())
            whole = torch.randn(6, 5)
            self.register_buffer("whole", whole)
            self.register_buffer("part", whole[2:4])

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            hidden = self.table(ids)
            total = sum(self.small) + self.part.sum(0) + self.whole[0]
            result: torch.Tensor = self.head(hidden + total @ self.turned)
            return result

    torch.manual_seed(0)
    model, ids = Model(), torch.arange(6)
    old = stagepack.export(model, (ids,), out=tmp_path / "old")
    with torch.no_grad():
        for number in range(0, 300, 3):
            model.small[number].add_(1)
        for weight in (model.table.weight, model.turned, model.whole):
            weight[1, 2] += 3
    new = stagepack.export(model, (ids,), out=tmp_path / "new")
    delta = stagepack.delta(old, new, out=tmp_path / "step")
    pipeline = stagepack.load(old)
    pipeline.update(delta.path)
    assert torch.equal(pipeline(ids), stagepack.load(new)(ids))
    weights, expected = pipeline.state_dict(), stagepack.load(new).state_dict()
    assert all(torch.equal(weight, expected[name]) for name, weight in weights.items())
    assert weights["head.weight"].data_ptr() == weights["table.weight"].data_ptr()
    assert weights["part"].untyped_storage().data_ptr() == weights["whole"].untyped_storage().data_ptr()


def test_what_is_not_the_result_is_refused(versions: Versions, tmp_path: Path) -> None:
    pipeline = stagepack.load(versions.a)
    with pytest.raises(
        UpdateError, match=r"expected a delta on the bundle that runs, .*: give the deltas between them"
    ):
        pipeline.update(versions.b_to_c)
    damaged = Path(shutil.copytree(versions.a_to_b, tmp_path / "damaged"))
    data = next(path for path in sorted(damaged.iterdir()) if path.name.startswith("stage-0.safetensors"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(FormatError):
        pipeline.update(damaged)
    weight = pipeline.stages[0].get_parameter("1.weight")
    weight.data[0, 0] += 1  # which torch does not count
    with pytest.raises(DigestError, match="the weights that run, with the changes of the delta, are not those"):
        pipeline.update(versions.a_to_b)
    weight.data[0, 0] -= 1
    assert torch.equal(pipeline(X), answer(versions.a))
    with pytest.raises(UpdateError, match="loaded with verify='off'"):
        stagepack.load(versions.a, verify="off").update(versions.a_to_b)


def test_deltas_lead_back_to_earlier_versions(versions: Versions, tmp_path: Path) -> None:
    pipeline = stagepack.load(versions.a)
    for name, old, new in [("c-to-b", versions.c, versions.b), ("b-to-a", versions.b, versions.a)]:
        stagepack.delta(old, new, out=tmp_path / name, version=name)
    for _ in range(2):
        pipeline.update([versions.a_to_b, versions.b_to_c])
        pipeline.update(tmp_path / "c-to-b")
        assert torch.equal(pipeline(X), answer(versions.b))
        assert pipeline.version == "c-to-b"
        pipeline.update(versions.b_to_c)
        pipeline.update([tmp_path / "c-to-b", tmp_path / "b-to-a"])
        assert torch.equal(pipeline(X), answer(versions.a))
        assert pipeline.bundle.patches is None


def test_the_bundle_that_runs_begins_a_new_chain(versions: Versions, tmp_path: Path) -> None:
    pipeline = stagepack.load(versions.a)
    pipeline.update(versions.a_to_b)
    before = pipeline.state_dict()
    applied = stagepack.apply_deltas(versions.a, [versions.a_to_b], out=tmp_path / "applied")
    pipeline.update(applied.path, version="step 1")
    after = pipeline.state_dict()
    assert all(after[name].data_ptr() == weight.data_ptr() for name, weight in before.items())
    assert pipeline.bundle.patches is None
    pipeline.update(versions.b_to_c)
    assert torch.equal(pipeline(X), answer(versions.c))


def cached_digests(cache: Path) -> list[str]:
    return [bundle.digest for bundle in cached_bundles(Cache(cache))]


def test_deltas_are_taken_without_end_and_the_disk_is_freed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(cache := tmp_path / "cache"))
    trainer = Trainer(tmp_path)
    pipeline = stagepack.load(trainer.first)
    for step in range(1, 2 * MOST_DELTAS + 3):
        pipeline.update(trainer.ship(), keep_previous=step == MOST_DELTAS + 1)
        assert torch.equal(pipeline(trainer.x), trainer.answer())
        if step == MOST_DELTAS + 1:
            # The folders of the deltas that were applied are needed no more.
            for number in range(1, step):
                shutil.rmtree(tmp_path / f"{number}.delta")
            version = pipeline.version
            pipeline.rollback(keep_previous=True)
            pipeline.rollback()
            assert pipeline.version == version
        assert len(cached_digests(cache)) == (step > MOST_DELTAS)
    patches = pipeline.bundle.patches
    assert patches is not None
    assert (len(patches.open_deltas), cached_digests(cache)) == (2, [patches.base_digest])
    pipeline.update(trainer.folder / "newest")
    del patches
    assert cached_digests(cache) == []


@pytest.mark.process
@pytest.mark.parametrize("is_found", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_processes_take_deltas_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_found: bool) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(cache := tmp_path / "cache"))
    trainer = Trainer(tmp_path)
    with in_processes(Bundle(trainer.first), max_restarts=1) as pipeline:
        if not is_found:  # the cache of this process is that of another machine
            monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "front"))
            monkeypatch.setattr(process_launcher, "place_of_version", partial(place_elsewhere, tmp_path / "front"))
        for step in range(1, MOST_DELTAS + 4):
            pipeline.update(trainer.ship())
            assert step % 16 or torch.equal(pipeline(trainer.x), trainer.answer())
        assert torch.equal(pipeline(trainer.x), trainer.answer())
        patches = pipeline.bundle.patches
        assert patches is not None
        assert len(patches.open_deltas) == 3
        assert (pipeline.restart_count, cached_digests(cache)) == (0, [patches.base_digest])
        if is_found:
            for step in range(1, MOST_DELTAS + 1):
                shutil.rmtree(tmp_path / f"{step}.delta")
            os.kill(process_ids(pipeline)[1], signal.SIGKILL)
            wait_until(partial(has_restarts, pipeline, 1))
            assert torch.equal(pipeline(trainer.x), trainer.answer())
            pipeline.update(trainer.ship())
            assert torch.equal(pipeline(trainer.x), trainer.answer())


def place_elsewhere(folder: Path, bundle: Bundle, options: GroupOptions) -> VersionPlace:
    """Where processes look that have other folders than this one."""
    place = place_of_version(bundle, options)
    return place._replace(bundle=place.bundle.replace(str(folder), "/nowhere"))


@pytest.mark.process
def test_processes_that_start_again_have_the_deltas_that_were_applied(versions: Versions) -> None:
    bundle = Bundle(versions.a)
    with in_processes(bundle, max_restarts=1) as pipeline:
        pipeline.update(versions.a_to_b)
        pipeline.update(versions.b_to_c, version="third")
        assert torch.equal(pipeline(X), answer(versions.c))
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(partial(has_restarts, pipeline, 1))
        assert pipeline.version == "third"
        assert torch.equal(pipeline(X), answer(versions.c))
        pipeline.update(versions.b)
        assert torch.equal(pipeline(X), answer(versions.b))


@pytest.mark.process
def test_processes_need_no_folder_of_a_delta_that_they_have_applied(versions: Versions, tmp_path: Path) -> None:
    first = Path(shutil.copytree(versions.a_to_b, tmp_path / "first"))
    with in_processes(Bundle(versions.a)) as pipeline:
        pipeline.update(first)
        shutil.rmtree(first)
        pipeline.update(versions.b_to_c)
        assert torch.equal(pipeline(X), answer(versions.c))


@pytest.mark.parametrize("returns", [1, 2])
def test_a_chain_that_returns_is_followed_by_load_update_and_apply(
    versions: Versions, tmp_path: Path, returns: int
) -> None:
    back = stagepack.delta(versions.b, versions.a, out=tmp_path / "back")
    chain = [versions.a_to_b, back.path] * returns
    pipeline = stagepack.load(versions.a)
    for _ in range(2):
        pipeline.update(chain)
        assert torch.equal(pipeline(X), answer(versions.a))
    assert torch.equal(stagepack.load(versions.a, deltas=chain)(X), answer(versions.a))
    for delta in chain:
        pipeline.update(delta)
    chain += [versions.a_to_b, versions.b_to_c]
    pipeline.update(chain)
    assert torch.equal(pipeline(X), answer(versions.c))
    assert torch.equal(stagepack.load(versions.a, deltas=chain)(X), answer(versions.c))
    applied = stagepack.apply_deltas(versions.a, chain, out=tmp_path / "applied")
    assert applied.digest == stagepack.open(versions.c).digest
    applied.verify()


@pytest.mark.process
def test_processes_load_a_chain_that_returns(versions: Versions, tmp_path: Path) -> None:
    back = stagepack.delta(versions.b, versions.a, out=tmp_path / "back")
    chain = [versions.a_to_b, back.path, versions.a_to_b]
    with stagepack.load(versions.a, deltas=chain, processes=2) as pipeline:
        assert torch.equal(pipeline(X), answer(versions.b))
        pipeline.update([back, versions.a_to_b, versions.b_to_c])
        assert torch.equal(pipeline(X), answer(versions.c))


@pytest.mark.process
def test_processes_take_a_delta_at_a_url(versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_CACHE", str(tmp_path / "cache"))
    with HttpServer(versions.folder) as server, in_processes(Bundle(versions.a), max_restarts=1) as pipeline:
        pipeline.update(f"{server.url}/b.delta")
        assert torch.equal(pipeline(X), answer(versions.b))
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(partial(has_restarts, pipeline, 1))
        assert torch.equal(pipeline(X), answer(versions.b))
        # Processes on other machines fetch it themselves.
        places = [places_of_deltas(pipeline.bundle, GroupOptions(is_local=is_local)) for is_local in (True, False)]
        assert Path(places[0][0]).parent == tmp_path / "cache" / "bundles"
        assert places[1] == (f"{server.url}/b.delta",)


@pytest.mark.process
@pytest.mark.parametrize("processes", [False, 2])
def test_a_closed_pipeline_says_so(versions: Versions, processes: bool | int) -> None:
    pipeline: Any = stagepack.load(versions.a, processes=processes)
    pipeline.update(versions.b, keep_previous=True)
    sequence = pipeline.sequence()
    pipeline.executor.close()

    def trace() -> None:
        with pipeline.trace():
            pass

    calls: tuple[Callable[[], object], ...] = (
        partial(pipeline, X),
        partial(sequence, X),
        partial(pipeline.update, versions.a),
        partial(pipeline.update, versions.b_to_c),
        pipeline.rollback,
        pipeline.reset_state,
        partial(pipeline.seed, 1),
        trace,
        partial(pipeline.generate, [1]),
        partial(pipeline.encode, "a"),
        pipeline.sequence,
        partial(pipeline.sequences, 2),
        partial(pipeline.load_adapter, "no adapter"),
        partial(pipeline.unload_adapter, "no adapter"),
    )
    for call in calls:
        with pytest.raises(ClosedError, match="the pipeline is closed"):
            call()
    pipeline.executor.close()
