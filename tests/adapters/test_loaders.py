"""Adapters in the loaders of parts, compiled stages, and stages whose weights come while they run."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import stagepack
from stagepack.errors import InputError, OptionError
from stagepack.format.reader import Bundle
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import IDS, MASK, export_model, logits, make_model
from tests.distributed.launchers import TORCHRUN
from tools.fork_server import run_forked

RANKS = {
    "first": {"model.layers.0.self_attn.q_proj": 4, "model.layers.1.mlp.up_proj": 2, "lm_head": 3},
    "second": {"model.layers.0.self_attn.q_proj": 7, "model.embed_tokens": 3},
}
NAMES = [None, *RANKS]
ROWS = ["second", None, "first"]


class Adapted:
    """A Llama in four stages with two adapters, and its answers with each of them."""

    def __init__(self, folder: Path) -> None:
        model = make_model("llama")
        self.bundle: Bundle = export_model(model, folder, stages=4)
        self.adapters: dict[str, Path] = {}
        self.expected: dict[str | None, torch.Tensor] = {None: logits(model)}
        for seed, (name, ranks) in enumerate(RANKS.items()):
            lora = write_lora(model, folder / f"lora-{name}", ranks, seed)
            self.adapters[name] = stagepack.write_adapter(self.bundle, lora, out=folder / name).path
            with adapted(model, lora):
                self.expected[name] = logits(model)

    def rows(self, names: list[str | None]) -> torch.Tensor:
        """The answers of rows with these adapters."""
        return torch.stack([self.expected[name][row] for row, name in enumerate(names)])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Adapted:
    return Adapted(tmp_path_factory.mktemp("adapted"))


def call_stages(bundle: Bundle, stages: list[Any], **adapter: Any) -> torch.Tensor:
    """Call the stages of a whole model one by one, each by the names of its inputs."""
    values: dict[str, Any] = dict(zip((edge.name for edge in bundle.entry_point.inputs), (IDS, MASK), strict=True))
    for entry, stage in zip(bundle.stages, stages, strict=True):
        with torch.no_grad():
            outputs = stage(**{name: values[name] for name in entry.inputs}, **adapter)
        values |= dict(zip(entry.outputs, outputs, strict=True))
    found: torch.Tensor = outputs[0]
    return found


def test_stages_that_are_loaded_one_by_one_run_the_adapter_of_a_call(llama: Adapted) -> None:
    stages = [
        stagepack.load_stage(llama.bundle, number, adapters=llama.adapters)
        for number in range(len(llama.bundle.stages))
    ]
    for name in NAMES:
        assert torch.equal(call_stages(llama.bundle, stages, adapter=name), llama.expected[name])
    assert torch.equal(call_stages(llama.bundle, stages), llama.expected[None])
    mixed = call_stages(llama.bundle, stages, adapter=ROWS)
    torch.testing.assert_close(mixed, llama.rows(ROWS), rtol=1e-5, atol=1e-5)
    assert torch.equal(mixed[1], llama.expected[None][1])


def test_stages_that_are_joined_run_the_adapter_of_a_call(llama: Adapted) -> None:
    whole = stagepack.load_stage(llama.bundle, stages=range(4), adapters=[*llama.adapters.values()])
    for name in NAMES:
        with torch.no_grad():
            assert torch.equal(whole(IDS, MASK, adapter=name)[0], llama.expected[name])
    for call, says in (
        ({"adapter": "third"}, "expected one of first, second, or None for none, found 'third'"),
        ({"adapter": ["first"]}, "expected 3, one for each row, found 1 names"),
        ({"adapter.rows": torch.ones(3, dtype=torch.int64)}, "expected the inputs input_ids, attention_mask"),
    ):
        with pytest.raises(InputError, match=says):
            whole(IDS, MASK, **call)
    with pytest.raises(InputError, match="expected the inputs input_ids, attention_mask, found 3 by position"):
        whole(IDS, MASK, torch.ones(3, dtype=torch.int64))
    with pytest.raises(OptionError, match="adapters excludes modules"):
        stagepack.load_stage(llama.bundle, 0, adapters=llama.adapters, modules=True)


@pytest.mark.parametrize("options", [{"stream": True}, {"stream": True, "verify": "off"}, {"device_memory": None}])
@pytest.mark.parametrize("devices", [["cpu"], ["cpu", "cpu"]])
def test_weights_that_come_while_the_stages_run_have_the_same_bits(
    options: dict[str, Any], devices: list[str], llama: Adapted
) -> None:
    if "device_memory" in options:
        weight_bytes = sum(stage.weight_bytes for stage in llama.bundle.stages)
        options = {"device_memory": weight_bytes // 2 + 20_000}
    for names in (NAMES, NAMES[::-1]):
        pipeline = stagepack.load(llama.bundle, devices, adapters=llama.adapters, **options)
        for name in [*names, *names]:
            assert torch.equal(logits(pipeline, adapter=name), llama.expected[name])
        mixed = logits(pipeline, adapter=ROWS)
        torch.testing.assert_close(mixed, llama.rows(ROWS), rtol=1e-5, atol=1e-5)
    if "device_memory" in options:
        assert sum(stage.residency.streamed_bytes for stage in pipeline.stages) > 0
        with pytest.raises(TypeError, match="a stage with device_memory cannot be copied"):
            copy.deepcopy(pipeline)
    else:
        copied = copy.deepcopy(pipeline)
        assert torch.equal(logits(copied, adapter="first"), llama.expected["first"])


def test_adapters_take_a_part_of_the_memory_of_the_device(llama: Adapted) -> None:
    def resident_bytes(memory: int, **options: Any) -> tuple[int, int]:
        """The bytes that stay, and those that pass through."""
        stages: list[Any] = list(stagepack.load(llama.bundle, device_memory=memory, **options).stages)
        return sum(stage.residency.resident_bytes for stage in stages), sum(
            stage.residency.streamed_bytes for stage in stages
        )

    weights, _ = resident_bytes(10**9)
    tensors = [load_file(path / "adapter.safetensors") for path in llama.adapters.values()]
    adapters = sum(tensor.nbytes for file in tensors for tensor in file.values())
    assert resident_bytes(10**9, adapters=llama.adapters) == (weights + adapters, 0)
    assert resident_bytes(weights) == (weights, 0)
    assert resident_bytes(weights + adapters, adapters=llama.adapters) == (weights + adapters, 0)
    staying, passing = resident_bytes(weights, adapters=llama.adapters)
    assert staying + passing == weights + adapters
    assert passing >= adapters
    with pytest.raises(OptionError, match="device_memory: the weights need at least"):
        stagepack.load(llama.bundle, device_memory=adapters, adapters=llama.adapters)


@pytest.mark.parametrize("mode", [True, pytest.param("whole", marks=pytest.mark.slow)])
def test_compiled_stages_run_adapters(mode: Any, llama: Adapted) -> None:
    pipeline = stagepack.load(llama.bundle, adapters=llama.adapters, compile=mode)
    plain = logits(stagepack.load(llama.bundle, compile=mode))
    assert torch.equal(logits(pipeline), plain)
    for name in RANKS:
        torch.testing.assert_close(logits(pipeline, adapter=name), llama.expected[name], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(logits(pipeline, adapter=ROWS), llama.rows(ROWS), rtol=1e-5, atol=1e-5)


CONNECTING = """
import os, sys, torch
from safetensors.torch import save_file
from stagepack.distributed import connect
from tests.adapters.models import logits

