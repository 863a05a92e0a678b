"""Diffusion models of diffusers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.libraries.case import Make, batch_of, batched, fixed, made, table
from tests.zoo.architectures.build import BATCH

_UNET = {"sample_size": 16, "layers_per_block": 1, "block_out_channels": (16, 32), "norm_num_groups": 8}
_CONDITION = {
    **_UNET,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
    "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 32,
    "attention_head_dim": 8,
}
_KL = {
    "block_out_channels": (16, 32),
    "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2,
    "latent_channels": 4,
    "norm_num_groups": 8,
}
_IMAGE = Dim("image", min=2, max=64)
_TEXT = Dim("text", min=2, max=64)


def _of(class_name: str, **config: Any) -> Make:
    return made(f"diffusers:{class_name}", **config)


def _latents(*shape: int, text: tuple[int, int], **more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    """What most transformers take: latents, a time, and an encoded text, for a batch of two."""
    return lambda: {
        "hidden_states": torch.randn(2, *shape),
        "encoder_hidden_states": torch.randn(2, *text),
        "timestep": torch.tensor([3, 7]),
        **{name: make() for name, make in more.items()},
    }


def _condition(**more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
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


class _Encoder(nn.Module):
    """The encoder of an autoencoder, up to the mode of what it would draw from: a distribution is no tensor."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        mode: torch.Tensor = self.autoencoder.encode(sample).latent_dist.mode()
        return mode


