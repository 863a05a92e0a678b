"""Adapters are loaded and unloaded while calls go on: all stages have one before the first call may name it, and free it after the last."""

import contextlib
import gc
import os
import random
import shutil
import signal
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import stagepack
from stagepack.distributed import DistributedPipeline
from stagepack.errors import (
    AdapterError,
    DigestError,
    InputError,
    NotABundleError,
    OptionError,
    StageLostError,
    UpdateError,
)
from stagepack_loaders.torch.adapter_module import AdapterModule
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import IDS, MASK, export_model, logits, make_model
from tests.distributed.bundles import has_restarts, process_ids
from tests.process_facts import memory_bytes
from tests.waiting import wait_until

RANKS = {"model.layers.0.self_attn.q_proj": 4, "model.layers.1.mlp.up_proj": 2, "lm_head": 3}
NAMES = ("a", "b", "c")


class Made(NamedTuple):
    """A bundle in three stages, the folders of its adapters, and the answers by adapter."""

    bundle: stagepack.Bundle
    folder: Path
    answers: dict[str | None, torch.Tensor]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("loading")
    model = make_model("llama")
    bundle = export_model(model, folder, stages=3)
    answers: dict[str | None, torch.Tensor] = {None: logits(model)}
    for seed, name in enumerate(NAMES):
        lora = write_lora(model, folder / f"lora-{name}", RANKS, seed)
        stagepack.write_adapter(bundle, lora, out=folder / name)
        with adapted(model, lora):
            answers[name] = logits(model)
    return Made(bundle, folder, answers)


