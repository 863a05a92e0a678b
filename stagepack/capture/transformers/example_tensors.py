"""Example tensors for the parameters of models of transformers, made by the configuration of the model.

Shape suffixes: b batch, s sequence, c channels, h height, w width.
"""

import contextlib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.checkpoint import DataNeededError
from stagepack.capture.inputs import Inputs, device_of, on_device_of
from stagepack.capture.model_runs import FakeCall, call_with_shapes, preserve_module
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.torch_internals import FakeTensor, tree_leaves

LARGEST_BATCH: Final = 1024
_LONGEST_SEQUENCE: Final = 4096  # tokens, where the configuration has no length
_IMAGE_SIZE: Final = 224  # pixels, where the configuration has no size
_WAVE_LENGTH: Final = 16_000  # samples: one second
_FRAME_COUNT: Final = 100
_TOKEN_COUNT: Final = 8
_DECODED_COUNT: Final = 6
# The configurations of encoders of images or sounds, inside the configuration of a model of several kinds of inputs.
_ENCODER_CONFIGS: Final = ("vision_config", "audio_config", "encoder", "backbone_config", "encoder_config")
# For each kind: the inputs, the fields of the token, and the method that computes what takes its place.
_KINDS: Final = (
    (("pixel_values",), ("image_token_id", "image_token_index"), "get_image_features"),
    (("pixel_values_videos",), ("video_token_id", "video_token_index"), "get_video_features"),
    (("input_features", "input_values"), ("audio_token_id", "audio_token_index"), "get_audio_features"),
)
_LENGTHS: Final = ("image_seq_length", "image_seq_len", "num_image_tokens", "mm_tokens_per_image")
# A model that makes a tensor of elements of another asks for data, but torch has no class for this error.
_NO_DATA: Final = "data is not allocated yet"


@dataclass(frozen=True, slots=True)
class ExampleTensor:
    """An example of one input."""

    tensor: torch.Tensor
    dims: dict[int, Dim] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ExampleSizes:
    """The dynamic sizes that the inputs of one example share."""

    batch: Dim
    # The most tokens of a sample.
    longest: int
    sequence: Dim

    @classmethod
    def of(cls, config: Any) -> "ExampleSizes":
        """Return the sizes of a model with a configuration."""
        longest = _longest_sequence(config)
        return cls(
            batch=Dim("batch", min=1, max=LARGEST_BATCH), longest=longest, sequence=Dim("sequence", min=1, max=longest)
        )


def _longest_sequence(config: Any) -> int:
    """The longest sequence that a configuration allows, in tokens."""
    text_config = config.get_text_config()
    for field_name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        length = getattr(text_config, field_name, None)
        if isinstance(length, int) and length > 2:
            return length
    return _LONGEST_SEQUENCE


def token_example(config: Any, sizes: ExampleSizes, placeholders: Sequence[int] = ()) -> ExampleTensor:
    """Return token ids. Each text begins with the `placeholders`, which stand for images or sounds."""
    tokens_bs = _token_ids(config, 2, _TOKEN_COUNT)
    if not placeholders:
        return ExampleTensor(tokens_bs, {0: sizes.batch, 1: sizes.sequence})
    # No other token may stand for an image by chance.
    other = next(token for token in range(len(placeholders) + 1) if token not in placeholders)
    tokens_bs = torch.where(torch.isin(tokens_bs, torch.tensor(placeholders)), other, tokens_bs)
    tokens_bs = torch.cat([torch.tensor(placeholders).expand(2, -1), tokens_bs], dim=1)
    sequence = Dim("sequence", min=len(placeholders), max=max(sizes.longest, tokens_bs.shape[1] + 1))
    return ExampleTensor(tokens_bs, {0: sizes.batch, 1: sequence})


def decoder_example(config: Any, sizes: ExampleSizes) -> ExampleTensor:
    """Return token ids for a decoder."""
    decoded = Dim("decoded", min=1, max=sizes.longest)
    return ExampleTensor(_token_ids(config, 2, _DECODED_COUNT), {0: sizes.batch, 1: decoded})


