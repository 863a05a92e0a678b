"""Compiled at the first call and ahead of time: each distinct region once, with the answers of the model."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from torch._dynamo.utils import counters

import stagepack
from stagepack.cli import main
from stagepack.errors import CompiledError, OutputExistsError
from stagepack.format.reader import Bundle
from stagepack_loaders.torch.compilation import compile_ahead

# One worker, so that the bundle is compiled once.
pytestmark = [pytest.mark.process, pytest.mark.xdist_group("compiled")]


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(8)
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        hidden = torch.nn.functional.silu(self.up(self.norm(x))).view(x.shape[0], x.shape[1], 2, 8).sum(2)
        return x + torch.tanh(self.down(torch.cat([hidden, hidden], -1)) * scale).relu()


class Stack(torch.nn.Module):
    """Blocks, with something before and after them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block() for _ in range(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = x.mean(1, keepdim=True).transpose(1, 2).expand(-1, -1, x.shape[1]).transpose(1, 2)
        for block in self.blocks:
            x = block(x, scale)
        return x.softmax(-1)


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stack, Bundle]:
    """The model, and its bundle of two stages with four blocks each."""
    torch.manual_seed(0)
    model = Stack().eval()
    batch, length = torch.export.Dim("batch", min=1, max=64), torch.export.Dim("length", min=2, max=64)
    bundle = stagepack.export(
        model,
        (torch.randn(2, 3, 8),),
        out=tmp_path_factory.mktemp("stack") / "stack.stagepack",
        split_at=["blocks.4"],
        dynamic_shapes={"x": {0: batch, 1: length}},
    )
    return model, bundle