bundle, answers, *adapters = sys.argv[1:]
if len(adapters) == 3:  # the last process has other ones
    adapters = adapters[:2] if os.environ["RANK"] == "0" else adapters[1:]
pipeline = connect(bundle, adapters=adapters)
if pipeline is not None:
    with pipeline:
        rows = {"first": "first", "rows": ["second", None, "first"], "none": None}
        save_file({name: logits(pipeline, adapter=adapter).contiguous() for name, adapter in rows.items()}, answers)
"""


@pytest.mark.process
@pytest.mark.slow
def test_processes_of_torchrun_run_the_same_adapters(llama: Adapted, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CONNECTING)
    words = ["--standalone", "--nproc-per-node", "2", str(tmp_path / "script.py"), str(llama.bundle.path)]
    words += [str(tmp_path / "answers"), *map(str, llama.adapters.values())]
    finished = run_forked(*words, script=TORCHRUN)
    assert finished.returncode == 0, finished.stderr
    answers = load_file(tmp_path / "answers")
    assert torch.equal(answers["first"], llama.expected["first"])
    assert torch.equal(answers["none"], llama.expected[None])
    torch.testing.assert_close(answers["rows"], llama.rows(ROWS), rtol=1e-5, atol=1e-5)
    refused = run_forked(*words, f"third={llama.adapters['first']}", script=TORCHRUN)
    assert refused.returncode != 0
    assert "expected one list of adapters, by name and digest, in all processes: rank 0" in refused.stderr
