"""Models of pictures, or layouts, or sound, and text."""

import torch

from tests.zoo.architectures.build import SMALL, batched, fixed, ids, table

TEXT = {**SMALL, "projection_dim": 16}
VISION = {**SMALL, "image_size": 32, "patch_size": 8, "projection_dim": 16}
BOTH = {"text_config": TEXT, "vision_config": VISION, "projection_dim": 16}


def picture_and_text(size: int = 32, length: int = 8) -> dict[str, torch.Tensor]:
    """Two pictures and two texts, all of the text to be seen."""
    return {
        "input_ids": ids(2, length),
        "attention_mask": torch.ones(2, length, dtype=torch.long),
        "pixel_values": torch.randn(2, 3, size, size),
    }


CASES = table(
    "multimodal",
    {
        "clip": ("CLIPModel", BOTH, batched(picture_and_text)),
        "siglip": ("SiglipModel", BOTH, batched(picture_and_text)),
        "chinese-clip": ("ChineseCLIPModel", BOTH, batched(picture_and_text)),
        "altclip": ("AltCLIPModel", BOTH, batched(picture_and_text)),
        "blip": ("BlipModel", {**BOTH, "image_text_hidden_size": 16}, batched(picture_and_text)),
        "git": (
            "GitForCausalLM",
            {**SMALL, "vision_config": VISION},
            batched(lambda: picture_and_text() | {"use_cache": False}),
        ),
        "layoutlmv3": (
            "LayoutLMv3Model",
            {
                **SMALL,
                "visual_embed": False,
                "coordinate_size": 5,
                "shape_size": 6,
                "max_2d_position_embeddings": 64,
                "max_position_embeddings": 140,
            },
            batched(lambda: {"input_ids": ids(2, 8), "bbox": torch.randint(0, 60, (2, 8, 4)).sort(-1).values}),
        ),
        "clipseg": ("CLIPSegModel", BOTH, batched(picture_and_text)),
        "clap": (
            "ClapModel",
            {
                "text_config": {**TEXT, "max_position_embeddings": 140},
                "audio_config": {
                    "window_size": 4,
                    "num_mel_bins": 16,
                    "spec_size": 64,
                    "patch_size": 4,
                    "patch_stride": [4, 4],
                    "hidden_size": 16,
                    "patch_embeds_hidden_size": 8,
                    "depths": [1, 1],
                    "num_attention_heads": [2, 2],
                    "projection_dim": 16,
                    "enable_fusion": False,
                },
                "projection_dim": 16,
            },
            fixed(
                lambda: {
                    "input_ids": ids(2, 8),
                    "attention_mask": torch.ones(2, 8, dtype=torch.long),
                    "input_features": torch.randn(2, 1, 64, 16),
                }
            ),
        ),
        "llava": (
            "LlavaForConditionalGeneration",
            {
                "text_config": {**SMALL, "model_type": "llama", "num_key_value_heads": 2},
                "vision_config": {**VISION, "model_type": "clip_vision_model"},
                "image_token_index": 127,
                "vision_feature_layer": -2,
            },
            fixed(
                lambda: {
                    "input_ids": torch.cat([torch.full((2, 16), 127), torch.randint(3, 120, (2, 8))], dim=1),
                    "pixel_values": torch.randn(2, 3, 32, 32),
                    "use_cache": False,
                }
            ),
        ),
    },
)