@pytest.fixture(scope="module")
def compiled(stack: tuple[Stack, Bundle], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle compiled ahead of time."""
    out = tmp_path_factory.mktemp("compiled") / "stack.compiled"
    done = CliRunner().invoke(main, ["compile", str(stack[1].path), "-o", str(out)], catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 of 1 units" in done.output
    return out


def inputs() -> list[torch.Tensor]:
    """At the sizes of the example and at others, and one that is not contiguous."""
    return [torch.randn(2, 3, 8), torch.randn(5, 9, 8), torch.randn(1, 2, 8), torch.randn(8, 4, 3).permute(2, 1, 0)]


@pytest.mark.slow
@torch.no_grad()
def test_a_region_of_several_stages_is_compiled_once(stack: tuple[Stack, Bundle]) -> None:
    model, bundle = stack
    torch._dynamo.reset()
    counters.clear()
    pipe = stagepack.load(bundle, compile=True)
    for number, x in enumerate(inputs()):
        torch.testing.assert_close(pipe(x), model(x))
        if number <= 1:  # torch compiles a size of 1 and other strides anew
            assert counters["stats"]["unique_graphs"] == 1
    assert pipe.state_dict().keys() == model.state_dict().keys()


@torch.no_grad()
def test_a_stage_is_compiled_as_a_whole(stack: tuple[Stack, Bundle]) -> None:
    bundle = stack[1]
    torch._dynamo.reset()
    first = stagepack.load_stage(bundle, 0, compile="whole")
    plain = stagepack.load_stage(bundle, 0)
    x = torch.randn(2, 3, 8)
    for found, wanted in zip(first(x), plain(x), strict=True):
        torch.testing.assert_close(found, wanted)


@pytest.mark.slow
def test_stages_in_processes_run_compiled(stack: tuple[Stack, Bundle], compiled: Path) -> None:
    calls = inputs()
    with torch.no_grad():
        expected = [stagepack.load(stack[1], compiled=compiled)(x) for x in calls]
    with stagepack.load(stack[1], compiled=compiled, processes=True) as pipeline:
        for x, y in zip(calls, expected, strict=True):
            assert torch.equal(pipeline(x), y)


@torch.no_grad()
def test_what_was_compiled_ahead_answers_at_all_sizes(stack: tuple[Stack, Bundle], compiled: Path) -> None:
    model, bundle = stack
    assert sorted(path.suffix for path in compiled.iterdir()) == [".json", ".pt2"]
    pipe = stagepack.load(bundle, compiled=compiled)
    for x in inputs():
        torch.testing.assert_close(pipe(x), model(x))
    stage = stagepack.load_stage(bundle, 1, compiled=compiled)
    given = stagepack.load_stage(bundle, 0)(torch.randn(4, 7, 8))
    torch.testing.assert_close(stage(*given), stagepack.load_stage(bundle, 1)(*given))


def test_the_command_runs_what_was_compiled_ahead(stack: tuple[Stack, Bundle], compiled: Path) -> None:
    args = ["load", str(stack[1].path), "--compiled", str(compiled), "--json"]
    done = CliRunner().invoke(main, args, catch_exceptions=False)
    facts = json.loads(done.output)
    assert facts["difference"] < 1e-5
    assert list(facts["start"]) == ["open", "import torch", "graphs", "compile", "weights", "inputs", "first call"]


def test_code_of_something_else_is_refused(stack: tuple[Stack, Bundle], compiled: Path, tmp_path: Path) -> None:
    bundle = stack[1]
    other = stagepack.recut(bundle, out=tmp_path / "other.stagepack", stages=1)
    says = f"was compiled from the bundle {bundle.digest}, and this bundle is {other.digest}"
    with pytest.raises(CompiledError, match=says):
        stagepack.load(other, compiled=compiled)
    with pytest.raises(CompiledError, match="expected a folder that stagepack compile wrote"):
        stagepack.load(bundle, compiled=tmp_path)
    with pytest.raises(OutputExistsError, match="exists"):
        compile_ahead(bundle, compiled)


def test_code_of_the_stages_is_not_that_of_joined_ones(stack: tuple[Stack, Bundle], compiled: Path) -> None:
    with pytest.raises(
        CompiledError,
        match=r"stages are joined here: name one device for all, .*--compile",
    ):
        stagepack.load(stack[1], devices=["cpu"], stages_per_device=[2], compiled=compiled)


@pytest.mark.parametrize(
    ("field", "value"), [("device", "cuda"), ("arch", "linux sparc"), ("torch_version", "1.0.0+cpu")]
)
def test_code_for_another_target_is_refused(
    stack: tuple[Stack, Bundle], compiled: Path, tmp_path: Path, field: str, value: str
) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(compiled, changed)
    listed = json.loads((changed / "compiled.json").read_text())
    listed["target"][field] = value
    (changed / "compiled.json").write_text(json.dumps(listed))
    says = f"was compiled for .*{value.split('+')[0]}.*, and this machine is cpu .*: compile the bundle here"
    with pytest.raises(CompiledError, match=says):
        stagepack.load(stack[1], compiled=changed)


def test_damaged_code_is_refused(stack: tuple[Stack, Bundle], compiled: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(compiled, changed)
    [file] = changed.glob("*.pt2")
    file.write_bytes(file.read_bytes() + b"x")
    for damage in (lambda: None, file.unlink):
        damage()
        with pytest.raises(CompiledError, match="is missing or was changed"):
            stagepack.load(stack[1], compiled=changed)


@pytest.mark.slow
def test_code_with_its_own_cpp_library_is_refused(tmp_path: Path) -> None:
    """A process that loads such code ends by SIGSEGV."""
    compiler, out = tmp_path / "c++", tmp_path / "linear.compiled"
    compiler.write_text(
        '#!/bin/sh\ncase " $* " in *" -shared "*) exec g++ "$@" -static-libstdc++;; *) exec g++ "$@";; esac\n'
    )
    compiler.chmod(0o755)
    bundle = stagepack.export(torch.nn.Linear(4, 4).eval(), (torch.zeros(2, 4),), out=tmp_path / "b.stagepack")
    command = [sys.executable, "-m", "stagepack", "compile", str(bundle.path), "-o", str(out), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ | {"CXX": str(compiler)})
    assert f"{compiler} links the C++ library into the code" in done.stdout
    assert [path.name for path in out.iterdir()] == ["compiled.json"]
    assert stagepack.load(bundle, ["cpu"], compiled=out)(torch.zeros(2, 4)).shape == (2, 4)
