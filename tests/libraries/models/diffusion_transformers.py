"""Diffusion transformers of diffusers."""

from collections.abc import Callable
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.libraries.case import Make, batched, fixed, table
from tests.libraries.models.diffusion import diffusers_model
from tests.zoo.architectures.build import BATCH

_Z_IMAGE = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16}
_LUMINA2 = {
    "sample_size": 16,
    "in_channels": 4,
    "hidden_size": 24,
    "num_layers": 2,
    "num_refiner_layers": 1,
    "num_attention_heads": 3,
    "num_kv_heads": 1,
    "multiple_of": 2,
    "axes_dim_rope": (4, 2, 2),
    "axes_lens": (64, 32, 32),
    "cap_feat_dim": 32,
}
_SIZES = {"in_channels": 4, "out_channels": 4, "num_layers": 3, "num_attention_heads": 2, "attention_head_dim": 8}
_IMAGE = Dim("image", min=2, max=64)
_TEXT = Dim("text", min=2, max=64)


def _transformer(class_name: str, **config: Any) -> Make:
    return diffusers_model(class_name, **_SIZES | config)


def _latents(*shape: int, text: tuple[int, int], **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """What most transformers take: latents, a time, and an encoded text, for a batch of two."""
    return lambda: {
        "hidden_states": torch.randn(2, *shape),
        "encoder_hidden_states": torch.randn(2, *text),
        "timestep": torch.tensor([3, 7]),
        **{name: make() for name, make in more.items()},
    }


def _flux_inputs() -> Inputs:
    """Any batch, any number of tokens of the picture and of the text."""
    image, text = {0: BATCH, 1: _IMAGE}, {0: BATCH, 1: _TEXT}
    return Inputs(
        kwargs={
            "hidden_states": torch.randn(2, 16, 4),
            "encoder_hidden_states": torch.randn(2, 8, 32),
            "pooled_projections": torch.randn(2, 32),
            "timestep": torch.rand(2),
            "img_ids": torch.randn(16, 3),
            "txt_ids": torch.randn(8, 3),
            "guidance": torch.rand(2),
        },
        dynamic_shapes={
            "hidden_states": image,
            "encoder_hidden_states": text,
            "pooled_projections": {0: BATCH},
            "timestep": {0: BATCH},
            "img_ids": {0: _IMAGE},
            "txt_ids": {0: _TEXT},
            "guidance": {0: BATCH},
        },
    )


class _FullMask:
    """In the place of a mask of captions that are all as long as the longest one: their lengths are a size, not data."""

    def __init__(self, mask: torch.Tensor) -> None:
        self.shape = mask.shape

    def sum(self, dim: int) -> "_FullMask":
        return self

    def tolist(self) -> list[int]:
        return [self.shape[1]] * self.shape[0]


def _lumina2_of_full_captions() -> torch.nn.Module:
    model: torch.nn.Module = diffusers_model("Lumina2Transformer2DModel", **_LUMINA2)()
    embedder: Any = model.rope_embedder
    embed = embedder.forward
    embedder.forward = lambda latents, mask: embed(latents, _FullMask(mask))
    return model


def _all_experts(self: Any, tokens: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The mixture of experts of HiDream without the question how many tokens chose each expert: all compute all tokens."""
    count = tokens.shape[0]
    scores = tokens.new_zeros(count, len(self.experts)).scatter(1, chosen.view(count, -1), weights.view(count, -1))
    results = [scores[:, [number]] * expert(tokens) for number, expert in enumerate(self.experts)]
    return torch.stack(results).sum(0)


def _hidream() -> torch.nn.Module:
    from diffusers.models.transformers import transformer_hidream_image

    transformer_hidream_image.MOEFeedForwardSwiGLU.moe_infer = _all_experts
    model: torch.nn.Module = _transformer(
        "HiDreamImageTransformer2DModel",
        patch_size=2,
        num_layers=1,
        num_single_layers=1,
        num_attention_heads=4,
        caption_channels=[32, 16],
        text_emb_dim=64,
        num_routed_experts=4,
        num_activated_experts=2,
        axes_dims_rope=(4, 2, 2),
        max_resolution=(32, 32),
        llama_layers=(0, 1),
        force_inference_output=True,
    )()
    return model


def _latents_and_texts() -> tuple[torch.Tensor, ...]:
    texts = torch.randn(2, 8, 32), torch.randn(2, 2, 8, 16), torch.randn(2, 64)
    return torch.randn(2, 4, 16, 16), torch.tensor([3.0, 7.0]), *texts


def _captions() -> dict[str, Any]:
    return _latents(4, 8, 8, text=(6, 32), encoder_attention_mask=lambda: torch.ones(2, 6, dtype=torch.bool))()


CASES = table(
    "diffusers",
    {
        "flux": (
            diffusers_model(
                "FluxTransformer2DModel",
                in_channels=4,
                num_layers=2,
                num_single_layers=2,
                attention_head_dim=16,
                num_attention_heads=2,
                joint_attention_dim=32,
                pooled_projection_dim=32,
                axes_dims_rope=(4, 4, 8),
                guidance_embeds=True,
            ),
            _flux_inputs,
        ),
        "sd3": (
            _transformer(
                "SD3Transformer2DModel",
                sample_size=32,
                patch_size=2,
                num_attention_heads=4,
                joint_attention_dim=32,
                caption_projection_dim=32,
                pooled_projection_dim=64,
                dual_attention_layers=(0,),
                qk_norm="rms_norm",
            ),
            batched(_latents(4, 16, 16, text=(8, 32), pooled_projections=lambda: torch.randn(2, 64))),
        ),
        "wan": (
            _transformer("WanTransformer3DModel", attention_head_dim=12, text_dim=16, ffn_dim=32, rope_max_seq_len=32),
            batched(_latents(4, 2, 8, 8, text=(12, 16))),
        ),
        "ltx-video": (
            _transformer("LTXVideoTransformer3DModel", cross_attention_dim=16, caption_channels=16),
            batched(
                _latents(
                    32,
                    4,
                    text=(8, 16),
                    encoder_attention_mask=lambda: torch.ones(2, 8, dtype=torch.bool),
                    num_frames=lambda: 2,
                    height=lambda: 4,
                    width=lambda: 4,
                )
            ),
        ),
        "hunyuan-video": (
            _transformer(
                "HunyuanVideoTransformer3DModel",
                attention_head_dim=10,
                num_layers=2,
                num_single_layers=2,
                num_refiner_layers=1,
                patch_size=1,
                text_embed_dim=16,
                pooled_projection_dim=8,
                rope_axes_dim=(2, 4, 4),
            ),
            batched(
                _latents(
                    4,
                    1,
                    8,
                    8,
                    text=(8, 16),
                    encoder_attention_mask=lambda: torch.ones(2, 8),
                    pooled_projections=lambda: torch.randn(2, 8),
                    guidance=lambda: torch.rand(2),
                )
            ),
        ),
        "cogvideox": (
            _transformer(
                "CogVideoXTransformer3DModel",
                time_embed_dim=8,
                text_embed_dim=8,
                sample_width=8,
                sample_height=8,
                sample_frames=8,
                max_text_seq_length=8,
            ),
            batched(_latents(2, 4, 8, 8, text=(8, 8))),
        ),
        "pixart": (
            diffusers_model(
                "PixArtTransformer2DModel",
                sample_size=8,
                num_layers=3,
                attention_head_dim=8,
                num_attention_heads=2,
                cross_attention_dim=16,
                use_additional_conditions=False,
            ),
            batched(
                _latents(4, 8, 8, text=(8, 16), added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None})
            ),
        ),
        "kandinsky5": (
            diffusers_model(
                "Kandinsky5Transformer3DModel",
                in_text_dim=16,
                in_text_dim2=8,
                time_dim=16,
                model_dim=32,
                ff_dim=64,
                num_text_blocks=1,
                num_visual_blocks=2,
                axes_dims=(4, 4, 8),
            ),
            lambda: Inputs(
                kwargs={
                    "hidden_states": torch.randn(1, 1, 8, 8, 4),
                    "encoder_hidden_states": torch.randn(1, 6, 16),
                    "timestep": torch.tensor([3]),
                    "pooled_projections": torch.randn(1, 8),
                    "visual_rope_pos": (torch.arange(1), torch.arange(4), torch.arange(4)),
                    "text_rope_pos": torch.arange(6),
                }
            ),
        ),
        "z-image": (
            diffusers_model(
                "ZImageTransformer2DModel", in_channels=4, **_Z_IMAGE, axes_dims=[4, 4, 8], axes_lens=[64, 32, 32]
            ),
            lambda: Inputs(
                kwargs={
                    "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)],
                    "t": torch.tensor([0.3, 0.7]),
                    "cap_feats": [torch.randn(8, 16), torch.randn(6, 16)],
                }
            ),
        ),
        "qwen-image": (
            _transformer(
                "QwenImageTransformer2DModel",
                in_channels=16,
                attention_head_dim=16,
                num_attention_heads=3,
                joint_attention_dim=16,
                axes_dims_rope=(8, 4, 4),
            ),
            lambda: Inputs(
                kwargs={
                    "hidden_states": torch.randn(1, 16, 16),
                    "encoder_hidden_states": torch.randn(1, 7, 16),
                    "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.bool),
                    "timestep": torch.tensor([0.3]),
                    "img_shapes": [(1, 4, 4)],
                }
            ),
        ),
        "sana": (
            _transformer(
                "SanaTransformer2DModel",
                attention_head_dim=4,
                num_cross_attention_heads=2,
                cross_attention_head_dim=4,
                cross_attention_dim=8,
                caption_channels=8,
            ),
            batched(_latents(4, 8, 8, text=(8, 8))),
        ),
        "lumina2": (diffusers_model("Lumina2Transformer2DModel", **_LUMINA2), batched(_captions)),
        "hidream-of-all-experts": (_hidream, fixed(_latents_and_texts)),
        "lumina2-of-full-captions": (_lumina2_of_full_captions, lambda: Inputs(kwargs=_captions())),
    },
)
