"""A training writes its steps as deltas: each process those of its own weights, with the bytes that one process writes."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import CaptureError
from stagepack.roads.training_delta import writer_of_files
from tests.train.models import NOISY, TIED, TiedLanguageModel, tied_shapes
from tests.train.processes import run_workers
from tests.train.written_weights import DELTA_STEPS

pytestmark = pytest.mark.xdist_group("train")


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.process
@pytest.mark.parametrize("run", ["tied:2:1f1b:4", "tied:4:interleaved-zero-bubble:4"])
def test_deltas_of_processes_are_those_of_the_saved_bundle(tmp_path: Path, run: str) -> None:
    """Stage by stage, with weights that several stages share; and where the bundle is cut otherwise than the one that is trained."""
    stages = int(run.split(":")[1])
    own = TIED.export(tmp_path / "own.stagepack", stages=stages)
    stagepack.recut(own, out=tmp_path / "other.stagepack", stages=3)
    args, _ = TIED.batch(0, 8)
    wide = TiedLanguageModel().double()
    wide.layers[0] = torch.nn.Sequential(torch.nn.Linear(16, 16).double())
    stagepack.export(wide.train(), args, out=tmp_path / "wide.stagepack", dynamic_shapes=tied_shapes())
    run_workers(2, "deltas", tmp_path, run)
    for cut in ("own", "other"):
        base, deltas = stagepack.open(tmp_path / f"{cut}.stagepack"), []
        for number in range(DELTA_STEPS):
            saved = stagepack.load(tmp_path / f"{number}.stagepack").state_dict()
            out = tmp_path / f"{cut}-{number}.expected"
            expected = stagepack.delta(base, saved, out=out, version=f"step {number}")
            written = tmp_path / f"{cut}-{number}.delta"
            assert contents(written) == contents(expected.path)
            deltas.append(written)
            base = stagepack.open(tmp_path / f"{cut}.stagepack", deltas=deltas)
        last = stagepack.load(tmp_path / f"{DELTA_STEPS - 1}.stagepack")
        with torch.no_grad():
            answers = (pipeline(*args) for pipeline in (stagepack.load(base), last))
            torch.testing.assert_close(*answers, rtol=0, atol=0)
    # The bytes of the weights are also those in the delta of the two bundles, which has the recorded example beside them.
    whole = stagepack.delta(own, tmp_path / "0.stagepack", out=tmp_path / "whole.delta")
    weights = {
        name: content for name, content in contents(tmp_path / "own-0.delta").items() if name.endswith(".changes")
    }
    assert weights
    assert contents(whole.path).items() >= weights.items()


def test_one_process_writes_its_steps_too(one_process: None, tmp_path: Path) -> None:
    bundle = TIED.export(tmp_path / "m.stagepack", stages=2)
    training = stagepack.train(bundle, TIED.loss, microbatches=2, schedule="looped-bfs")
    with torch.no_grad():
        for parameter in training.parameters():
            parameter[..., 0] += 1
    delta = stagepack.delta(bundle, training, out=tmp_path / "1.delta")
    state = {name: tensor.clone() for name, tensor in training.own_weights()}
    expected = stagepack.delta(bundle, state, out=tmp_path / "expected.delta")
    assert contents(delta.path) == contents(expected.path)
    training.close()


@pytest.mark.filterwarnings("ignore::stagepack.errors.MicrobatchWarning")
def test_statistics_that_are_zeros_in_the_bundle_are_refused(one_process: None, tmp_path: Path) -> None:
    bundle = NOISY.export(tmp_path / "m.stagepack", stages=2)
    training = stagepack.train(bundle, NOISY.loss, microbatches=4, schedule="looped-bfs")
    args, target = NOISY.batch(0, 4)
    training.step(*args, target=target)
    with pytest.raises(CaptureError, match="is zeros in the graph, which stores none of its bytes"):
        stagepack.delta(bundle, training, out=tmp_path / "1.delta")
    assert [path.name for path in tmp_path.iterdir()] == ["m.stagepack"]
    training.close()


def test_each_weight_file_is_written_by_one_process() -> None:
    files = {"stage-0": ["a", "b"], "stage-1": ["c"], "shared-0": ["d"], "mixed": ["a", "c", "e"], "none": []}
    names = [{"a", "b", "d"}, {"c", "d", "e"}, set[str]()]
    expected = {"stage-0": 0, "stage-1": 1, "shared-0": 0, "mixed": 1, "none": 0}
    assert writer_of_files(files, names) == expected
