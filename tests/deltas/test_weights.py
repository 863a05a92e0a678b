"""A delta is made of tensors or a checkpoint: the next version is never written."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.state_dict_saver import save as save_distributed

import stagepack
from stagepack.errors import CaptureError, OptionError
from tests.deltas.conftest import Versions

State = dict[str, torch.Tensor]


def as_mapping(state: State, folder: Path) -> State:
    return state


def as_safetensors(state: State, folder: Path) -> Path:
    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def as_distributed(state: State, folder: Path) -> Path:
    save_distributed(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


@pytest.mark.parametrize("source", [as_mapping, as_safetensors, as_distributed])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_weights_become_the_next_version(
    versions: Versions, tmp_path: Path, source: Callable[[State, Path], State | Path]
) -> None:
    state = versions.model("b").state_dict()
    delta = stagepack.delta(versions.a, source(state, tmp_path), out=tmp_path / "b.delta", version="b")
    bundle = stagepack.apply_deltas(versions.a, [delta], out=tmp_path / "b.stagepack")
    bundle.verify(strict=True)
    expected = stagepack.open(versions.b)
    assert bundle.example is None
    assert bundle.files == {name: entry for name, entry in expected.files.items() if name != "example.safetensors"}
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(stagepack.load(versions.a, deltas=[delta])(x), versions.model("b")(x))
    composed = stagepack.open(versions.a, deltas=[delta])
    again = stagepack.delta(composed, versions.model("c").state_dict(), out=tmp_path / "c.delta")
    with torch.no_grad():
        assert torch.equal(stagepack.load(versions.a, deltas=[delta, again])(x), versions.model("c")(x))


def test_only_files_with_changes_are_in_the_delta(versions: Versions, tmp_path: Path) -> None:
    first = stagepack.delta(versions.a, versions.model("a").state_dict(), out=tmp_path / "same.delta")
    assert first.document.changed == ()
    model = versions.model("a")
    with torch.no_grad():
        model[3].bias[1] = 5.0  # type: ignore[index]
    delta = stagepack.delta(versions.a, model.state_dict(), out=tmp_path / "one.delta")
    assert [delta.changed_tensors(file_name) for file_name in delta.changed_files] == [("3.bias",)]
    bundle = stagepack.open(versions.a, deltas=[delta])
    assert [bundle.changed_tensors(file_name) for file_name in delta.changed_files] == [["3.bias"]]


def test_a_buffer_that_is_zeros_no_more_is_refused(tmp_path: Path) -> None:
    model = torch.nn.BatchNorm1d(3).eval()
    stagepack.export(model, (torch.ones(2, 3),), out=tmp_path / "m.stagepack")
    assert model.running_mean is not None
    model.running_mean.fill_(1.0)
    with pytest.raises(CaptureError, match="running_mean is zeros in the graph"):
        stagepack.delta(tmp_path / "m.stagepack", model.state_dict(), out=tmp_path / "m.delta")


def test_weights_that_do_not_fit_are_refused(versions: Versions, tmp_path: Path) -> None:
    state = versions.model("b").state_dict()
    cases = (
        ({**state, "1.weight": torch.ones(2, 2)}, CaptureError, r"1\.weight is float32\[2, 2\]"),
        ({name: tensor for name, tensor in state.items() if name != "1.weight"}, CaptureError, r"1\.weight"),
        ({**state, "1.weight": state["1.weight"].to("meta")}, CaptureError, "expected a dense tensor with data"),
        (tmp_path / "none", stagepack.errors.NotABundleError, "no such path"),
    )
    for source, error, message in cases:
        with pytest.raises(error, match=message):
            stagepack.delta(versions.a, source, out=tmp_path / "m.delta")
    with pytest.raises(OptionError, match="there is nothing to write"):
        stagepack.delta(versions.a, versions.a, out=tmp_path / "m.delta")
    with pytest.raises(OptionError, match="up to 256 characters"):
        stagepack.delta(versions.a, versions.b, out=tmp_path / "m.delta", version="x" * 257)
    assert sorted(path.name for path in tmp_path.iterdir()) == []
