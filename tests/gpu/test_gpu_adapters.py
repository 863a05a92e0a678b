"""Adapters on a device."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from tests.adapters.lora import adapted, write_lora
from tests.adapters.models import IDS, MASK, export_model, make_model

pytestmark = pytest.mark.gpu
RANKS = {"model.layers.0.self_attn.q_proj": 4, "model.embed_tokens": 2, "lm_head": 3}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_answer_on_the_device(dtype: torch.dtype, device: torch.device, tmp_path: Path) -> None:
    model = make_model("llama", dtype)
    bundle = export_model(model, tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", RANKS)
    stagepack.write_adapter(bundle, lora, out=tmp_path / "a")
    pipeline = stagepack.load(bundle, device=device, adapters=[tmp_path / "a"])
    inputs = {"input_ids": IDS.to(device), "attention_mask": MASK.to(device)}
    with torch.no_grad(), adapted(model, lora):
        expected = model(input_ids=IDS, attention_mask=MASK).logits
    with torch.no_grad():
        one = pipeline(**inputs, adapter="a")["logits"].cpu()
        mixed = pipeline(**inputs, adapter=["a", None, "a"])["logits"].cpu()
        plain = pipeline(**inputs)["logits"].cpu()
    tolerance = 1e-4 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(mixed, torch.stack([one[0], plain[1], one[2]]), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{"stream": True}, {"device_memory": 64_000}])
def test_weights_that_come_while_the_stages_run_have_the_same_bits(
    options: dict[str, Any], device: torch.device, tmp_path: Path
) -> None:
    model = make_model("llama")
    bundle = export_model(model, tmp_path, stages=2)
    lora = write_lora(model, tmp_path / "lora", RANKS)
    adapters = {"a": stagepack.write_adapter(bundle, lora, out=tmp_path / "a").path}
    inputs = {"input_ids": IDS.to(device), "attention_mask": MASK.to(device)}
    pipeline = stagepack.load(bundle, device=device, adapters=adapters, **options)
    all_there = stagepack.load(bundle, device=device, adapters=adapters)
    with torch.no_grad():
        for adapter in ("a", None, ["a", None, "a"], "a"):
            expected = all_there(**inputs, adapter=adapter)["logits"]
            assert torch.equal(pipeline(**inputs, adapter=adapter)["logits"], expected)
