"""The examples, run as their pages say, against what the models answer here."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

import stagepack
from stagepack.examples.decoder import llama
from tests.sentence_models import HIDDEN, sentence_model, sentence_transformers
from tests.serve.servers import stagepack_server, triton_server, why_no_triton
from tests.zoo.architectures.encoders import minilm_folder
from tools.fork_server import run_forked

EXAMPLES = Path(__file__).parents[2] / "examples"


def export(source: str, out: Path, stages: int) -> Path:
    arguments = ["export", f"{source}:make", "--inputs", f"{source}:inputs", "-o", str(out), "--stages", str(stages)]
    run_forked(*arguments).check_returncode()
    return out


def run(client: str, *arguments: object) -> str:
    command = [sys.executable, str(EXAMPLES / f"{client}.py"), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def module(file_name: str) -> Any:
    spec = importlib.util.spec_from_file_location(file_name, EXAMPLES / f"{file_name}.py")
    assert spec is not None
    assert spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    return example


def test_embeddings(tmp_path: Path) -> None:
    sentences = ["how do i bake bread", "the bread", "stocks fell on monday ."]
    modules = sentence_transformers().sentence_transformer.modules
    model = sentence_model(tmp_path / "encoder", modules.Pooling(HIDDEN), modules.Normalize(), types=True)
    bundle = stagepack.export(model, out=tmp_path / "minilm.stagepack")
    with stagepack_server([bundle.path]) as server:
        printed = run("embed", f"127.0.0.1:{server.http}", bundle.path / "tokenizer.json", *sentences)
    similarities = [list(map(float, re.findall(r"-?\d+\.\d\d", line))) for line in printed.splitlines()]
    embeddings = model.encode(sentences)
    assert numpy.allclose(similarities, embeddings @ embeddings.T, atol=0.006)


@pytest.mark.slow
def test_images(tmp_path: Path) -> None:
    bundle = export(str(EXAMPLES / "resnet.py"), tmp_path / "resnet.stagepack", 2)
    picture = EXAMPLES.parent / "docs" / "soak.png"
    with stagepack_server([bundle]) as server:
        printed = run("classify", f"127.0.0.1:{server.grpc}", picture, picture)
    pixels = torch.from_numpy(module("classify").read_image(str(picture))).float()[None]
    with torch.no_grad():
        likely = stagepack.load(bundle)(pixel_values=pixels.repeat(2, 1, 1, 1))["logits"].softmax(1)[0]
    line = f"{picture}: class {likely.argmax()}, {likely.max():.1%}"
    assert printed.splitlines() == [line, line]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export("stagepack.examples.decoder", tmp_path_factory.mktemp("decoder") / "decoder.stagepack", 3)


def test_generation(decoder: Path) -> None:
    with stagepack_server([decoder]) as server:
        check_generation(server.grpc)


@pytest.mark.slow
def test_generation_in_triton(decoder: Path, tmp_path: Path) -> None:
    if reason := why_no_triton():
        pytest.skip(reason)
    run_forked("triton", str(decoder), "-o", str(tmp_path / "repository")).check_returncode()
    (tmp_path / "triton").mkdir()
    with triton_server(tmp_path / "repository", tmp_path / "triton") as server:
        check_generation(server.grpc)


def check_generation(port: int) -> None:
    """Two texts in turns are continued as transformers continues each."""
    beginnings = ["Once upon a time", "A cat"]
    printed = run("generate", f"127.0.0.1:{port}", 12, *beginnings)
    model: Any = llama()
    for line, beginning in zip(printed.splitlines(), beginnings, strict=True):
        prompt = torch.tensor([list(beginning.encode())])
        expected = model.generate(prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert list(map(int, line.split())) == expected[0].tolist()


@pytest.mark.slow
def test_fine_tuning(tmp_path: Path) -> None:
    """The commands of the page, but for the port."""
    section = (EXAMPLES / "README.md").read_text().split("## Fine-tuning")[1]
    export_command, train_command, serve_command, ask_command = re.findall(r"^    (.+)$", section, re.MULTILINE)
    (tmp_path / "MODEL").symlink_to(minilm_folder())
    (tmp_path / "examples").symlink_to(EXAMPLES)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "MPLBACKEND": "agg"}

    def run_shell(command: str) -> str:
        options: dict[str, Any] = {"cwd": tmp_path, "env": environment, "stdout": subprocess.PIPE, "text": True}
        return subprocess.run(["bash", "-c", command], check=True, **options).stdout

    run_shell(export_command)
    before, after = map(float, re.findall(r"(\d+\.\d)%", run_shell(train_command)))
    assert before < 20
    assert after > 90
    with Image.open(tmp_path / "curve.png") as curve:
        assert curve.width > 1000
    assert serve_command == "stagepack serve trained.stagepack &"
    with stagepack_server([tmp_path / "trained.stagepack"]) as server:
        answer = run_shell(ask_command.replace("127.0.0.1:8000", f"127.0.0.1:{server.http}"))
    assert "The valve of compressor four leaks, in the basement." in answer.splitlines()[1]
