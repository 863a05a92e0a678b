"""A ResNet to serve: `stagepack export resnet.py:make --inputs resnet.py:inputs`. Its weights are random; load your own here."""

import torch
from transformers import ResNetConfig, ResNetForImageClassification

import stagepack


def make() -> torch.nn.Module:
    """Return a small ResNet with ten classes for images of 224 by 224 pixels."""
    torch.manual_seed(0)
    config = ResNetConfig(  # type: ignore[call-arg]
        embedding_size=16, hidden_sizes=[16, 32, 64, 128], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config).eval()


def inputs() -> stagepack.Inputs:
    """Return example inputs with a dynamic batch size: 1 to 256 images."""
    batch_size = torch.export.Dim("batch", min=1, max=256)
    return stagepack.Inputs(
        kwargs={"pixel_values": torch.randn(2, 3, 224, 224)}, dynamic_shapes={"pixel_values": {0: batch_size}}
    )
