"""torchvision's operator ``nms`` where its own does not load.

The wheel of the public index is built with CUDA, and does not load beside a CPU build of torch. Importing this module makes
``import torchvision`` work, with the operator that its detectors need, and no other.
"""

import importlib
import importlib.util
from pathlib import Path

import torch


def _loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return True  # not installed
    try:
        for path in Path(spec.origin).parent.glob("_C*.so"):
            torch.ops.load_library(path)
    except OSError:
        return False
    return True


def _nms(dets: torch.Tensor, scores: torch.Tensor, iou_threshold: float) -> torch.Tensor:
    """The boxes, the best first, that overlap no better one by more than a threshold."""
    x1, y1, x2, y2 = dets.unbind(1)
    areas = (x2 - x1) * (y2 - y1)
    order = scores.argsort(descending=True, stable=True)
    kept = []
    while order.numel():
        best, others = order[0], order[1:]
        kept.append(best)
        width = (torch.minimum(x2[best], x2[others]) - torch.maximum(x1[best], x1[others])).clamp(min=0)
        height = (torch.minimum(y2[best], y2[others]) - torch.maximum(y1[best], y1[others])).clamp(min=0)
        overlap = width * height / (areas[best] + areas[others] - width * height)
        order = others[overlap <= iou_threshold]
    return torch.stack(kept) if kept else order


if not _loads():
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.impl("nms", _nms, "CPU")
    boxes = importlib.import_module("torchvision.ops.boxes")
    boxes._assert_has_ops = lambda: None  # type: ignore[attr-defined]
