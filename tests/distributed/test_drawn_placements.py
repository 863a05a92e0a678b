"""Models that are cut by layers, on devices whose limits are drawn: right, inside of the stated memory, of their own files alone.

Processes on the CPU stand for devices.
"""

import contextlib
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
import torch
import transformers

import stagepack
from stagepack.errors import DeviceError
from stagepack.format.reader import Bundle
from stagepack.partition.placement import place
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.distributed import stage_process
from stagepack_loaders.distributed.process_launcher import LocalLauncher
from stagepack_loaders.distributed.stage_process import ProcessDescription
from tests.process_facts import memory_bytes
from tests.zoo.architectures.encoders import minilm_folder
from tools.fork_server import FORK_SERVER, ForkedProcess

_DRAWS = int(os.environ.get("STAGEPACK_DRAWN_PLACEMENTS", "200"))
_PARTS = (1, 2, 3, 5)
# For the code of the stages, and for what the allocators and the kernels of a processor keep.
_SLACK_BYTES = 64 * 2**20


def _llama() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.LlamaConfig(
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2000,
    )
    return transformers.LlamaForCausalLM(config), {"input_ids": torch.arange(48).reshape(2, 24), "use_cache": False}


def _resnet() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512], layer_type="basic")
    return transformers.ResNetModel(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def _t5() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.T5Config(
        d_model=256, d_ff=1024, num_layers=4, num_decoder_layers=4, num_heads=4, d_kv=64, vocab_size=2000
    )
    ids = torch.arange(24).reshape(2, 12)
    model = transformers.T5ForConditionalGeneration(config)
    return model, {"input_ids": ids, "decoder_input_ids": ids[:, :6], "use_cache": False}


def _mixture() -> tuple[torch.nn.Module, dict[str, Any]]:
    config = transformers.MixtralConfig(
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        vocab_size=1000,
    )
    return transformers.MixtralForCausalLM(config), {"input_ids": torch.arange(32).reshape(2, 16), "use_cache": False}


def _minilm() -> tuple[torch.nn.Module, dict[str, Any]]:
    ids = torch.arange(1000, 1024).reshape(2, 12)
    module = transformers.AutoModel.from_pretrained(minilm_folder())
    return module, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


_MODELS: dict[str, Callable[[], tuple[torch.nn.Module, dict[str, Any]]]] = {
    "llama": _llama,
    "resnet": _resnet,
    "t5": _t5,
    "mixture": _mixture,
    "minilm": _minilm,
}


@pytest.fixture(scope="module", params=list(_MODELS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, dict[str, Any]]:
    """A bundle with a stage for each layer, and its inputs."""
    torch.manual_seed(0)
    module, inputs = _MODELS[request.param]()
    out = tmp_path_factory.mktemp("drawn") / f"{request.param}.stagepack"
    return stagepack.export(module.eval(), kwargs=inputs, out=out, stages="layers"), inputs


def _run_recorded(content: bytes, folder: str) -> None:
    """Run the stages of a process, and record the files that it opens."""
    torch.set_num_threads(1)
    opened = Path(folder, str(os.getpid())).open("a")  # noqa: SIM115 - open as long as the process

    def record(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str):
            opened.write(arguments[0] + "\n")
            opened.flush()

    sys.addaudithook(record)
    stage_process.run_process(msgspec.json.decode(content, type=ProcessDescription))


@pytest.fixture
def recorded_files(tmp_path: Path) -> Iterator[Path]:
    """Where each process that is started writes the names of the files that it opens."""

    def launch(_: LocalLauncher, description: ProcessDescription) -> Any:
        arguments = (msgspec.json.encode(description), str(tmp_path))
        return ForkedProcess(FORK_SERVER.Process(target=_run_recorded, args=arguments, daemon=True))

    with patch.object(LocalLauncher, "_launch", launch):
        yield tmp_path


def _draw_memory(bundle: Bundle, count: int, draw: random.Random) -> list[int]:
    """Drawn limits into which the stages fit."""
    while True:
        whole, *_ = place(bundle.entry_point, [TargetDevice(name="cpu")], files=bundle.files.values()).parts
        memory = [round(whole.memory * draw.uniform(0.1, 1.1)) for _ in range(count)]
        devices = [TargetDevice(name="cpu", memory=size) for size in memory]
        with contextlib.suppress(DeviceError):
            place(bundle.entry_point, devices, files=bundle.files.values())
            return memory


@pytest.mark.slow
@torch.no_grad()
def test_drawn_devices(model: tuple[Bundle, dict[str, Any]], recorded_files: Path) -> None:
    bundle, inputs = model
    # A process without weights and activations worth mentioning, which has the memory of what it has imported.
    tiny = stagepack.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),), out=recorded_files / "tiny.stagepack")
    with stagepack.load(tiny, processes=1, copy=True) as pipeline:
        pipeline(torch.ones(1, 1))
        base_bytes = memory_bytes(pipeline.stage_facts[0].process_id)
    draw = random.Random(bundle.path.name)  # noqa: S311 - the same draws in each run
    expected = torch.utils._pytree.tree_leaves(stagepack.load(bundle)(**inputs))
    graph_and_weight_files = {name for stage in bundle.stages for name in (stage.graph, *stage.weights)}
    most_excess = -(2**62)
    for number in range(_DRAWS // len(_MODELS)):
        part_count = min(_PARTS[number % len(_PARTS)], len(bundle.stages))
        memory = _draw_memory(bundle, part_count, draw)
        with stagepack.load(bundle, processes=part_count, memory=memory, copy=True) as pipeline:
            found = torch.utils._pytree.tree_leaves(pipeline(**inputs))
            assert all(torch.equal(value, other) for value, other in zip(found, expected, strict=True))
            parts, facts = pipeline.placement.parts, pipeline.stage_facts
            assert len(parts) == len(facts) <= part_count
            for part, fact in zip(parts, facts, strict=True):
                assert part.memory <= int(part.device.memory or 0) in memory
                most_excess = max(most_excess, memory_bytes(fact.process_id) - base_bytes - part.memory)
                own_files = {
                    name
                    for stage in bundle.stages[part.stages[0] : part.stages[-1] + 1]
                    for name in (stage.graph, *stage.weights)
                }
                opened = {Path(line).name for line in (recorded_files / str(fact.process_id)).read_text().splitlines()}
                assert own_files <= opened | own_files
                assert not opened & (graph_and_weight_files - own_files)
    print(f"{bundle.path.name}: at most {most_excess / 2**20:.0f} MiB more than stated")  # noqa: T201 - shown by pytest -rP
    assert most_excess < _SLACK_BYTES
