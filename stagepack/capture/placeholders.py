"""Tokens that stand for images or sounds in the texts of a model of transformers."""

import inspect
import math
from collections.abc import Mapping
from typing import Any, Final

import torch

from stagepack.capture.example_tensors import configured
from stagepack.capture.fake_call import call_with_shapes
from stagepack.torch_internals import tree_leaves

# For each kind: the inputs, the fields of the token, and the method that computes what takes its place.
_KINDS: Final = (
    (("pixel_values",), ("image_token_id", "image_token_index"), "get_image_features"),
    (("pixel_values_videos",), ("video_token_id", "video_token_index"), "get_video_features"),
    (("input_features", "input_values"), ("audio_token_id", "audio_token_index"), "get_audio_features"),
)
_LENGTHS: Final = ("image_seq_length", "image_seq_len", "num_image_tokens", "mm_tokens_per_image")


def placeholder_tokens(model: Any, samples: Mapping[str, torch.Tensor], text_count: int) -> list[int]:
    """Return the tokens in each text that stand for images or sounds; none if the model has no such tokens.

    Args:
        model: a model of transformers.
        samples: the inputs that are no text.
        text_count: the number of texts, which have as many images or sounds.
    """
    tokens: list[int] = []
    for inputs, fields, method_name in _KINDS:
        token = next((value for field in fields if isinstance(value := getattr(model.config, field, None), int)), None)
        if token is not None and any(input_name in samples for input_name in inputs):
            tokens += [token] * _row_count(model, samples, method_name, text_count)
    return tokens


def _row_count(model: Any, samples: Mapping[str, torch.Tensor], method_name: str, text_count: int) -> int:
    """The number of rows that take the place of the tokens of one text."""
    owner = next((module for module in (model, getattr(model, "model", None)) if hasattr(module, method_name)), None)
    method = getattr(owner, method_name, None)
    if method is not None:
        method_parameters = inspect.signature(method).parameters
        call = call_with_shapes(
            model,
            method,
            {input_name: value for input_name, value in samples.items() if input_name in method_parameters},
        )
        features = getattr(call.result, "pooler_output", call.result)
        tensors = [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]
        if tensors:
            return sum(math.prod(tensor.shape[:-1]) for tensor in tensors) // text_count
    for grid_name in ("image_grid_thw", "video_grid_thw"):
        if grid_name in samples:
            merge_size = configured(model.config, "spatial_merge_size") or 1
            return int(samples[grid_name].prod(dim=1).sum()) // text_count // merge_size**2
    length = configured(model.config, *_LENGTHS)
    return length if isinstance(length, int) else 0
