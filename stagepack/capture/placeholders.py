"""Tokens that stand for images or sounds in the texts of a model of transformers."""

import contextlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch

from stagepack.capture.checkpoint import DataNeededError
from stagepack.capture.example_tensors import configured
from stagepack.capture.fake_call import FakeCall, call_with_shapes
from stagepack.capture.inputs import Inputs, device_of, on_device_of
from stagepack.capture.module_state import preserve_module
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.torch_internals import FakeTensor, tree_leaves

# For each kind: the inputs, the fields of the token, and the method that computes what takes its place.
_KINDS: Final = (
    (("pixel_values",), ("image_token_id", "image_token_index"), "get_image_features"),
    (("pixel_values_videos",), ("video_token_id", "video_token_index"), "get_video_features"),
    (("input_features", "input_values"), ("audio_token_id", "audio_token_index"), "get_audio_features"),
)
_LENGTHS: Final = ("image_seq_length", "image_seq_len", "num_image_tokens", "mm_tokens_per_image")


# A model that makes a tensor of elements of another asks for data, but torch has no class for this error.
_NO_DATA: Final = "data is not allocated yet"


def asks_for_data(call: FakeCall) -> bool:
    """Whether a call with shapes alone has ended because the model asked for data."""
    return not call.succeeded and (call.error is None or _NO_DATA in call.error)


def placeholder_tokens(model: Any, samples: Mapping[str, torch.Tensor], text_count: int) -> list[int]:
    """Return the tokens in each text that stand for images or sounds; none if the model has no such tokens."""
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
        method_inputs = {input_name: value for input_name, value in samples.items() if input_name in method_parameters}
        call = call_with_shapes(model, method, method_inputs)
        # Of padded sounds and images, the number of rows depends on their masks.
        result = _computed(model, method, method_inputs) if asks_for_data(call) else call.result
        features = getattr(result, "pooler_output", result)
        tensors = [leaf for leaf in tree_leaves(features) if isinstance(leaf, torch.Tensor)]
        if tensors:
            return sum(math.prod(tensor.shape[:-1]) for tensor in tensors) // text_count
    for grid_name in ("image_grid_thw", "video_grid_thw"):
        if grid_name in samples:
            merge_size = configured(model.config, "spatial_merge_size") or 1
            return int(samples[grid_name].prod(dim=1).sum()) // text_count // merge_size**2
    length = configured(model.config, *_LENGTHS)
    return length if isinstance(length, int) else 0


def _computed(model: Any, method: Callable[..., Any], method_inputs: Mapping[str, torch.Tensor]) -> Any:
    """What a method computes with data; None if it fails, or no weights have data."""
    if device_of(model).type == "meta":
        return None
    if any(isinstance(parameter, FakeTensor) for parameter in model.parameters()):
        raise DataNeededError("the number of tokens that stand for an image or a sound depends on data")
    inputs = on_device_of(model, Inputs(kwargs=method_inputs))
    with preserve_module(model), suppress_warnings(), torch.no_grad(), contextlib.suppress(Exception):
        return method(**inputs.kwargs)
    return None
