"""Models of text and pictures with text: sentence-transformers, open_clip; proteins; adapters of PEFT."""

from typing import Any

import torch

from stagepack.capture.inputs import Inputs
from tests.libraries.case import Make, batched, made, table
from tests.zoo.architectures.build import BATCH, SMALL, TOKENS, ids, tokens

_LLAMA = {**SMALL, "num_key_value_heads": 2}
_LORA = {"r": 4, "lora_alpha": 8, "init_lora_weights": False}
_PROJECTIONS = ["q_proj", "v_proj"]


def _transformers(model: str, **sizes: Any) -> Any:
    import transformers

    cls = getattr(transformers, model)
    return cls(cls.config_class(**sizes)).eval()


def _sentence_transformer() -> Any:
    """Its tokenizer is not part of the model."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling

    class Words(torch.nn.Module):
        """Stands in the place of `sentence_transformers.models.Transformer`, which is made from files alone."""

        def __init__(self) -> None:
            super().__init__()
            self.auto_model = _transformers("BertModel", **SMALL)

        def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return features | {"token_embeddings": self.auto_model(**features)[0]}

    return SentenceTransformer(modules=[Words(), Pooling(32), Normalize()])


def _features() -> Inputs:
    features = {"input_ids": ids(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    return Inputs(args=(features,), dynamic_shapes=(dict.fromkeys(features, TOKENS),))


def _clip(**more: Any) -> Make:
    vision = {"layers": 3, "width": 32, "head_width": 8, "patch_size": 8, "image_size": 32}
    text = {"context_length": 12, "vocab_size": 128, "width": 32, "heads": 4, "layers": 3}
    return made("open_clip.model:CLIP", embed_dim=16, vision_cfg=vision, text_cfg=text, **more)


def _pictures_and_texts() -> Inputs:
    args = torch.randn(2, 3, 32, 32), ids(2, 12)
    return Inputs(args=args, dynamic_shapes=({0: BATCH}, {0: BATCH}))


def _adapted(**config: Any) -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(
        _transformers("LlamaForCausalLM", **_LLAMA), LoraConfig(**_LORA, target_modules=_PROJECTIONS, **config)
    )


def _merged() -> Any:
    return _adapted().merge_and_unload()


def _several() -> Any:
    from peft import LoraConfig

    model = _adapted()
    model.add_adapter("second", LoraConfig(**_LORA | {"r": 2}, target_modules=["q_proj", "up_proj"]))
    model.base_model.set_adapter(["default", "second"])
    return model


def _other_adapter(kind: str, **config: Any) -> Make:
    def make() -> Any:
        import peft

        return peft.get_peft_model(_transformers("LlamaForCausalLM", **_LLAMA), getattr(peft, kind)(**config))

    return make


_CHAT = tokens("attention_mask", use_cache=False)
_CHAT_OF_ONE_LENGTH = batched(
    lambda: {"input_ids": ids(2, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long), "use_cache": False}
)

CASES = table(
    "peft",
    {
        "lora": (_adapted, _CHAT),
        "lora-merged": (_merged, _CHAT),
        "lora-several": (_several, _CHAT),
        "dora": (lambda: _adapted(use_dora=True), _CHAT),
        "rank-stabilized-lora": (lambda: _adapted(use_rslora=True), _CHAT),
        "ia3": (
            _other_adapter(
                "IA3Config",
                target_modules=["k_proj", "down_proj"],
                feedforward_modules=["down_proj"],
                init_ia3_weights=False,
            ),
            _CHAT,
        ),
        "prompt-tuning": (
            _other_adapter("PromptTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4),
            _CHAT_OF_ONE_LENGTH,
        ),
        "prefix-tuning": (
            _other_adapter("PrefixTuningConfig", task_type="CAUSAL_LM", num_virtual_tokens=4),
            _CHAT_OF_ONE_LENGTH,
        ),
    },
)
CASES += table(
    "sentence-transformers", {"bert": (_sentence_transformer, _features)}, libraries=("sentence_transformers",)
)
CASES += table(
    "open_clip",
    {
        "vit": (_clip(), _pictures_and_texts),
        "vit-siglip": (_clip(init_logit_bias=-10.0), _pictures_and_texts),
        "coca": (
            made(
                "open_clip.coca_model:CoCa",
                embed_dim=32,
                vision_cfg={
                    "layers": 2,
                    "width": 32,
                    "head_width": 8,
                    "patch_size": 8,
                    "image_size": 32,
                    "attentional_pool": True,
                    "attn_pooler_heads": 4,
                    "output_tokens": True,
                },
                text_cfg={
                    "context_length": 12,
                    "vocab_size": 128,
                    "width": 32,
                    "heads": 4,
                    "layers": 2,
                    "embed_cls": True,
                    "output_tokens": True,
                },
                multimodal_cfg={"context_length": 12, "width": 32, "heads": 4, "layers": 2},
            ),
            _pictures_and_texts,
        ),
    },
)
CASES += table(
    "proteins of transformers",
    {
        "esm2": (
            lambda: _transformers("EsmForMaskedLM", **SMALL, position_embedding_type="rotary", token_dropout=False),
            tokens("attention_mask"),
        ),
        "esm2-token-dropout": (
            lambda: _transformers(
                "EsmForMaskedLM",
                **SMALL,
                position_embedding_type="rotary",
                token_dropout=True,
                mask_token_id=3,
                emb_layer_norm_before=True,
            ),
            tokens("attention_mask"),
        ),
    },
    libraries=("transformers",),
)
