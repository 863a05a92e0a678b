"""The ONNX files of a bundle in tools that know nothing of it: joined by onnx.compose, and opened by Netron."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy
import onnx
import onnx.compose
import onnxruntime
import pytest
import torch
import transformers

import stagepack
from stagepack.format.reader import Bundle
from tests.zoo.architectures.encoders import minilm_encoder_folder

_NETRON_DTYPES = {"bool": "boolean"}


def small_folder(folder: Path) -> str:
    """A model with the inputs and operators of MiniLM."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=1000)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module", params=["small", pytest.param("MiniLM", marks=pytest.mark.slow)])
def bert(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """An encoder in three stages."""
    folder = tmp_path_factory.mktemp("joined")
    source = small_folder(folder / "small") if request.param == "small" else minilm_encoder_folder()
    return stagepack.export(source, out=folder / "m.stagepack", stages=3, onnx=True)


def joined(bundle: Bundle) -> onnx.ModelProto:
    """All stages as one model; what several of them take, all get from one input."""
    models = [
        onnx.load(bundle.path / stage.onnx.model, load_external_data=False) for stage in bundle.stages if stage.onnx
    ]
    whole, results = models[0], [edge.name for edge in bundle.edges if not edge.consumers]
    for number, model in enumerate(models[1:], start=1):
        shared = {value.name for value in whole.graph.input} & {value.name for value in model.graph.input}
        renamed = {name: f"s{number}.{name}" for name in shared}
        for value in model.graph.input:
            value.name = renamed.get(value.name, value.name)
        for node in model.graph.node:
            node.input[:] = [renamed.get(name, name) for name in node.input]
        made = [value.name for value in whole.graph.output]
        given = [value.name for value in model.graph.input]
        later = {value.name for one in models[number + 1 :] for value in one.graph.input}
        kept = [name for name in made if name in later or name in results]
        whole = onnx.compose.merge_models(
            whole,
            model,
            io_map=[(name, name) for name in made if name in given],
            outputs=[*kept, *(value.name for value in model.graph.output)],
        )
        for name, other in renamed.items():
            for node in whole.graph.node:
                node.input[:] = [name if one == other else one for one in node.input]
        for value in [value for value in whole.graph.input if value.name in renamed.values()]:
            whole.graph.input.remove(value)
    return whole


def test_joined_they_answer_as_the_whole_model(bert: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(bert.path)  # where the checks of onnx.compose look for the weight files
    path = bert.path.with_name("joined.onnx")
    for name in bert.files:
        if name.endswith(".safetensors"):
            shutil.copy(bert.path / name, path.with_name(name))
    onnx.save(joined(bert), path)
    onnx.checker.check_model(path, full_check=True)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.name for value in session.get_inputs()] == ["input_ids", "attention_mask"]
    pipe = stagepack.load(bert)
    for batch, length in ((2, 7), (3, 12)):
        ids = torch.randint(0, 1000, (batch, length), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(ids)
        mask[0, length // 2 :] = 0
        with torch.no_grad():
            wanted = pipe(input_ids=ids, attention_mask=mask)
        found = session.run(None, {"input_ids": ids.numpy(), "attention_mask": mask.numpy()})
        for mine, theirs in zip(found, wanted.values(), strict=True):
            assert numpy.allclose(mine, theirs.numpy(), rtol=1e-3, atol=1e-4)


def test_each_stage_passes_the_checker(bert: Bundle) -> None:
    for number in range(3):
        onnx.checker.check_model(bert.path / f"stage-{number}.onnx", full_check=True)


@pytest.mark.skipif(
    shutil.which("node") is None, reason="Netron is a page of JavaScript: this needs node to open files with it"
)
def test_netron_opens_each_stage(bert: Bundle) -> None:
    spec = importlib.util.find_spec("netron")
    assert spec is not None
    assert spec.origin is not None
    files = [str(bert.path / f"stage-{number}.onnx") for number in range(3)]
    script = Path(__file__).with_name("netron_open.mjs")
    command = ["node", "--no-warnings", str(script), str(Path(spec.origin).parent), *files]
    shown = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert [one["inputs"] for one in shown] == [
        [
            [edge.name, f"{_NETRON_DTYPES.get(edge.dtype, edge.dtype)}[{','.join(map(str, edge.shape))}]"]
            for edge in bert.edges
            if number in edge.consumers
        ]
        for number in range(3)
    ]
    assert {one["format"] for one in shown} == {"ONNX v11"}
    models = [onnx.load(file, load_external_data=False) for file in files]
    assert [len(one["nodes"]) for one in shown] == [len(model.graph.node) for model in models]


def test_bytes_stay_within_two_percent(bert: Bundle) -> None:
    added = sum(file.size for file in bert.manifest.files if ".onnx" in file.name)
    assert added < 0.02 * sum(stage.weight_bytes for stage in bert.stages) + 3 * 200_000
