"""Generation and embeddings with stages on a GPU: the tokens of transformers, texts, and `stagepack serve`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.format.reader import Bundle
from tests.gpu.answers import assert_close
from tests.text.generating_model import export_decoder

transformers = pytest.importorskip("transformers", reason="transformers is not installed", exc_type=ImportError)

pytestmark = [pytest.mark.gpu, pytest.mark.xdist_group("text")]

POSITIONS = 64
ROWS = 3
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


def llama(dtype: torch.dtype = torch.float32) -> Any:
    """A decoder with grouped-query attention, whose logits differ as those of trained models do."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2))
    model.lm_head.weight.data *= 30
    return model.eval().to(dtype)


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of three lengths, padded on the left, and their mask."""
    tokens = torch.randint(1, 512, (ROWS, 7), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(7) >= torch.tensor([[0], [5], [2]])).long()
    return tokens * mask, mask


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The decoder in three stages, captured on the CPU."""
    out = tmp_path_factory.mktemp("text") / "llama.stagepack"
    return stagepack.export(llama(), out=out, stages=3, generate=POSITIONS, generate_batch=ROWS)


@torch.no_grad()
def test_greedy_tokens_are_those_of_transformers(bundle: Bundle, device: torch.device, turns: list[str]) -> None:
    tokens, mask = prompts()
    model = llama().to(device)
    expected = model.generate(tokens.to(device), attention_mask=mask.to(device), **GREEDY).cpu()
    for devices in ([str(device)], turns, turns[::-1]):
        pipeline = stagepack.load(bundle, devices)
        assert torch.equal(pipeline.generate(tokens, attention_mask=mask, **GREEDY).cpu(), expected)
        on_device = pipeline.generate(tokens.to(device), attention_mask=mask.to(device), **GREEDY)
        assert torch.equal(on_device.cpu(), expected)


def test_a_seed_gives_the_same_tokens_again(bundle: Bundle, device: torch.device) -> None:
    tokens, mask = prompts()
    pipeline = stagepack.load(bundle, [str(device)])
    settings = GREEDY | {"do_sample": True, "temperature": 0.8}
    drawn = [pipeline.generate(tokens, attention_mask=mask, seed=seed, **settings).tolist() for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]


@torch.no_grad()
def test_a_model_on_the_device_is_exported_with_generation(device: torch.device, tmp_path: Path) -> None:
    model = llama(torch.bfloat16).to(device)
    made = stagepack.export(model, out=tmp_path / "m", stages=2, generate=POSITIONS, generate_batch=ROWS)
    assert made.manifest.device == device.type
    tokens, mask = prompts()
    pipeline = stagepack.load(made, [str(device)])
    given: dict[str, Any] = {"input_ids": tokens.to(device), "attention_mask": mask.to(device)}
    found = pipeline.generate(**given, **GREEDY)
    assert found.device == device
    expected = model.generate(**given, **GREEDY)
    # In bfloat16 another order of additions may choose another token; the first ones follow from equal caches.
    assert torch.equal(found[:, :9], expected[:, :9])


def test_texts_are_those_of_the_cpu(device: torch.device, tmp_path: Path) -> None:
    path = export_decoder(tmp_path)
    pipeline, on_cpu = stagepack.load(path, [str(device)]), stagepack.load(path)
    for text in ("Hello", "Hällo, 你好"):
        assert pipeline.generate(text, max_new_tokens=12) == on_cpu.generate(text, max_new_tokens=12)


def test_a_server_writes_the_texts_of_the_pipeline(
    device: torch.device, tmp_path: Path, module_as_command: tuple[str, str]
) -> None:
    from tests.serve import servers

    path = export_decoder(tmp_path)
    expected = stagepack.load(path).generate("Hello", max_new_tokens=12)
    with servers.stagepack_server([path], "--device", str(device), prefix=module_as_command) as server:
        for _ in range(2):
            body = json.dumps({"model": "writer", "prompt": "Hello", "max_tokens": 12, "temperature": 0})
            status, answer, _ = servers.post(server.http, "/v1/completions", body)
            assert status == 200, answer
            assert "Hello" + answer["choices"][0]["text"] == expected
        assert server.stop() == 0


def test_sentences_are_encoded(device: torch.device, tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence_transformers is not installed", exc_type=ImportError)
    from tests.sentence_models import HIDDEN, TEXTS, sentence_model, sentence_transformers

    modules = sentence_transformers().sentence_transformer.modules
    model = sentence_model(tmp_path / "model", modules.Pooling(HIDDEN), modules.Normalize())
    made = stagepack.export(model, out=tmp_path / "m", stages=2)
    expected = torch.as_tensor(model.encode(TEXTS))
    assert_close(torch.as_tensor(stagepack.load(made, [str(device)]).encode(TEXTS)), expected)