@pytest.fixture(params=[pytest.param(None, id="here"), pytest.param(2, id="processes", marks=pytest.mark.process)])
def pipeline(made: Made, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A pipeline that begins without adapters."""
    options = {} if request.param is None else {"processes": request.param}
    with contextlib.ExitStack() as closing:
        pipeline = stagepack.load(made.bundle, adapters=[], **options)
        if request.param is not None:
            closing.enter_context(pipeline)
        yield pipeline


def check(pipeline: Any, made: Made, *names: str) -> None:
    """Compare the answers of a pipeline that has some adapters."""
    assert pipeline.adapters == names
    for name in (None, *names):
        assert torch.equal(logits(pipeline, adapter=name), made.answers[name])
    for name in {*NAMES} - {*names}:
        with pytest.raises(InputError, match=f"found '{name}'"):
            logits(pipeline, adapter=name)


def test_adapters_come_and_go(pipeline: Any, made: Made) -> None:
    check(pipeline, made)
    assert pipeline.load_adapter(made.folder / "a") == "a"
    check(pipeline, made, "a")
    assert pipeline.load_adapter(f"b={made.folder / 'b'}") == "b"
    check(pipeline, made, "a", "b")
    pipeline.unload_adapter("a")
    check(pipeline, made, "b")
    assert pipeline.load_adapter(made.folder / "c", "b", replace=True) == "b"
    assert torch.equal(logits(pipeline, adapter="b"), made.answers["c"])
    mixed = logits(pipeline, adapter=["b", None, "b"])
    torch.testing.assert_close(mixed[::2], made.answers["c"][::2], rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[1], made.answers[None][1])


def test_a_sequence_keeps_the_adapters_that_it_began_with(pipeline: Any, made: Made) -> None:
    pipeline.load_adapter(made.folder / "a")
    with pipeline.sequence() as sequence:
        pipeline.load_adapter(made.folder / "b", "a", replace=True)
        pipeline.load_adapter(made.folder / "c")
        assert torch.equal(logits(sequence, adapter="a"), made.answers["a"])
        with pytest.raises(InputError, match="found 'c'"):
            logits(sequence, adapter="c")
        pipeline.unload_adapter("a")
        assert torch.equal(logits(sequence, adapter="a"), made.answers["a"])
    check(pipeline, made, "c")


def test_what_cannot_be_loaded_is_refused_and_nothing_changes(pipeline: Any, made: Made, tmp_path: Path) -> None:
    pipeline.load_adapter(made.folder / "a")
    damaged = shutil.copytree(made.folder / "b", tmp_path / "damaged")
    content = bytearray((damaged / "adapter.safetensors").read_bytes())
    content[-1] ^= 1
    (damaged / "adapter.safetensors").write_bytes(content)
    other = stagepack.recut(made.bundle, out=tmp_path / "other.stagepack", stages=1)
    stagepack.write_adapter(other, made.folder / "lora-b", out=tmp_path / "of-other")
    refusals: list[tuple[Any, tuple[Any, ...], type[Exception], str]] = [
        (pipeline.load_adapter, (damaged,), DigestError, "the content was changed"),
        (pipeline.load_adapter, (tmp_path / "of-other",), AdapterError, "is an adapter of the bundle"),
        (
            pipeline.load_adapter,
            (made.folder / "lora-b",),
            NotABundleError,
            "write it for its bundle by stagepack adapter",
        ),
        (pipeline.load_adapter, (made.folder / "a",), AdapterError, "an adapter 'a' is loaded already"),
        (pipeline.load_adapter, (made.folder / "b", "a"), AdapterError, "an adapter 'a' is loaded already"),
        (pipeline.load_adapter, (made.folder / "b", "x=y"), OptionError, "expected a name of letters"),
        (pipeline.load_adapter, (made.folder / "b", ""), OptionError, "expected a name of letters"),
        (pipeline.load_adapter, (made.folder / "b", "../b"), OptionError, "expected a name of letters"),
        (pipeline.load_adapter, (made.bundle,), OptionError, "expected the folder or URL of an adapter, found"),
        (pipeline.unload_adapter, ("b",), AdapterError, "expected one of a, found 'b'"),
        (pipeline.unload_adapter, (None,), AdapterError, "expected the name of an adapter, found NoneType: None"),
        (pipeline.update, (made.bundle,), UpdateError, "expected a pipeline without adapters, found a"),
    ]
    for method, arguments, error_type, says in refusals:
        with pytest.raises(error_type, match=says):
            method(*arguments)
        check(pipeline, made, "a")


def test_a_pipeline_says_at_loading_that_it_takes_adapters(made: Made) -> None:
    plain = stagepack.load(made.bundle)
    with pytest.raises(AdapterError, match=r"load it with those that it begins with, or with adapters=\[\]"):
        plain.load_adapter(made.folder / "a")
    with pytest.raises(InputError, match="there is no argument 'adapter'"):
        logits(plain, adapter="a")
    with pytest.raises(OptionError, match="as in NAME=FOLDER, found 'x=y'"):
        stagepack.load(made.bundle, adapters={"x=y": made.folder / "a"})
    with pytest.raises(OptionError, match="adapters excludes compile"):
        stagepack.load(made.bundle, adapters=[], compiled="compiled")


def test_other_weights_take_adapters_that_were_made_for_them(pipeline: Any, made: Made, tmp_path: Path) -> None:
    model = make_model("llama")
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
    bundle = export_model(model, tmp_path, stages=3)
    lora = write_lora(model, tmp_path / "lora", RANKS, 7)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "new")
    pipeline.load_adapter(made.folder / "a")
    pipeline.unload_adapter("a")
    pipeline.update(bundle, keep_previous=True)
    with pytest.raises(AdapterError, match="is an adapter of the bundle"):
        pipeline.load_adapter(made.folder / "a")
    pipeline.load_adapter(tmp_path / "new")
    with adapted(model, lora):
        assert torch.equal(logits(pipeline, adapter="new"), logits(model))
    with pytest.raises(UpdateError, match="expected a pipeline without adapters, found new"):
        pipeline.rollback()
    pipeline.unload_adapter("new")
    pipeline.rollback()
    pipeline.load_adapter(made.folder / "a")
    check(pipeline, made, "a")


def test_trained_weights_stay_under_adapters(made: Made) -> None:
    """The stages of all versions have the same weights: those that the user has written, too."""
    model, pipeline = make_model("llama"), stagepack.load(made.bundle, adapters=[], copy=True)
    with torch.no_grad():
        model.lm_head.weight.add_(0.5)
        pipeline.stages[2].get_parameter("lm_head.weight").add_(0.5)
    pipeline.load_adapter(made.folder / "a")
    with adapted(model, made.folder / "lora-a"):
        assert torch.equal(logits(pipeline, adapter="a"), logits(model))
    pipeline.unload_adapter("a")
    with pytest.raises(UpdateError, match=r"lm_head\.weight was replaced, written or trained"):
        pipeline.update(made.bundle)


def tensors_of(pipeline: Any, number: int) -> list["weakref.ref[torch.Tensor]"]:
    """The tensors of an adapter in all stages, by its number."""
    found = []
    for stage in pipeline.stages:
        module = stage.code.compiled_module
        assert isinstance(module, AdapterModule)
        found += [weakref.ref(change.b) for change in module.adapters[number].tensors.values()]
    return found


@pytest.mark.parametrize("at_start", [False, True])
def test_an_adapter_is_free_after_its_last_sequence(made: Made, at_start: bool) -> None:
    pipeline = stagepack.load(made.bundle, adapters=[made.folder / "a"] if at_start else [])
    gc.collect()
    gc.disable()  # references alone free it
    try:
        if not at_start:
            pipeline.load_adapter(made.folder / "a")
        pipeline.load_adapter(made.folder / "b")
        first, second = tensors_of(pipeline, 1), tensors_of(pipeline, 2)
        assert len(first) == len(RANKS)
        logits(pipeline, adapter=["a", "b", None])
        sequence = pipeline.sequence()
        pipeline.unload_adapter("a")
        assert all(reference() is not None for reference in first)
        assert tensors_of(pipeline, 1)[0]() is second[0]()  # in memory once
        sequence.close()
        del sequence
        assert not any(reference() for reference in first)
        assert all(reference() is not None for reference in second)
    finally:
        gc.enable()


class Load:
    """Calls of several threads, each of which has the answer of the adapter that it names, or is refused for its name."""

    def __init__(self, pipeline: Any, made: Made) -> None:
        self._pipeline, self._made = pipeline, made
        self._has_ended = threading.Event()
        self.counts, self.faults = Counter[str](), list[str]()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        threads = [threading.Thread(target=self._run, args=(call,)) for call in (self._call, self._mixed, self._texts)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._has_ended.set()
            for thread in threads:
                thread.join(60)
        assert not any(thread.is_alive() for thread in threads)
        assert self.faults == []

    def _run(self, call: Any) -> None:
        draw = random.Random(call.__name__)  # noqa: S311 - the same names in each run
        while not self._has_ended.is_set():
            try:
                call(draw)
            except InputError as error:
                if "expected one of" not in str(error):
                    self.faults.append(repr(error))
                    return
                self.counts["refused"] += 1
                time.sleep(0.005)  # answers are slower
            except Exception as error:  # noqa: BLE001 - told by the thread of the test
                self.faults.append(repr(error))
                return

    def _call(self, draw: random.Random) -> None:
        name = draw.choice((None, *NAMES))
        answer = logits(self._pipeline, adapter=name)
        if not torch.equal(answer, self._made.answers[name]):
            found = [other for other, expected in self._made.answers.items() if torch.equal(answer, expected)]
            self.faults.append(f"an answer of {found}, expected {name}")
        self.counts[str(name)] += 1

    def _mixed(self, draw: random.Random) -> None:
        names = [draw.choice((None, *NAMES)) for _ in IDS]
        answer = logits(self._pipeline, adapter=names)
        for row, name in enumerate(names):
            torch.testing.assert_close(answer[row], self._made.answers[name][row], rtol=1e-5, atol=1e-5)
        self.counts["mixed"] += 1

    def _texts(self, draw: random.Random) -> None:
        """Calls of one sequence, which keep the adapters that it began with."""
        name = draw.choice(NAMES)
        with self._pipeline.sequence() as sequence:
            for _ in range(4):
                assert torch.equal(logits(sequence, adapter=name), self._made.answers[name])
        self.counts["sequences"] += 1


@pytest.mark.parametrize("rounds", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_drawn_loads_and_unloads_under_load(pipeline: Any, made: Made, rounds: int) -> None:
    draw, load = random.Random(rounds), Load(pipeline, made)  # noqa: S311 - the same names in each run
    kinds = (*NAMES, "None", "mixed", "sequences", "refused")
    with load.running():
        end_time = time.monotonic() + 60
        while (rounds > 0 or not all(load.counts[kind] for kind in kinds)) and time.monotonic() < end_time:
            name, rounds = draw.choice(NAMES), rounds - 1
            if name in pipeline.adapters:
                pipeline.unload_adapter(name)
            else:
                pipeline.load_adapter(made.folder / name)
    print(f"{dict(load.counts)}")  # noqa: T201 - shown if the test fails
    assert all(load.counts[kind] for kind in kinds)


@pytest.mark.process
def test_processes_that_are_started_again_have_the_adapters_that_were_loaded_last(made: Made, tmp_path: Path) -> None:
    for name in NAMES:
        shutil.copytree(made.folder / name, tmp_path / name)
    with stagepack.load(made.bundle, adapters=[tmp_path / "a"], processes=2, max_restarts=1) as pipeline:
        pipeline.load_adapter(tmp_path / "b")
        pipeline.load_adapter(tmp_path / "c")
        pipeline.unload_adapter("a")
        shutil.rmtree(tmp_path / "a")
        with pipeline.sequence() as sequence:
            assert torch.equal(logits(sequence, adapter="b"), made.answers["b"])
            os.kill(process_ids(pipeline)[1], signal.SIGKILL)
            wait_until(lambda: has_restarts(pipeline, 1))
            with pytest.raises(StageLostError):
                logits(sequence, adapter="b")
        check(pipeline, made, "b", "c")
        pipeline.load_adapter(made.folder / "a")
        check(pipeline, made, "b", "c", "a")


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.parametrize("takes_its_place", [True, False])
def test_processes_start_again_without_an_adapter_that_is_no_longer_there(
    takes_its_place: bool, made: Made, tmp_path: Path
) -> None:
    """Calls with other adapters and without one are answered as before: one folder does not end a server."""
    for name in ("a", "b"):
        shutil.copytree(made.folder / name, tmp_path / name)
    adapters = [tmp_path / "a", tmp_path / "b"]
    with stagepack.load(made.bundle, adapters=adapters, processes=2, max_restarts=1) as pipeline:
        expected: dict[str | None, torch.Tensor] = {chosen: logits(pipeline, adapter=chosen) for chosen in (None, "b")}
        shutil.rmtree(tmp_path / "a")
        if takes_its_place:
            shutil.copytree(made.folder / "b", tmp_path / "a")
        os.kill(process_ids(pipeline)[1], signal.SIGKILL)
        wait_until(lambda: pipeline.restart_count and not pipeline.lost)
        for chosen, answer in expected.items():
            assert torch.equal(logits(pipeline, adapter=chosen), answer)
        with pytest.raises(InputError, match="expected one of b, or None for none, found 'a'"):
            logits(pipeline, adapter="a")
        pipeline.load_adapter(made.folder / "a")
        assert not torch.equal(logits(pipeline, adapter="a"), expected["b"])


@pytest.mark.parametrize("options", [{"copy": True}, {"stream": True}])
def test_an_update_of_a_pipeline_that_takes_adapters_frees_the_weights_before(
    options: dict[str, Any], made: Made, tmp_path: Path
) -> None:
    state = {name: tensor + 0.5 for name, tensor in make_model("llama").state_dict().items()}
    delta = stagepack.delta(made.bundle, state, out=tmp_path / "step")
    pipeline = stagepack.load(made.bundle, adapters=[], **options)
    logits(pipeline)
    weights = [weakref.ref(next(stage.parameters())) for stage in pipeline.stages]
    pipeline.load_adapter(made.folder / "a")
    pipeline.unload_adapter("a")
    pipeline.update(delta)
    gc.collect()
    assert [weight() for weight in weights] == [None] * len(weights)
    logits(pipeline)


def test_a_stage_that_takes_adapters_is_compiled_by_its_caller(made: Made) -> None:
    stage = stagepack.load_stage(made.bundle, 0, adapters=[])
    inputs = {"input_ids": IDS, "attention_mask": MASK}
    values = {name: inputs[name] for name in made.bundle.stages[0].inputs}
    for found, expected in zip(torch.compile(stage, backend="eager")(**values), stage(**values), strict=True):
        assert torch.equal(found, expected)


def test_loads_leave_no_memory(made: Made, pipeline: Any, tmp_path: Path) -> None:
    """Adapters of 2 MB, of several modules and ranks; after the first ones, memory stays as it is."""
    model = make_model("llama")
    modules = [name for name, _ in model.named_modules() if name.endswith("_proj")]
    folders = []
    for number in range(10):
        ranks = {modules[number]: 3000 + number, "lm_head": 3000}
        lora = write_lora(model, tmp_path / f"lora-{number}", ranks, number)
        folders.append(stagepack.write_adapter(made.bundle, lora, out=tmp_path / f"r{number}").path)
    processes = process_ids(pipeline).values() if isinstance(pipeline, DistributedPipeline) else [os.getpid()]

    def bytes_after(rounds: int) -> int:
        for number in range(rounds):
            name = pipeline.load_adapter(folders[number % len(folders)])
            logits(pipeline, adapter=name)
            pipeline.unload_adapter(name)
        return sum(memory_bytes(process, "VmRSS") for process in processes)

    first = bytes_after(20)
    assert bytes_after(50) < first + 15_000_000
