"""`--eval` and `--train` set the mode of a model before it is captured; without them it keeps its own."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import stagepack
from tests.hostile.attack import command_fails, run

MODEL = """
import torch
import stagepack


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        return self.dropout(self.linear(x))

    def double(self, x):
        return 2 * self(x)


def net():
    return Net(), (torch.ones(2, 8),)


def evaluated():
    return Net().eval(), (torch.ones(2, 8),)


def both():
    return Net(), {name: stagepack.Inputs(args=(torch.ones(2, 8),)) for name in ("forward", "double")}


def program():
    return torch.export.export(Net(), (torch.ones(2, 8),))


def of_program():
    return program().module(), (torch.ones(2, 8),)
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(MODEL)
    return tmp_path


def _drops(bundle_path: str = "m") -> bool:
    """Whether the stages of a bundle drop values."""
    bundle = stagepack.open(bundle_path)
    graphs = [bundle.select(entry_point.name).graph(0) for entry_point in bundle.entry_points]
    trains = {
        True in node.args
        for graph in graphs
        for node in graph.nodes
        if graph.ops[node.op].name == "aten.dropout.default"
    }
    assert len(trains) == 1
    return trains.pop()


@pytest.mark.parametrize(
    ("source", "options", "drops"),
    [
        ("net.py:net", [], True),
        ("net.py:net", ["--eval"], False),
        ("net.py:evaluated", [], False),
        ("net.py:evaluated", ["--train"], True),
        ("net.py:net", ["--train", "--eval"], False),
        ("net.py:both", ["--eval"], False),
        ("net.py:net", ["--eval", "--strict"], False),
        ("net.py:net", ["--eval", "--weights", "net.safetensors"], False),
        ("net.py:net", ["--eval", "--part", "dropout"], False),
        ("net.py:Net", ["--eval", "--input", "x=float32[batch=1..8,8]"], False),
    ],
)
def test_the_mode_is_set_before_the_capture(source: str, options: list[str], drops: bool, folder: Path) -> None:
    save_file({"linear.weight": torch.eye(8), "linear.bias": torch.zeros(8)}, "net.safetensors")
    done = run("export", source, *options, "-o", "m")
    assert done.exit_code == 0, done.output
    assert _drops() is drops
    assert ("is exported in training mode" in done.stderr) is drops
    assert ("Call model.eval() before the export (--eval)" in done.stderr) is drops


def test_doctor_and_plan_take_the_mode(folder: Path) -> None:
    for command in (["doctor"], ["plan", "--stages", "1"]):
        assert "training mode" not in run(*command, "net.py:net", "--eval").stderr
    assert "is exported in training mode" in run("doctor", "net.py:evaluated", "--train").stderr


def test_a_hugging_face_folder_has_a_mode(folder: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    transformers.BertModel(config).save_pretrained("bert")
    for options, drops in (([], False), (["--eval"], False), (["--train"], True)):
        done = run("export", "bert", *options, "-o", "m", "--overwrite")
        assert done.exit_code == 0, done.output
        assert _drops() is drops


def test_what_has_no_mode_is_refused(folder: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(2, 3),)), "net.pt2")
    says = "an exported program is in the mode of its export: leave out --eval and --train"
    for command, source in (("export", "net.pt2"), ("export", "net.py:program"), ("doctor", "net.pt2")):
        out = ["-o", "m"] if command == "export" else []
        command_fails(command, source, "--eval", *out, says=f"{source}: {says}")
    says = "strict: an exported program is captured already"
    for source in ("net.pt2", "net.py:program"):
        command_fails("export", source, "--strict", "-o", "m", says=says)
    command_fails("export", "net.py:of_program", "--train", "-o", "m", says="has no other mode: leave out --train")
    assert "leave out inputs" in run("export", "bert", "--generate", "64", "--train", "-o", "m").stderr