class _Decoder(nn.Module):
    """The decoder of an autoencoder."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: torch.Tensor) -> Any:
        return self.autoencoder.decode(latents)


_wan_autoencoder = _of(
    "AutoencoderKLWan",
    base_dim=6,
    z_dim=4,
    dim_mult=[1, 1, 2],
    num_res_blocks=1,
    temperal_downsample=[False, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)
_Z_IMAGE = {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 16}

CASES = [
    *table(
        "diffusers",
        {
            "unet2d": (
                _of(
                    "UNet2DModel",
                    **_UNET,
                    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                    attention_head_dim=8,
                ),
                batched(lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}),
            ),
            "unet2d-condition": (_of("UNet2DConditionModel", **_CONDITION), batched(_condition())),
            "unet2d-sdxl": (
                _of(
                    "UNet2DConditionModel",
                    **_CONDITION,
                    addition_embed_type="text_time",
                    addition_time_embed_dim=8,
                    projection_class_embeddings_input_dim=80,
                    transformer_layers_per_block=(1, 2),
                    use_linear_projection=True,
                ),
                batched(
                    _condition(
                        added_cond_kwargs=lambda: {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)}
                    )
                ),
            ),
            "unet2d-kandinsky": (
                _of(
                    "UNet2DConditionModel",
                    **_CONDITION
                    | {
                        "down_block_types": ("ResnetDownsampleBlock2D", "SimpleCrossAttnDownBlock2D"),
                        "up_block_types": ("SimpleCrossAttnUpBlock2D", "ResnetUpsampleBlock2D"),
                        "mid_block_type": "UNetMidBlock2DSimpleCrossAttn",
                    },
                    resnet_time_scale_shift="scale_shift",
                    addition_embed_type="image",
                    addition_embed_type_num_heads=2,
                    encoder_hid_dim=32,
                    encoder_hid_dim_type="image_proj",
                ),
                batched(
                    lambda: {
                        "sample": torch.randn(2, 4, 16, 16),
                        "timestep": torch.tensor([3, 7]),
                        "encoder_hidden_states": None,
                        "added_cond_kwargs": {"image_embeds": torch.randn(2, 32)},
                    }
                ),
            ),
            "unet3d": (
                _of(
                    "UNetSpatioTemporalConditionModel",
                    sample_size=16,
                    in_channels=8,
                    out_channels=4,
                    block_out_channels=(32, 64),
                    down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
                    up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"),
                    cross_attention_dim=32,
                    num_attention_heads=(2, 4),
                    projection_class_embeddings_input_dim=24,
                    addition_time_embed_dim=8,
                    layers_per_block=1,
                ),
                batched(
                    lambda: {
                        "sample": torch.randn(2, 2, 8, 16, 16),
                        "timestep": torch.tensor([3, 7]),
                        "encoder_hidden_states": torch.randn(2, 1, 32),
                        "added_time_ids": torch.randn(2, 3),
                    }
                ),
            ),
            "controlnet": (
                _of(
                    "ControlNetModel",
                    block_out_channels=(16, 32),
                    layers_per_block=1,
                    down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                    conditioning_embedding_out_channels=(8, 16),
                    cross_attention_dim=32,
                    attention_head_dim=8,
                    norm_num_groups=8,
                ),
                batched(_condition(controlnet_cond=lambda: torch.randn(2, 3, 32, 32))),
            ),
            "flux": (
                _of(
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
                _of(
                    "SD3Transformer2DModel",
                    sample_size=32,
                    patch_size=2,
                    in_channels=4,
                    out_channels=4,
                    num_layers=3,
                    attention_head_dim=8,
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
                _of(
                    "WanTransformer3DModel",
                    num_attention_heads=2,
                    attention_head_dim=12,
                    in_channels=4,
                    out_channels=4,
                    text_dim=16,
                    ffn_dim=32,
                    num_layers=3,
                    rope_max_seq_len=32,
                ),
                batched(_latents(4, 2, 8, 8, text=(12, 16))),
            ),
            "ltx-video": (
                _of(
                    "LTXVideoTransformer3DModel",
                    in_channels=4,
                    out_channels=4,
                    num_attention_heads=2,
                    attention_head_dim=8,
                    cross_attention_dim=16,
                    num_layers=3,
                    caption_channels=16,
                ),
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
                _of(
                    "HunyuanVideoTransformer3DModel",
                    in_channels=4,
                    out_channels=4,
                    num_attention_heads=2,
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
                _of(
                    "CogVideoXTransformer3DModel",
                    num_attention_heads=2,
                    attention_head_dim=8,
                    in_channels=4,
                    out_channels=4,
                    time_embed_dim=8,
                    text_embed_dim=8,
                    num_layers=3,
                    sample_width=8,
                    sample_height=8,
                    sample_frames=8,
                    max_text_seq_length=8,
                ),
                batched(_latents(2, 4, 8, 8, text=(8, 8))),
            ),
            "pixart": (
                _of(
                    "PixArtTransformer2DModel",
                    sample_size=8,
                    num_layers=3,
                    attention_head_dim=8,
                    num_attention_heads=2,
                    cross_attention_dim=16,
                    use_additional_conditions=False,
                ),
                batched(
                    _latents(
                        4, 8, 8, text=(8, 16), added_cond_kwargs=lambda: {"resolution": None, "aspect_ratio": None}
                    )
                ),
            ),
            "kandinsky5": (
                _of(
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
                _of("ZImageTransformer2DModel", in_channels=4, **_Z_IMAGE, axes_dims=[4, 4, 8], axes_lens=[64, 32, 32]),
                lambda: Inputs(
                    kwargs={
                        "x": [torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)],
                        "t": torch.tensor([0.3, 0.7]),
                        "cap_feats": [torch.randn(8, 16), torch.randn(6, 16)],
                    }
                ),
            ),
            "qwen-image": (
                _of(
                    "QwenImageTransformer2DModel",
                    in_channels=16,
                    out_channels=4,
                    num_layers=3,
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
                _of(
                    "SanaTransformer2DModel",
                    in_channels=4,
                    out_channels=4,
                    num_layers=3,
                    attention_head_dim=4,
                    num_attention_heads=2,
                    num_cross_attention_heads=2,
                    cross_attention_head_dim=4,
                    cross_attention_dim=8,
                    caption_channels=8,
                ),
                batched(_latents(4, 8, 8, text=(8, 8))),
            ),
            "lumina2": (
                _of(
                    "Lumina2Transformer2DModel",
                    sample_size=16,
                    in_channels=4,
                    hidden_size=24,
                    num_layers=2,
                    num_refiner_layers=1,
                    num_attention_heads=3,
                    num_kv_heads=1,
                    multiple_of=2,
                    axes_dim_rope=(4, 2, 2),
                    axes_lens=(64, 32, 32),
                    cap_feat_dim=32,
                ),
                batched(
                    _latents(4, 8, 8, text=(6, 32), encoder_attention_mask=lambda: torch.ones(2, 6, dtype=torch.bool))
                ),
            ),
            "autoencoder-kl-encode": (lambda: _Encoder(_of("AutoencoderKL", **_KL)()), batch_of((3, 32, 32))),
            "autoencoder-tiny": (
                _of(
                    "AutoencoderTiny",
                    encoder_block_out_channels=(16, 16),
                    decoder_block_out_channels=(16, 16),
                    num_encoder_blocks=(1, 2),
                    num_decoder_blocks=(2, 1),
                ),
                batch_of((3, 32, 32)),
            ),
            "autoencoder-kl-decode": (lambda: _Decoder(_of("AutoencoderKL", **_KL)()), batch_of((4, 16, 16))),
            "autoencoder-kl-wan-decode": (
                lambda: _Decoder(_wan_autoencoder()),
                fixed(lambda: (torch.randn(1, 4, 2, 8, 8),)),
            ),
        },
    ),
]
