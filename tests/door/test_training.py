"""Training in one process, such as that of a debugger, and saving of loaded models whose weights were changed."""

from pathlib import Path

import pytest
import torch
from packaging.version import Version

import stagepack
from stagepack.errors import OptionError, OutputExistsError, UnsupportedError
from tests.door.model import EXAMPLE
from tests.train.models import NEEDS_TORCH
from tools.fork_server import run_forked

PROGRAM = """
import sys, torch, stagepack
for stages, schedule in ((1, "1f1b"), (2, "looped-bfs")):
    bundle = stagepack.recut(sys.argv[1], out=f"{sys.argv[2]}/{stages}", stages=stages)
    training = stagepack.train(bundle, torch.nn.functional.mse_loss, microbatches=1, schedule=schedule)
    x = torch.ones(3, 64)
    loss = training.step(x, target=torch.zeros_like(stagepack.load(bundle)(x)))
    print(stages, float(loss) > 0, all(parameter.grad is not None for parameter in training.parameters()))
    torch.distributed.destroy_process_group()
try:
    stagepack.train(bundle, torch.nn.functional.mse_loss, microbatches=1)
except stagepack.errors.OptionError as error:
    print(error)
"""


@NEEDS_TORCH
@pytest.mark.process
def test_one_process_trains_all_stages(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(PROGRAM)
    done = run_forked(str(exported[0]), str(tmp_path), script=script)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[:2] == ["1 True True", "2 True True"]
    assert "run torchrun --nproc-per-node 2 SCRIPT, or choose a schedule" in lines[2]


@pytest.mark.skipif(
    Version(torch.__version__) >= Version("2.13"), reason="needs an older torch: make test-torch TORCH=2.11.0"
)
def test_an_older_torch_is_refused(exported: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(UnsupportedError, match=r"stagepack\.train: expected torch 2\.13 or newer, found 2\.11"):
        stagepack.train(exported[0], torch.nn.functional.mse_loss, microbatches=1)


def test_a_pipeline_with_changed_weights_is_saved(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    pipeline = stagepack.load(exported[0])
    optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
    pipeline(EXAMPLE).square().mean().backward()
    optimizer.step()
    expected = pipeline(EXAMPLE).detach()
    assert not torch.equal(expected, exported[1])
    out = tmp_path / "tuned.stagepack"
    out.mkdir()
    with pytest.raises(OutputExistsError, match="choose another name"):
        stagepack.save(pipeline, out=out)
    out.rmdir()
    for overwrite in (False, True):
        saved = stagepack.save(pipeline, out=out, overwrite=overwrite)
        saved.verify(strict=True)
        assert torch.equal(stagepack.load(saved)(EXAMPLE), expected)
    with pytest.raises(OutputExistsError, match="in Python overwrite=True"):
        stagepack.save(pipeline, out=out)
    assert torch.equal(stagepack.load(exported[0])(EXAMPLE), exported[1])


def test_weights_that_cannot_be_changed_are_not_saved(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="expected a pipeline in PyTorch in this process"):
        stagepack.save(stagepack.load(exported[0], runtime="onnxruntime"), out=tmp_path / "m.stagepack")
