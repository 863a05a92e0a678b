"""Exports that never have all weights in memory write the bytes of an export from memory."""

from pathlib import Path

import pytest
import torch

from stagepack.capture.checkpoint import checkpoint_file_tensors
from stagepack.capture.deferred_tensors import DataNeededError, DeferredTensors
from stagepack.capture.hugging_face import capture_pretrained
from stagepack.capture.inputs import Inputs
from stagepack.exporter import export_capture
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack.torch_internals import FakeTensor
from tests.zoo.architectures.encoders import minilm_folder
from tests.zoo.cases import named

MODELS = [
    ("decoders-llama-tied", torch.bfloat16),
    ("mixture-of-experts-mixtral", torch.float32),
    *(
        pytest.param(name, dtype, marks=pytest.mark.slow)
        for name, dtype in (
            ("decoders-llama", torch.bfloat16),
            ("decoders-gpt2", torch.float32),
            ("encoders-bert", torch.bfloat16),
            ("encoder-decoders-t5", torch.float32),
            ("vision-resnet", torch.bfloat16),
            ("audio-whisper", torch.float32),
        )
    ),
]


def exported(source: str, out: Path, *, deferred: bool) -> Bundle:
    capture = capture_pretrained(source, Inputs(), deferred=deferred)
    assert (capture.deferred is not None) == deferred
    return export_capture(capture, out=out, cut_options=CutOptions(stages=3))


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_folder_becomes_the_same_bundle(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = named(name)[0].build()
    model.to(dtype).save_pretrained(tmp_path / "model", max_shard_size="100kB")  # type: ignore[operator]
    source = str(tmp_path / "model")
    bundles = [exported(source, tmp_path / str(deferred), deferred=deferred) for deferred in (True, False)]
    assert bundles[0].digest == bundles[1].digest


@pytest.mark.slow
def test_real_weights_become_the_same_bundle(tmp_path: Path) -> None:
    bundles = [exported(minilm_folder(), tmp_path / str(deferred), deferred=deferred) for deferred in (True, False)]
    assert bundles[0].digest == bundles[1].digest


def test_what_is_done_with_deferred_tensors_is_done_with_their_data(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, 3)}, tmp_path / "c.bin")
    tensors = checkpoint_file_tensors(tmp_path / "c.bin")
    deferred = DeferredTensors()
    a, b = deferred.add(tensors["a"]), deferred.add(tensors["b"])
    with deferred:
        stacked = torch.nn.Parameter(torch.stack([a, b.to(torch.bfloat16).float()]).transpose(1, 2))
        halves = a.chunk(3, dim=1)
        equal = torch.equal(a, b), torch.equal(b, b.clone())
        with pytest.raises(DataNeededError):
            a.add_(1)
    assert equal == (False, True)
    assert isinstance(stacked, FakeTensor)
    assert isinstance(stacked, torch.nn.Parameter)
    assert torch.equal(deferred.real(stacked)[0].T, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(deferred.real(halves[2]), torch.tensor([[2.0], [5.0]]))
    assert deferred.real(torch.ones(1)) == 1
