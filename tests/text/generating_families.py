"""Small models of transformers that generate, with weights whose logits differ as those of trained models do."""

import functools
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

import stagepack
from tests.made_once import made_once
from tests.text.generating_model import write_assets

POSITIONS = 64
VOCABULARY = 258
NOT_FINITE = VOCABULARY - 1  # a token of fragile bundles
MEL_BINS, FRAMES = 8, 60
# What each of them reads.
SPEECH = frozenset({"whisper"})
SEQ2SEQ = frozenset({"t5", "whisper"})

_LAYERS: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def make_model(family: str) -> Any:
    torch.manual_seed(0)
    model: Any = _MAKERS[family]()
    if family in SPEECH:
        for weight in model.model.encoder.parameters():
            weight.data *= 6  # else all speech is alike
    head = model.get_output_embeddings()
    head.weight = torch.nn.Parameter(torch.randn(VOCABULARY, 32) * 0.3)
    model.generation_config.update(eos_token_id=1, pad_token_id=0)
    return model.eval()


def export_qwen(folder: Path, batch: int = 4) -> Path:
    """A bundle of a model whose texts are as long as they may be."""
    model, path = make_model("qwen3"), folder / "qwen.stagepack"
    model.generation_config.eos_token_id = None
    return stagepack.export(model, out=path, stages=2, generate=POSITIONS, generate_batch=batch).path


def export_family(family: str, folder: Path, *, is_fragile: bool = False) -> Path:
    """A bundle of two stages for chats, with a row of its cache for each of four texts; the keys of `NOT_FINITE` may be NaN."""
    model, path = make_model(family), folder / f"{family}.stagepack"
    if is_fragile:
        model.model.embed_tokens.weight.data[NOT_FINITE] = float("nan")
    options: dict[str, Any] = {"generate": POSITIONS, "generate_batch": 4, "assets": write_assets(folder)}
    return stagepack.export(model, out=path, stages=2, **options).path


def family_bundle(factory: pytest.TempPathFactory, family: str) -> Path:
    """The bundle of `export_family`, made once. Do not write into it."""
    return made_once(factory, family, functools.partial(export_family, family)) / f"{family}.stagepack"


def fragile_bundle(factory: pytest.TempPathFactory, family: str) -> Path:
    """The bundle of `export_family` that is fragile, made once. Do not write into it."""
    make = functools.partial(export_family, family, is_fragile=True)
    return made_once(factory, f"fragile-{family}", make) / f"{family}.stagepack"


def fragile_onnx_bundle(factory: pytest.TempPathFactory) -> Path:
    """The bundle of `fragile_bundle` of qwen3, with ONNX models. Do not write into it."""

    def make(folder: Path) -> None:
        path = shutil.copytree(fragile_bundle(factory, "qwen3"), folder / "qwen3.stagepack")
        assert stagepack.add_onnx(path).torch_only == {}

    return made_once(factory, "fragile-onnx", make) / "qwen3.stagepack"


def qwen_bundle(factory: pytest.TempPathFactory) -> Path:
    """The bundle of `export_qwen`, with a row of its cache for each of four texts. Do not write into it."""
    return made_once(factory, "qwen", export_qwen) / "qwen.stagepack"


_UNTIED: dict[str, Any] = {"vocab_size": VOCABULARY, "tie_word_embeddings": False}


def _gpt2() -> Any:
    return GPT2LMHeadModel(GPT2Config(**_UNTIED, n_embd=32, n_layer=2, n_head=4, n_positions=POSITIONS))


def _t5() -> Any:
    config_type: Any = T5Config  # takes fields of its base class too
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(config_type(**_UNTIED, **sizes, decoder_start_token_id=0))


def _whisper() -> Any:
    sizes: dict[str, Any] = {"d_model": 32, "num_mel_bins": MEL_BINS, "max_source_positions": FRAMES // 2}
    for side in ("encoder", "decoder"):
        sizes |= {f"{side}_layers": 2, f"{side}_attention_heads": 4, f"{side}_ffn_dim": 48}
    tokens: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, "decoder_start_token_id": 3}
    tokens |= {"suppress_tokens": [5, 6], "begin_suppress_tokens": [7], "max_target_positions": POSITIONS}
    return WhisperForConditionalGeneration(WhisperConfig(**_UNTIED, **sizes, **tokens))


_MAKERS: dict[str, Any] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_LAYERS)),
    "gpt2": _gpt2,
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**_LAYERS, head_dim=8)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_LAYERS, num_local_experts=4, sliding_window=None)),
    # Windows shorter than the texts.
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_LAYERS, sliding_window=6)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_LAYERS, head_dim=8)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_LAYERS, head_dim=8, sliding_window=6, layer_types=["sliding_attention", "full_attention"])
    ),
    "phi": lambda: PhiForCausalLM(PhiConfig(**{**_LAYERS, "num_key_value_heads": 4})),
    "t5": _t5,
    "whisper": _whisper,
}
FAMILIES = tuple(_MAKERS)


def make_prompts(family: str, batch_size: int) -> dict[str, torch.Tensor]:
    """Prompts of different lengths, padded on the side where the model has its padding."""
    generator = torch.Generator().manual_seed(batch_size)
    if family in SPEECH:
        return {"input_features": torch.randn(batch_size, MEL_BINS, FRAMES, generator=generator)}
    longest = 7 if batch_size > 1 else 1
    tokens = torch.randint(2, VOCABULARY, (batch_size, longest), generator=generator)
    lengths = torch.tensor([[longest], [2], [1], [5]])[:batch_size]
    places = torch.arange(longest)
    mask = places < lengths if family in SEQ2SEQ else places >= longest - lengths
    return {"input_ids": tokens, "attention_mask": mask.long()}


def generated_by_transformers(
    family: str, model: Any, inputs: dict[str, torch.Tensor], seed: int, **options: Any
) -> Any:
    """The new tokens of transformers' own ``generate``."""
    torch.manual_seed(seed)
    tokens = model.generate(**inputs, **options)
    begin_lengths = {"t5": 1, "whisper": 0}  # Whisper leaves out the token that begins
    return tokens[:, begin_lengths.get(family, inputs.get("input_ids", tokens).shape[1]) :]
