"""Models of pictures and video: timm, torchvision, segmentation-models-pytorch."""

import importlib
from typing import Any

import torch

from tests.libraries.case import Make, batch_of, fixed, made, table


def _timm(name: str, **sizes: Any) -> Make:
    return made("timm:create_model", name, pretrained=False, num_classes=10, **sizes)


def _vision(model: str, **sizes: Any) -> Make:
    return made(f"torchvision:models.{model}", **sizes)


def _batched_nms(boxes: torch.Tensor, scores: torch.Tensor, idxs: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """`torchvision.ops.batched_nms` without the questions how many boxes there are, which need the data."""
    from torchvision.ops import nms

    largest = torch.cat([boxes.flatten(), boxes.new_zeros(1)]).max()
    kept: torch.Tensor = nms(boxes + (idxs.to(boxes) * (largest + 1))[:, None], scores, iou_threshold)
    return kept


def _detector(name: str, **sizes: Any) -> Make:
    def make() -> Any:
        boxes = importlib.import_module("torchvision.ops.boxes")
        boxes.batched_nms = _batched_nms  # type: ignore[attr-defined]
        # Masks stay as the head makes them, 28 x 28 each: the loop that pastes each one into the picture takes as many steps as there are.
        transform = importlib.import_module("torchvision.models.detection.transform")
        transform.paste_masks_in_image = lambda masks, *_: masks  # type: ignore[attr-defined]
        # So do heatmaps of keypoints, 56 x 56 each, for the loop that searches the maximum of each one.
        roi_heads = importlib.import_module("torchvision.models.detection.roi_heads")
        roi_heads.heatmaps_to_keypoints = lambda maps, _: (maps, maps.amax((2, 3)))  # type: ignore[attr-defined]
        transform.resize_keypoints = lambda maps, *_: maps  # type: ignore[attr-defined]
        return _vision("get_model", name=name, weights=None, weights_backbone=None, num_classes=4, **sizes)()

    return make


# Otherwise the models enlarge each picture to at least 800 pixels.
_SIZES = {"min_size": 64, "max_size": 96}


def _one_picture() -> tuple[list[torch.Tensor]]:
    return ([torch.rand(3, 64, 64)],)


def _mvit() -> torch.nn.Module:
    from torchvision.models.video.mvit import MSBlockConfig, MViT

    blocks = [
        MSBlockConfig(
            num_heads=1 if number == 0 else 2,
            input_channels=16 if number < 2 else 32,
            output_channels=16 if number == 0 else 32,
            kernel_q=[3, 3, 3],
            kernel_kv=[3, 3, 3],
            stride_q=[1, 2, 2] if number == 1 else [1, 1, 1],
            stride_kv=[1, 2, 2],
        )
        for number in range(3)
    ]
    model: torch.nn.Module = MViT(
        spatial_size=(32, 32),
        temporal_size=4,
        block_setting=blocks,
        residual_pool=True,
        residual_with_cls_embed=False,
        rel_pos_embed=True,
        proj_after_attn=True,
        num_classes=5,
    )
    return model


_SMALL = batch_of((3, 32, 32))
_MIDDLE = batch_of((3, 64, 64))

CASES = table(
    "timm",
    {
        "vit": (_timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_heads=3), _SMALL),
        "vit-any-size": (
            _timm("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=3, dynamic_img_size=True),
            _SMALL,
        ),
        "deit3": (_timm("deit3_small_patch16_224", img_size=32, embed_dim=48, depth=3, num_heads=3), _SMALL),
        "eva02": (
            _timm("eva02_tiny_patch14_224", img_size=28, embed_dim=48, depth=3, num_heads=3),
            batch_of((3, 28, 28)),
        ),
        "convnext": (_timm("convnext_atto", depths=(1, 1, 2, 1), dims=(8, 16, 24, 32)), _MIDDLE),
        "efficientnet": (_timm("efficientnet_lite0"), _MIDDLE),
        "mobilenetv3": (_timm("mobilenetv3_small_050"), _MIDDLE),
        "swin": (
            _timm(
                "swin_tiny_patch4_window7_224",
                img_size=32,
                patch_size=2,
                window_size=4,
                embed_dim=12,
                depths=(2, 2),
                num_heads=(2, 4),
            ),
            _SMALL,
        ),
        "swinv2": (
            _timm(
                "swinv2_tiny_window8_256",
                img_size=32,
                patch_size=2,
                window_size=4,
                embed_dim=12,
                depths=(2, 2),
                num_heads=(2, 4),
            ),
            _SMALL,
        ),
        "nfnet": (_timm("nf_regnet_b0"), _MIDDLE),
        "maxvit": (
            _timm("maxvit_rmlp_pico_rw_256", img_size=64, embed_dim=(32, 32, 64, 64), depths=(1, 1, 1, 1)),
            _MIDDLE,
        ),
        "coatnet": (
            _timm("coatnet_nano_rw_224", img_size=64, embed_dim=(32, 32, 64, 64), depths=(1, 1, 1, 1)),
            _MIDDLE,
        ),
        "regnet": (_timm("regnetx_002"), _MIDDLE),
        "mixer": (
            made(
                "timm.models.mlp_mixer:MlpMixer", num_classes=10, img_size=64, patch_size=16, embed_dim=32, num_blocks=3
            ),
            _MIDDLE,
        ),
        "sequencer-of-lstms": (
            _timm("sequencer2d_s", img_size=56, layers=(1, 1, 1, 1), embed_dims=(16, 32, 32, 32)),
            batch_of((3, 56, 56)),
        ),
        "mobilevit": (_timm("mobilevitv2_050"), _MIDDLE),
    },
)
CASES += table(
    "torchvision",
    {
        "resnet": (_vision("resnet18"), _MIDDLE),
        "mobilenet-v3": (_vision("mobilenet_v3_small"), _MIDDLE),
        "shufflenet": (_vision("shufflenet_v2_x0_5"), _MIDDLE),
        "densenet": (_vision("DenseNet", growth_rate=8, block_config=(2, 2, 2), num_init_features=16), _MIDDLE),
        "vit": (
            _vision(
                "VisionTransformer", image_size=32, patch_size=8, num_layers=3, num_heads=2, hidden_dim=32, mlp_dim=64
            ),
            _SMALL,
        ),
        "swin": (
            _vision(
                "SwinTransformer", patch_size=[4, 4], embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4]
            ),
            _MIDDLE,
        ),
        "maxvit": (
            _vision(
                "MaxVit",
                input_size=(64, 64),
                stem_channels=16,
                partition_size=2,
                block_channels=[16, 32],
                block_layers=[1, 1],
                head_dim=8,
                stochastic_depth_prob=0.0,
            ),
            _MIDDLE,
        ),
        "segmentation-lraspp": (_vision("get_model", name="lraspp_mobilenet_v3_large", weights_backbone=None), _MIDDLE),
        "segmentation-deeplab": (
            _vision("get_model", name="deeplabv3_mobilenet_v3_large", weights_backbone=None, num_classes=5),
            _MIDDLE,
        ),
        "segmentation-fcn": (_vision("get_model", name="fcn_resnet50", weights_backbone=None, num_classes=5), _MIDDLE),
        "video-resnet": (_vision("get_model", name="r3d_18", num_classes=5), batch_of((3, 4, 32, 32))),
        "video-swin": (
            _vision(
                "video.SwinTransformer3d",
                patch_size=[2, 4, 4],
                embed_dim=16,
                depths=[1, 1],
                num_heads=[2, 2],
                window_size=[2, 4, 4],
                num_classes=5,
            ),
            batch_of((3, 4, 32, 32)),
        ),
        "video-mvit": (_mvit, batch_of((3, 4, 32, 32))),
        "optical-flow-raft": (_vision("get_model", name="raft_small"), batch_of((3, 128, 128), (3, 128, 128))),
    },
)
CASES += table(
    "torchvision",
    {
        "detection-ssdlite": (_detector("ssdlite320_mobilenet_v3_large"), fixed(_one_picture)),
        "detection-retinanet": (_detector("retinanet_resnet50_fpn", **_SIZES, score_thresh=0.0), fixed(_one_picture)),
        "detection-fcos": (_detector("fcos_resnet50_fpn", **_SIZES, score_thresh=0.0), fixed(_one_picture)),
        "detection-faster-rcnn": (
            _detector("fasterrcnn_mobilenet_v3_large_320_fpn", **_SIZES, box_score_thresh=0.0),
            fixed(_one_picture),
        ),
        "detection-keypoint-rcnn": (
            _detector("keypointrcnn_resnet50_fpn", **_SIZES, box_score_thresh=0.0),
            fixed(_one_picture),
        ),
        "detection-mask-rcnn": (
            _detector("maskrcnn_resnet50_fpn", **_SIZES, box_score_thresh=0.0),
            fixed(_one_picture),
        ),
    },
    operators="tests.libraries.torchvision_operators",
)
CASES += table(
    "segmentation-models-pytorch",
    {
        "unet": (made("segmentation_models_pytorch:Unet", "resnet18", encoder_weights=None), _MIDDLE),
        "unet++": (made("segmentation_models_pytorch:UnetPlusPlus", "mobilenet_v2", encoder_weights=None), _MIDDLE),
        "fpn": (made("segmentation_models_pytorch:FPN", "efficientnet-b0", encoder_weights=None), _MIDDLE),
        "deeplabv3+": (made("segmentation_models_pytorch:DeepLabV3Plus", "resnet18", encoder_weights=None), _MIDDLE),
        "segformer": (made("segmentation_models_pytorch:Segformer", "mit_b0", encoder_weights=None), _MIDDLE),
    },
    libraries=("segmentation_models_pytorch",),
)
