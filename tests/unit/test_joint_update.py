"""The entry points of a bundle take other weights together: between the same two calls, with what they share in memory once."""

import gc
import threading
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, UpdateError
from stagepack.format.reader import Bundle
from stagepack_loaders.entry_points import EntryPointPipelines
from tests.unit.test_entry_points import Autoencoder

IDS, HIDDEN = torch.arange(6).reshape(2, 3), torch.ones(2, 3, 8)


def export(seed: int, folder: Path, **options: Any) -> Bundle:
    torch.manual_seed(seed)
    entry_points = {"encode": stagepack.Inputs(args=(IDS,)), "decode": stagepack.Inputs(kwargs={"hidden": HIDDEN})}
    model = Autoencoder().eval()
    return stagepack.export(model, entry_points=entry_points, out=folder, stages={"decode": 2}, **options)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("joint")
    return [export(seed, folder / str(seed)) for seed in range(2)]


@pytest.fixture(scope="module")
def made_onnx(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("joint-onnx")
    return [export(seed, folder / str(seed), onnx=True) for seed in range(2)]


@pytest.fixture
def delta(made: list[Bundle], tmp_path: Path) -> stagepack.Delta:
    return stagepack.delta(*made, out=tmp_path / "delta", version="new")


def answers(pipelines: EntryPointPipelines) -> tuple[torch.Tensor, torch.Tensor]:
    return pipelines.encode(IDS)["hidden"], pipelines.decode(HIDDEN)[0]


def check_answers(pipelines: EntryPointPipelines, bundle: Bundle) -> None:
    expected = answers(stagepack.load_entry_points(bundle, runtime=pipelines.encode.stages[0].runtime))
    for found, wanted in zip(answers(pipelines), expected, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
@pytest.mark.parametrize("kind", ["bundle", "delta"])
@pytest.mark.parametrize("name", ["encode", "decode", None])
def test_an_update_of_one_entry_point_is_one_of_all(
    made: list[Bundle], made_onnx: list[Bundle], tmp_path: Path, name: str | None, kind: str, runtime: str
) -> None:
    old, new = made if runtime == "torch" else made_onnx
    source = new if kind == "bundle" else stagepack.delta(old, new, out=tmp_path / "delta", version="new")
    pipelines = stagepack.load_entry_points(old, runtime=runtime)
    one: Any = pipelines if name is None else pipelines[name]
    report = one.update(source, version="second", keep_previous=True)
    assert {pipelines.version, *(pipeline.version for pipeline in pipelines.values())} == {"second"}
    assert report.version == "second"
    assert pipelines.bundle.digest == new.digest
    assert pipelines.bundle.selected is None
    check_answers(pipelines, new)
    one.rollback()
    check_answers(pipelines, old)
    assert pipelines.version == old.digest


def test_weights_that_entry_points_share_stay_shared(made: list[Bundle], delta: stagepack.Delta) -> None:
    pipelines = stagepack.load_entry_points(made[0])
    for source in (delta, made[0]):
        pipelines.update(source)
        shared = [
            {name: weight.data_ptr() for name, weight in pipeline.state_dict().items()}
            for pipeline in pipelines.values()
        ]
        assert shared[0]["embed.weight"] == shared[1]["embed.weight"]
        assert shared[0]["calls"] == shared[1]["calls"]


def test_buffers_that_calls_of_several_entry_points_write_keep_their_content(
    made: list[Bundle], delta: stagepack.Delta
) -> None:
    pipelines = stagepack.load_entry_points(made[0])
    counts = [int(pipelines.encode(IDS)["calls"]), int(pipelines.decode(HIDDEN)[1])]
    pipelines.update(delta, keep_previous=True)
    counts += [int(pipelines.encode(IDS)["calls"]), int(pipelines.decode(HIDDEN)[1])]
    pipelines.rollback()
    counts.append(int(pipelines.encode(IDS)["calls"]))
    assert counts == [1, 11, 12, 22, 23]
    pipelines.encode.reset_state()
    assert int(pipelines.decode(HIDDEN)[1]) == 10


class Reading(torch.nn.Module):
    """An entry point that writes a buffer, and one that reads it alone."""

    total: torch.Tensor

    def __init__(self, start: float) -> None:
        super().__init__()
        self.register_buffer("total", torch.full((2,), start))

    def add(self, x: torch.Tensor) -> torch.Tensor:
        self.total.add_(x)
        return self.total + 0

    def read(self, x: torch.Tensor) -> torch.Tensor:
        return self.total + x


def test_a_buffer_that_another_entry_point_writes_is_read_as_it_is(tmp_path: Path) -> None:
    x = torch.ones(2)
    bundles = [
        stagepack.export(
            Reading(start),
            entry_points={name: stagepack.Inputs(args=(x,)) for name in ("read", "add")},
            out=tmp_path / str(start),
        )
        for start in (1.0, 5.0)
    ]
    for source in (bundles[1], stagepack.delta(*bundles, out=tmp_path / "delta")):
        pipelines = stagepack.load_entry_points(bundles[0])
        pipelines.add(x)
        pipelines.update(source)
        assert pipelines.read(x).tolist() == [3, 3]
        assert (pipelines.add(x).tolist(), pipelines.read(x).tolist()) == ([3, 3], [4, 4])
        pipelines.add.reset_state()
        assert pipelines.read(x).tolist() == [6, 6]


def test_calls_never_find_an_earlier_version_than_calls_before(made: list[Bundle]) -> None:
    pipelines, found, has_ended = stagepack.load_entry_points(made[0]), list[int](), threading.Event()
    pipelines.update(made[1], version="0")

    def look() -> None:
        while not has_ended.is_set():
            found.extend(int(pipelines[name].version) for name in ("encode", "decode", "encode"))

    thread = threading.Thread(target=look)
    thread.start()
    for number in range(1, 31):
        pipelines.update(made[number % 2], version=str(number))
    has_ended.set()
    thread.join()
    assert found == sorted(found)
    assert len(set(found)) > 1


def damaged(bundle: Bundle, _: pytest.MonkeyPatch) -> None:
    path = bundle.path / "decode-stage-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def failing_switch(_: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    from stagepack_loaders.stages import OwnState

    pass_on, passed = OwnState.pass_on, list[object]()

    def fail_once(self: OwnState, stage: Any) -> None:
        passed.append(stage)
        if len(passed) == 2:
            raise DigestError([])
        pass_on(self, stage)

    monkeypatch.setattr(OwnState, "pass_on", fail_once)


@pytest.mark.parametrize("failure", [damaged, failing_switch])
def test_a_failure_of_one_entry_point_leaves_the_version_that_runs_everywhere(
    made: list[Bundle], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Callable[..., None]
) -> None:
    pipelines, new = stagepack.load_entry_points(made[0]), export(1, tmp_path / "new")
    answers(pipelines)
    failure(new, monkeypatch)
    with pytest.raises(DigestError):
        pipelines.update(new)
    assert {pipeline.version for pipeline in pipelines.values()} == {made[0].digest}
    check_answers(pipelines, made[0])
    assert int(pipelines.decode(HIDDEN)[1]) == 32


def test_weights_that_were_changed_at_one_entry_point_keep_all_from_an_update(made: list[Bundle]) -> None:
    pipelines = stagepack.load_entry_points(made[0])
    with torch.no_grad():
        pipelines.decode.state_dict()["layers.3.bias"].add_(1)
    with pytest.raises(UpdateError, match=r"stage 0 cannot take other weights: layers\.3\.bias"):
        pipelines.encode.update(made[1])
    assert pipelines.version == made[0].digest


def test_the_version_before_is_freed_at_all_entry_points(made: list[Bundle]) -> None:
    pipelines = stagepack.load_entry_points(made[0], copy=True)
    gc.disable()
    try:
        for source in (made[1], made[0]):
            weights = [
                weakref.ref(pipelines.encode.stages[0].get_parameter("layers.0.weight")),
                weakref.ref(pipelines.decode.stages[0].get_parameter("layers.2.weight")),
                weakref.ref(pipelines.decode.stages[1].get_parameter("embed.weight")),
            ]
            sequence = pipelines.decode.sequence()
            pipelines.update(source)
            assert [weight() is None for weight in weights] == [True, False, False]
            sequence.close()
            del sequence
            assert [weight() is None for weight in weights] == [True, True, True]
    finally:
        gc.enable()
