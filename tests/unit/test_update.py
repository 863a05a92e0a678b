"""A pipeline in this process takes other weights while calls go on: each call and each sequence runs on one version."""

import copy
import gc
import os
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DigestError, OptionError, UpdateError
from stagepack.format.reader import Bundle
from stagepack_loaders.executor import CallOptions
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.weight_files import open_weight_files
from tests.process_facts import memory_bytes

SIZE = 6
WAIT_SECONDS = 20


class Counting(torch.nn.Module):
    """Two layers that a cut parts, and a buffer that calls write in each of them."""

    first_count: torch.Tensor
    second_count: torch.Tensor

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = (torch.nn.Linear(SIZE, SIZE) for _ in range(2))
        for name in ("first_count", "second_count"):
            self.register_buffer(name, torch.full((1,), float(seed)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first_count.add_(1)
        x = self.first(x) * self.first_count
        self.second_count.add_(1)
        return self.second(x) * self.second_count


class WithFactor(torch.nn.Sequential):
    """Three layers, and a factor that the graph states."""

    def __init__(self, factor: float) -> None:
        super().__init__(*(torch.nn.Linear(SIZE, SIZE) for _ in range(3)))
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = super().forward(x) * self.factor
        return result


def layers(seed: int) -> torch.nn.Sequential:
    torch.manual_seed(seed)
    return torch.nn.Sequential(*(torch.nn.Linear(SIZE, SIZE) for _ in range(3)))


def export(model: torch.nn.Module, folder: Path, **options: Any) -> Bundle:
    return stagepack.export(model, (torch.ones(2, SIZE),), out=folder, **options)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    """Three versions of a model without state; the last one has the first stage of the first one."""
    folder = tmp_path_factory.mktemp("versions")
    exported = [export(layers(seed), folder / str(seed), stages=3, onnx=True) for seed in range(2)]
    model = layers(2)
    model[0].load_state_dict(layers(0)[0].state_dict())
    return [*exported, export(model, folder / "2", stages=3, onnx=True)]


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    """Two versions of a model with state."""
    folder = tmp_path_factory.mktemp("counting")
    return [export(Counting(seed), folder / str(seed), split_at=["second"], onnx=True) for seed in (1, 2)]


def answer(bundle: Bundle, runtime: str) -> torch.Tensor:
    """What a pipeline of the bundle answers that nobody updates."""
    return stagepack.load(bundle, runtime=runtime)(torch.ones(2, SIZE))


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_calls_after_an_update_have_the_new_weights(bundles: list[Bundle], runtime: str) -> None:
    pipeline, x = stagepack.load(bundles[0], runtime=runtime), torch.ones(2, SIZE)
    for version, bundle in [("1", bundles[1]), ("2", bundles[2]), ("back", bundles[0])]:
        previous = pipeline.version
        report = pipeline.update(bundle, version=version)
        assert (report.previous, report.version, pipeline.version) == (previous, version, version)
        assert torch.equal(pipeline(x), answer(bundle, runtime))
        assert pipeline.bundle.digest == bundle.digest
        assert pipeline.state_dict()["1.bias"].tolist() == stagepack.load(bundle).state_dict()["1.bias"].tolist()
    assert pipeline.update(bundles[1]).version == bundles[1].digest


@pytest.mark.parametrize(
    "options", [{"stream": True}, {"copy": True}, {"compile": True}, {"devices": ["cpu", "cpu"]}, {"verify": "off"}]
)
def test_pipelines_of_all_kinds_are_updated(bundles: list[Bundle], options: dict[str, Any]) -> None:
    pipeline, x = stagepack.load(bundles[0], **options), torch.ones(2, SIZE)
    pipeline(x)
    pipeline.update(bundles[1])
    assert torch.equal(pipeline(x), stagepack.load(bundles[1], **options)(x))


def test_weights_that_are_the_same_stay_where_they_are(bundles: list[Bundle]) -> None:
    pipeline = stagepack.load(bundles[0])
    before = pipeline.state_dict()
    pipeline.update(bundles[2])
    after = pipeline.state_dict()
    assert {name for name in before if before[name].data_ptr() == after[name].data_ptr()} == {"0.weight", "0.bias"}


def test_a_weight_file_that_is_the_same_is_not_read(bundles: list[Bundle], monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, opened = stagepack.load(bundles[0]), list[str]()

    def recording_open(bundle: Bundle, file_names: Iterable[str], loading: Any, *, verify: bool) -> Any:
        names = list(file_names)
        opened.extend(names)
        return open_weight_files(bundle, names, loading, verify=verify)

    monkeypatch.setattr("stagepack_loaders.torch.weight_store.open_weight_files", recording_open)
    pipeline.update(bundles[2])
    assert opened == [file_name for stage in bundles[2].stages[1:] for file_name in stage.weights]


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_the_state_of_calls_without_a_sequence_passes_on(counting: list[Bundle], runtime: str) -> None:
    pipeline, x = stagepack.load(counting[0], runtime=runtime), torch.ones(2, SIZE)
    expected = Counting(1)
    for _ in range(2):
        expected(x)
        pipeline(x)
    pipeline.update(counting[1])
    new = Counting(2)
    new.first_count.copy_(expected.first_count)
    new.second_count.copy_(expected.second_count)
    with torch.no_grad():
        assert torch.allclose(pipeline(x), new(x))
        pipeline.reset_state()
        assert torch.allclose(pipeline(x), Counting(2)(x))


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_call_that_began_before_an_update_writes_the_state_that_all_versions_share(
    counting: list[Bundle], runtime: str
) -> None:
    pipeline, x = stagepack.load(counting[0], runtime=runtime), torch.ones(2, SIZE)
    old = pipeline.executor.version
    pipeline.update(counting[1])
    values = {
        pipeline.inputs[0].name: pipeline.arrays.copy(pipeline.arrays.from_elements(x.numpy(), pipeline.inputs[0]))
    }
    pipeline(x)
    pipeline.executor.submit(values, {}, options=CallOptions(version=old)).result()
    counts = {name: count.item() for name, count in pipeline.state_dict().items() if name.endswith("count")}
    assert counts == {"first_count": 3.0, "second_count": 3.0}


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_a_sequence_finishes_on_its_version(counting: list[Bundle], runtime: str) -> None:
    pipeline, x = stagepack.load(counting[0], runtime=runtime), torch.ones(2, SIZE)
    expected = Counting(1)
    with pipeline.sequence() as sequence, torch.no_grad():
        assert torch.allclose(sequence(x), expected(x))
        pipeline.update(counting[1], version="new")
        assert torch.allclose(sequence(x), expected(x))
        assert sequence.version == counting[0].digest
        with pipeline.sequence() as other:
            assert other.version == "new"
            assert torch.allclose(other(x), Counting(2)(x))


def test_threads_get_answers_of_one_version_each(bundles: list[Bundle]) -> None:
    pipeline, x = stagepack.load(bundles[0], limits=None), torch.ones(2, SIZE)
    executor = pipeline.executor.overlapping(lambda number, seconds: None)
    expected = {bundle.digest: answer(bundle, "torch") for bundle in bundles}
    [result_name] = {edge.name for edge in pipeline.bundle.edges if edge.producer == 2}
    has_ended, names = threading.Event(), set[str]()

    def call(_: int) -> int:
        count = 0
        while not has_ended.is_set():
            version = executor.version
            values = executor.submit({pipeline.inputs[0].name: x}, {}, options=CallOptions(version=version)).result()
            assert torch.equal(values[result_name], expected[version.name])
            plain_answer = pipeline(x)
            assert any(torch.equal(plain_answer, other) for other in expected.values())
            names.add(version.name)
            count += 1
        return count

    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(call, number) for number in range(4)]
        with pipeline.trace() as run_trace:
            for number in range(1, 31):
                pipeline.update(bundles[number % 3], keep_previous=number % 5 == 0)
        has_ended.set()
        assert all(done.result(WAIT_SECONDS) > 0 for done in calls)
    assert names == expected.keys()
    assert run_trace.spans
    executor.close()


def test_the_version_before_is_freed_with_the_last_call_on_it(counting: list[Bundle]) -> None:
    pipeline, x = stagepack.load(counting[0], copy=True), torch.ones(2, SIZE)
    overlapping = pipeline.executor.overlapping(lambda number, seconds: None)
    overlapping.submit({pipeline.inputs[0].name: x}, {}).result()
    gc.disable()
    try:
        weights = weakref.ref(pipeline.stages[0].get_parameter("first.weight"))
        sequence = pipeline.sequence()
        sequence(x)
        pipeline.update(counting[1])
        assert weights() is not None
        sequence(x)
        sequence.close()
        assert weights() is None
        second = weakref.ref(pipeline.stages[0].get_parameter("first.weight"))
        pipeline.update(counting[0], keep_previous=True)
        assert second() is not None
        pipeline.update(counting[1])
        assert pipeline.stages[0].get_parameter("first.weight") is second()
        pipeline.update(counting[0])
        assert second() is None
    finally:
        gc.enable()
    overlapping.close()


def test_stages_without_state_keep_no_version_before(bundles: list[Bundle]) -> None:
    pipeline = stagepack.load(bundles[0], copy=True)
    gc.disable()
    try:
        weights = [weakref.ref(stage.get_parameter(f"{n}.weight")) for n, stage in enumerate(pipeline.stages)]
        pipeline.update(bundles[1])
        assert [weight() for weight in weights] == [None] * 3
    finally:
        gc.enable()


def test_memory_stays_flat_and_holds_what_changes_twice_at_most(tmp_path: Path) -> None:
    size, weight_bytes = 2048, 4 * 2 * 2048 * 2048
    bundles = []
    for seed in range(2):
        torch.manual_seed(seed)
        model = torch.nn.Sequential(*(torch.nn.Linear(size, size) for _ in range(2)))
        bundles.append(stagepack.export(model, (torch.ones(1, size),), out=tmp_path / str(seed), stages=2))
    pipeline, x = stagepack.load(bundles[0], copy=True), torch.ones(1, size)
    pipeline(x)
    used = []
    for number in range(1, 13):
        pipeline.update(bundles[number % 2])
        pipeline(x)
        used.append(memory_bytes(os.getpid(), "VmRSS"))
    assert max(used[4:]) - min(used[2:4]) < weight_bytes // 4
    with pipeline.sequence() as sequence:
        sequence(x)
        pipeline.update(bundles[1])
        pipeline(x)
        assert weight_bytes // 2 < memory_bytes(os.getpid(), "VmRSS") - used[-1] < 1.25 * weight_bytes
    assert memory_bytes(os.getpid(), "VmRSS") - used[-1] < weight_bytes // 4


def replaced(pipeline: Pipeline) -> None:
    pipeline.stages[0].get_submodule("0").weight = torch.nn.Parameter(torch.zeros(SIZE, SIZE))


def written(pipeline: Pipeline) -> None:
    pipeline.stages[1].load_state_dict(pipeline.stages[1].state_dict())


def trained(pipeline: Pipeline) -> None:
    pipeline(torch.ones(2, SIZE)).sum().backward()


@pytest.mark.parametrize("change", [replaced, written, trained])
def test_weights_that_the_user_has_changed_are_not_lost(
    bundles: list[Bundle], change: Callable[[Pipeline], None]
) -> None:
    pipeline, x = stagepack.load(bundles[0]), torch.ones(2, SIZE)
    change(pipeline)
    expected = pipeline(x)
    for changed in (pipeline, copy.deepcopy(pipeline).to("cpu")):
        with pytest.raises(
            UpdateError, match=r"stage \d cannot take other weights: .* was replaced, written or trained"
        ):
            changed.update(bundles[1])
        assert torch.equal(changed(x), expected)


@pytest.mark.parametrize("source", [None, 5, {"0.weight": torch.zeros(1)}])
def test_sources_of_other_types_are_refused(bundles: list[Bundle], source: Any) -> None:
    pipeline = stagepack.load(bundles[0])
    with pytest.raises(OptionError, match="expected a bundle, a delta or several, found"):
        pipeline.update(source)
    with pytest.raises(OptionError, match="deltas: expected a sequence"):
        stagepack.load(bundles[0], deltas=source)


def test_going_back_finds_weights_that_the_user_has_written_since(bundles: list[Bundle]) -> None:
    expected = answer(bundles[0], "torch")
    pipeline = stagepack.load(bundles[0])
    old_weight = pipeline.state_dict()["1.weight"]  # the last two versions have other ones
    shared_weight = pipeline.state_dict()["0.weight"]
    pipeline.update(bundles[2], keep_previous=True)
    with torch.no_grad():
        old_weight.add_(1)
    pipeline.rollback(keep_previous=True)
    assert pipeline.version == bundles[0].digest
    assert torch.equal(pipeline(torch.ones(2, SIZE)), expected)
    with torch.no_grad():
        shared_weight.add_(1)
    with pytest.raises(UpdateError, match="stage 0 cannot take other weights"):
        pipeline.rollback()


def test_copies_and_moved_pipelines_are_updated(bundles: list[Bundle]) -> None:
    pipeline, x = stagepack.load(bundles[0]), torch.ones(2, SIZE)
    for other in (copy.deepcopy(pipeline), pipeline.to("meta").to("meta")):
        other.update(bundles[1])
    duplicate = copy.deepcopy(stagepack.load(bundles[0]))
    duplicate.update(bundles[1])
    assert torch.equal(duplicate(x), answer(bundles[1], "torch"))


def test_other_models_are_refused(bundles: list[Bundle], counting: list[Bundle], tmp_path: Path) -> None:
    x = torch.ones(2, SIZE)
    other_cut = stagepack.recut(bundles[1], out=tmp_path / "cut", stages=2)
    dynamic = export(layers(1), tmp_path / "dynamic", stages=3, dynamic_shapes=({0: torch.export.Dim("rows")},))
    twice = export(WithFactor(2), tmp_path / "twice", split_at=["1", "2"])
    pipeline = stagepack.load(export(WithFactor(3), tmp_path / "thrice", split_at=["1", "2"]))
    expected = pipeline(x)
    refusals = {
        other_cut: "expected 3 stages, found 2",
        counting[0]: "expected 3 stages, found 2",
        dynamic: "its inputs, results or edges are others",
        twice: "the graph of stage 2 is another one",
    }
    for bundle, message in refusals.items():
        with pytest.raises(UpdateError, match=message):
            pipeline.update(bundle)
    for name in ("", "x" * 257, "a\nb", 3):
        with pytest.raises(OptionError, match="version: expected a printable text"):
            pipeline.update(bundles[1], version=name)  # type: ignore[arg-type]
    assert pipeline.version == pipeline.bundle.digest
    assert torch.equal(pipeline(x), expected)


def test_a_bundle_that_is_damaged_leaves_the_version_that_runs(bundles: list[Bundle], tmp_path: Path) -> None:
    pipeline, x = stagepack.load(bundles[0]), torch.ones(2, SIZE)
    damaged = export(layers(1), tmp_path / "damaged", stages=3)
    path = damaged.path / damaged.stages[2].weights[0]
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DigestError):
        pipeline.update(damaged)
    assert torch.equal(pipeline(x), answer(bundles[0], "torch"))
    assert pipeline.version == bundles[0].digest


def test_weights_that_pass_through_the_memory_of_a_device_are_not_replaced(bundles: list[Bundle]) -> None:
    pipeline = stagepack.load(bundles[0], device_memory=8200)
    with pytest.raises(UpdateError, match="it has device_memory"):
        pipeline.update(bundles[1])
