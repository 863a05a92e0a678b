"""Models of pictures."""

import torch

from tests.zoo.architectures.build import SMALL, fixed, pixels, table

VIT = {**SMALL, "image_size": 32, "patch_size": 8}
STAGES = {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
SWIN = {"image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}

CASES = table(
    "vision",
    {
        "vit": ("ViTModel", VIT, pixels()),
        "vit-classifier": ("ViTForImageClassification", VIT, pixels()),
        "deit": ("DeiTModel", VIT, pixels()),
        "beit": ("BeitModel", VIT, pixels()),
        "data2vec-vision": ("Data2VecVisionModel", VIT, pixels()),
        "dinov2": ("Dinov2Model", {**VIT, "mlp_ratio": 2}, pixels()),
        "vit-mae": ("ViTMSNModel", VIT, pixels()),
        "yolos": ("YolosModel", {**VIT, "image_size": [32, 32]}, pixels()),
        "swin": ("SwinModel", SWIN, pixels()),
        "swinv2": ("Swinv2Model", SWIN, pixels()),
        "convnext": ("ConvNextModel", {**STAGES, "image_size": 32}, pixels()),
        "convnextv2": ("ConvNextV2Model", {**STAGES, "image_size": 32}, pixels()),
        "resnet": ("ResNetForImageClassification", {**STAGES, "embedding_size": 8, "num_labels": 10}, pixels(64)),
        "regnet": ("RegNetModel", {**STAGES, "embedding_size": 8, "groups_width": 8}, pixels(64)),
        "segformer": (
            "SegformerForSemanticSegmentation",
            {
                "hidden_sizes": [8, 16, 24, 32],
                "depths": [1, 1, 1, 1],
                "num_attention_heads": [1, 2, 2, 4],
                "decoder_hidden_size": 16,
            },
            pixels(64),
        ),
        "mobilevit": (
            "MobileViTModel",
            {**SMALL, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64},
            pixels(64),
        ),
        "mobilenet-v1": ("MobileNetV1Model", {"depth_multiplier": 0.25}, pixels(64)),
        "mobilenet-v2": ("MobileNetV2Model", {"depth_multiplier": 0.35}, pixels(64)),
        "efficientnet": (
            "EfficientNetModel",
            {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
            pixels(64),
        ),
        "levit": (
            "LevitModel",
            {
                "image_size": 64,
                "hidden_sizes": [16, 24, 32],
                "num_attention_heads": [2, 3, 4],
                "depths": [1, 1, 1],
                "key_dim": [8, 8, 8],
            },
            pixels(64),
        ),
        "poolformer": ("PoolFormerModel", {**STAGES}, pixels(64)),
        "pvt": (
            "PvtModel",
            {
                **STAGES,
                "image_size": 64,
                "num_attention_heads": [1, 2, 3, 4],
                "sequence_reduction_ratios": [8, 4, 2, 1],
            },
            pixels(64),
        ),
        "focalnet": (
            "FocalNetModel",
            {
                "image_size": 32,
                "patch_size": 2,
                "embed_dim": 8,
                "depths": [1, 1, 1, 1],
                "focal_levels": [1, 1, 1, 1],
                "focal_windows": [3, 3, 3, 3],
            },
            pixels(),
        ),
        "dpt": (
            "DPTForDepthEstimation",
            {
                **VIT,
                "num_hidden_layers": 4,
                "backbone_out_indices": [0, 1, 2, 3],
                "neck_hidden_sizes": [8, 16, 24, 32],
                "fusion_hidden_size": 16,
                "is_hybrid": False,
            },
            pixels(),
        ),
        "cvt": ("CvtModel", {"embed_dim": [8, 16, 32], "num_heads": [1, 2, 4], "depth": [1, 2, 3]}, pixels(64)),
        "superpoint": (
            "SuperPointForKeypointDetection",
            {"encoder_hidden_sizes": [16, 16, 32, 32], "decoder_hidden_size": 32, "descriptor_decoder_dim": 32},
            fixed(lambda: {"pixel_values": torch.randn(1, 3, 64, 64)}),
        ),
    },
)