def configured_example(model: Any, parameter: str, sizes: ExampleSizes) -> ExampleTensor | None:
    """Return an example of an input that is no text, by the configuration of the model."""
    make = _MAKERS.get(parameter)
    shape = None if make is None else make(model)
    return None if shape is None else ExampleTensor(random_tensor(model.dtype, 2, *shape), {0: sizes.batch})


def several_images_example(model: Any, sizes: ExampleSizes) -> ExampleTensor:
    """Return an example of samples of several images: the frames of a video, or one image."""
    shape = (_frame_count(model) or 1, *_image_chw(model))
    return ExampleTensor(random_tensor(model.dtype, 2, *shape), {0: sizes.batch})


def random_tensor(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Return random numbers that are the same at each export."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _token_ids(config: Any, *shape: int) -> torch.Tensor:
    vocabulary_size: int = getattr(config.get_text_config(), "vocab_size", 128)
    return (torch.arange(math.prod(shape)) * 7 + 5).reshape(shape) % vocabulary_size


def _image_chw(model: Any) -> tuple[int, ...]:
    size = configured(model.config, "image_size", "img_size") or _IMAGE_SIZE
    height, width = (size, size) if isinstance(size, int) else size
    return (configured(model.config, "num_channels", "in_channels", "in_chans") or 3, height, width)


def _frame_count(model: Any) -> int | None:
    frame_count: int | None = configured(model.config, "num_frames", "frames_per_clip", "num_video_frames")
    return frame_count


def _images_or_frames(model: Any) -> tuple[int, ...]:
    """A model of videos gets several images."""
    frame_count = _frame_count(model)
    reads_videos = "video" in input_kinds(model) and "image" not in input_kinds(model)
    image_chw = _image_chw(model)
    return (frame_count, *image_chw) if reads_videos and frame_count else image_chw


def _spectrogram(model: Any) -> tuple[int, ...] | None:
    """``[mel bins, frames]`` of the length that the encoder of a Whisper takes, or ``[frames, features]``."""
    feature_count = configured(model.config, "feature_projection_input_dim", "input_feat_per_channel")
    if feature_count is not None:
        return (_FRAME_COUNT, feature_count)
    mel_count = configured(model.config, "num_mel_bins")
    positions = configured(model.config, "max_source_positions")
    return None if mel_count is None or positions is None else (mel_count, positions * 2)


def _wave(model: Any) -> tuple[int, ...]:
    channels = configured(model.config, "audio_channels")
    return (_WAVE_LENGTH,) if channels is None else (channels, _WAVE_LENGTH)


def _series(model: Any) -> tuple[int, ...] | None:
    """The past of a time series, with the values before it that a model of lags reads."""
    config = model.config
    length: int | None = configured(config, "context_length")
    if length is None:
        return None
    channels: int = getattr(config, "num_input_channels", None) or getattr(config, "input_size", None) or 1
    past = length + max(getattr(config, "lags_sequence", None) or (0,))
    return (past,) if channels == 1 and hasattr(config, "lags_sequence") else (past, channels)


def _series_times(model: Any) -> tuple[int, ...] | None:
    series = _series(model)
    return None if series is None else (series[0], getattr(model.config, "num_time_features", 0))


_MAKERS: Final = {
    "pixel_values": _images_or_frames,
    "pixel_values_videos": _images_or_frames,
    "input_features": _spectrogram,
    "input_values": _wave,
    "past_values": _series,
    "past_observed_mask": _series,
    "past_time_features": _series_times,
}


def input_kinds(model: Any) -> tuple[str, ...]:
    """Return the kinds of inputs of a model: text, image, video, audio and time."""
    kinds = model.input_modalities
    return (kinds,) if isinstance(kinds, str) else tuple(kinds)


def configured(config: Any, *field_names: str) -> Any:
    """Return a field of a configuration, or of the configuration of its encoder; None if neither has it."""
    for candidate in _with_encoder_configs(config):
        for field_name in field_names:
            value = getattr(candidate, field_name, None)
            if value is not None:
                return value
    return None


def _with_encoder_configs(config: Any) -> Iterator[Any]:
    yield config
    for name in _ENCODER_CONFIGS:
        inner = getattr(config, name, None)
        if inner is not None and hasattr(inner, "to_dict"):
            yield from _with_encoder_configs(inner)


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
        # The number of rows of padded sounds and images depends on their masks.
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
