"""U-Nets and autoencoders of diffusers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.libraries.case import Make, batch_of, batched, fixed, made, table

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


def diffusers_model(class_name: str, **config: Any) -> Make:
    return made(f"diffusers:{class_name}", **config)


def _condition(**more: Callable[[], Any]) -> Callable[[], dict[str, Any]]:
    return lambda: {
        "sample": torch.randn(2, 4, 16, 16),
        "timestep": torch.tensor([3, 7]),
        "encoder_hidden_states": torch.randn(2, 7, 32),
        **{name: make() for name, make in more.items()},
    }


class _Encoder(nn.Module):
    """The encoder of an autoencoder, up to the mode of what it would draw from: a distribution is no tensor."""

    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        mode: torch.Tensor = self.autoencoder.encode(sample).latent_dist.mode()
        return mode


class _Decoder(nn.Module):
    def __init__(self, autoencoder: Any) -> None:
        super().__init__()
        self.autoencoder = autoencoder

    def forward(self, latents: torch.Tensor) -> Any:
        return self.autoencoder.decode(latents)


_wan_autoencoder = diffusers_model(
    "AutoencoderKLWan",
    base_dim=6,
    z_dim=4,
    dim_mult=[1, 1, 2],
    num_res_blocks=1,
    temperal_downsample=[False, True],
    latents_mean=[0.0] * 4,
    latents_std=[1.0] * 4,
)

CASES = table(
    "diffusers",
    {
        "unet2d": (
            diffusers_model(
                "UNet2DModel",
                **_UNET,
                down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                up_block_types=("AttnUpBlock2D", "UpBlock2D"),
                attention_head_dim=8,
            ),
            batched(lambda: {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7])}),
        ),
        "unet2d-condition": (diffusers_model("UNet2DConditionModel", **_CONDITION), batched(_condition())),
        "unet2d-sdxl": (
            diffusers_model(
                "UNet2DConditionModel",
                **_CONDITION,
                addition_embed_type="text_time",
                addition_time_embed_dim=8,
                projection_class_embeddings_input_dim=80,
                transformer_layers_per_block=(1, 2),
                use_linear_projection=True,
            ),
            batched(
                _condition(added_cond_kwargs=lambda: {"text_embeds": torch.randn(2, 32), "time_ids": torch.randn(2, 6)})
            ),
        ),
        "unet2d-kandinsky": (
            diffusers_model(
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
            diffusers_model(
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
            diffusers_model(
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
        "autoencoder-kl-encode": (lambda: _Encoder(diffusers_model("AutoencoderKL", **_KL)()), batch_of((3, 32, 32))),
        "autoencoder-tiny": (
            diffusers_model(
                "AutoencoderTiny",
                encoder_block_out_channels=(16, 16),
                decoder_block_out_channels=(16, 16),
                num_encoder_blocks=(1, 2),
                num_decoder_blocks=(2, 1),
            ),
            batch_of((3, 32, 32)),
        ),
        "autoencoder-kl-decode": (lambda: _Decoder(diffusers_model("AutoencoderKL", **_KL)()), batch_of((4, 16, 16))),
        "autoencoder-kl-wan-decode": (
            lambda: _Decoder(_wan_autoencoder()),
            fixed(lambda: (torch.randn(1, 4, 2, 8, 8),)),
        ),
    },
)
