"""Families that `generate=` refuses are exported by transformers, and their folders are bundles that answer as the models do."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.exporters.configs import DynamoConfig
from transformers.exporters.exporter_dynamo import DynamoExporter
from transformers.exporters.utils import decompose_for_generation

import stagepack
from stagepack.errors import CaptureError, StagepackError
from tests.zoo.cases import named

# The exporter warns of this torch, and of sizes that it marks as dynamic.
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]
# Measured on all 74 architectures of the zoo that generate: `generate=` refuses these and the ones below.
SERVED = [
    "audio-speech-to-text",
    "audio-moonshine",
    "decoders-gpt-neo",
    "decoders-bloom",
    "encoder-decoders-m2m-100",
    "state-space-mamba",
    "state-space-falcon-mamba",
    "state-space-mamba2",
    "state-space-rwkv",
    "state-space-jamba",
    "state-space-bamba",
    "state-space-lfm2",
]
# Arguments of `forward` that `generate` makes itself.
_OWN = ("use_cache", "decoder_input_ids", "decoder_attention_mask")


def model_and_inputs(name: str) -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model, inputs = named(name)[0].build()
    return model, {key: value for key, value in inputs.kwargs.items() if key not in _OWN}


def tensors(value: Any) -> dict[str, torch.Tensor]:
    """The logits and the other tensors of an answer by name."""
    items = value.items() if hasattr(value, "items") else ()
    return {key: item for key, item in items if isinstance(item, torch.Tensor)}


@pytest.mark.parametrize("name", SERVED)
def test_a_family_without_a_cache_of_fixed_size_answers_as_the_model(name: str, tmp_path: Path) -> None:
    model, inputs = model_and_inputs(name)
    with pytest.raises(StagepackError):
        stagepack.export(model, out=tmp_path / "own.stagepack", generate=32, generate_batch=2)
    model, inputs = model_and_inputs(name)
    DynamoExporter().export_for_generation(model, inputs, DynamoConfig(dynamic=True)).save_pretrained(tmp_path / "x")
    bundle = stagepack.export(tmp_path / "x", out=tmp_path / "m.stagepack", stages=2)
    pipes = stagepack.load_entry_points(bundle)
    for component, (part, given) in decompose_for_generation(model, inputs).items():
        with torch.no_grad():
            expected = tensors(part(**copy.deepcopy(given)))
        names = {parameter.name for parameter in bundle.select(component).entry_point.signature.parameters}
        answer = tensors(pipes[component](**{key: value for key, value in given.items() if key in names}))
        assert "logits" in answer
        for key, tensor in answer.items():
            torch.testing.assert_close(tensor, expected[key], rtol=1e-4, atol=1e-4)


def test_a_program_that_torch_cannot_read_is_one_error(tmp_path: Path) -> None:
    model, inputs = model_and_inputs("state-space-recurrent-gemma")
    DynamoExporter().export_for_generation(model, inputs, DynamoConfig(dynamic=True)).save_pretrained(tmp_path / "x")
    with pytest.raises(CaptureError, match=r"decode.pt2: torch.export.load cannot read it: vr must not be None"):
        stagepack.export(tmp_path / "x", out=tmp_path / "m.stagepack")
