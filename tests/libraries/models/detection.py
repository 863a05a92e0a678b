"""Models of ultralytics and SAM 2: they find and outline things in pictures."""

from typing import Any

import torch

from tests.libraries.case import Make, batch_of, fixed, made, table


def _yolo(class_name: str, config: str, **sizes: Any) -> Make:
    return made(f"ultralytics.nn.tasks:{class_name}", f"{config}.yaml", verbose=False, **sizes)


def _sam2_image_encoder() -> torch.nn.Module:
    from sam2.modeling.backbones.hieradet import Hiera
    from sam2.modeling.backbones.image_encoder import FpnNeck, ImageEncoder
    from sam2.modeling.position_encoding import PositionEmbeddingSine

    trunk = Hiera(
        embed_dim=16,
        num_heads=1,
        stages=(1, 2, 3, 1),
        global_att_blocks=(4, 5),
        window_spec=(8, 4, 4, 2),
        window_pos_embed_bkg_spatial_size=(7, 7),
    )
    neck = FpnNeck(
        position_encoding=PositionEmbeddingSine(num_pos_feats=32, normalize=True),
        d_model=32,
        backbone_channel_list=[128, 64, 32, 16],
        fpn_top_down_levels=[2, 3],
        fpn_interp_model="nearest",
    )
    encoder: torch.nn.Module = ImageEncoder(trunk=trunk, neck=neck, scalp=1)
    return encoder


def _sam2_mask_decoder() -> torch.nn.Module:
    from sam2.modeling.sam.mask_decoder import MaskDecoder
    from sam2.modeling.sam.transformer import TwoWayTransformer

    decoder: torch.nn.Module = MaskDecoder(
        transformer_dim=32,
        transformer=TwoWayTransformer(depth=2, embedding_dim=32, num_heads=2, mlp_dim=64),
        iou_head_hidden_dim=32,
        pred_obj_scores=True,
    )
    return decoder


def _prompts() -> tuple[Any, ...]:
    points = torch.rand(2, 3, 2) * 64, torch.ones(2, 3, dtype=torch.int32)
    return points, torch.tensor([[1.0, 2.0, 30.0, 40.0], [5.0, 6.0, 50.0, 60.0]]), torch.randn(2, 1, 16, 16)


CASES = table(
    "ultralytics",
    {
        "detect": (_yolo("DetectionModel", "yolo11n"), batch_of((3, 64, 64))),
        "detect-v8": (_yolo("DetectionModel", "yolov8n"), batch_of((3, 64, 64))),
        "detect-without-nms": (_yolo("DetectionModel", "yolo26n"), batch_of((3, 64, 64))),
        "segment": (_yolo("SegmentationModel", "yolo11n-seg"), batch_of((3, 64, 64))),
        "pose": (_yolo("PoseModel", "yolo11n-pose"), batch_of((3, 64, 64))),
        "oriented-boxes": (_yolo("OBBModel", "yolo11n-obb"), batch_of((3, 64, 64))),
        "classify": (_yolo("ClassificationModel", "yolo11n-cls"), batch_of((3, 64, 64))),
        "rt-detr": (_yolo("RTDETRDetectionModel", "rtdetr-resnet50"), batch_of((3, 64, 64))),
    },
)
CASES += table(
    "sam2",
    {
        "image-encoder": (_sam2_image_encoder, batch_of((3, 128, 128))),
        "prompt-encoder": (
            made(
                "sam2.modeling.sam.prompt_encoder:PromptEncoder",
                embed_dim=32,
                image_embedding_size=(4, 4),
                input_image_size=(64, 64),
                mask_in_chans=8,
            ),
            fixed(_prompts),
        ),
        "mask-decoder": (
            _sam2_mask_decoder,
            fixed(
                lambda: (
                    torch.randn(1, 32, 4, 4),
                    torch.randn(1, 32, 4, 4),
                    torch.randn(2, 4, 32),
                    torch.randn(2, 32, 4, 4),
                    True,
                    True,
                )
            ),
        ),
    },
)
