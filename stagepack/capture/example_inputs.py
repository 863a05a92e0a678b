"""Example inputs for models of transformers, by the kind of model.

Shape suffixes: b batch, s sequence, c channels, h height, w width, m mel bins, f frames.
"""

import inspect
import math
from dataclasses import replace
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from stagepack.capture.sentence_pipeline import SentencePipeline
from stagepack.errors import CaptureError

_LARGEST_BATCH = 1024
# The names of the dimensions that count tokens.
_SEQUENCES = ("sequence", "decoded")
_LONGEST_SEQUENCE = 4096  # tokens, where the configuration has no length


def example_inputs(model: Any) -> Inputs:
    """Make an example for a model of transformers, with dynamic batch and sequence where its kind has them.

    Args:
        model: a model of transformers.

    Raises:
        CaptureError: the kind of model is not known.
    """
    if isinstance(model, SentencePipeline):
        return model.example()
    parameters = inspect.signature(model.forward).parameters
    constants = {"use_cache": False} if "use_cache" in parameters else {}
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters:
        return _encoder_decoder_inputs(model, constants)
    if model.main_input_name == "input_ids" and not model.config.is_encoder_decoder:
        return _token_inputs(model.config, constants, with_mask="attention_mask" in parameters)
    if model.main_input_name == "pixel_values":
        return _image_inputs(model, constants)
    raise CaptureError(
        f"{type(model).__name__} takes {model.main_input_name!r}, for which no example is known: "
        "pass --inputs FILE.py:FUNCTION"
    )


def with_longer_sequences(inputs: Inputs) -> Inputs:
    """Return inputs whose sequences have two tokens or more: some models compute one token in another way than several."""
    longer = {
        id(dim): Dim(dim.__name__, min=2, max=dim.max)
        for dims in inputs.dynamic_shapes.values()
        for dim in dims.values()
        if dim.__name__ in _SEQUENCES
    }
    return replace(
        inputs,
        dynamic_shapes={
            parameter: {position: longer.get(id(dim), dim) for position, dim in dims.items()}
            for parameter, dims in inputs.dynamic_shapes.items()
        },
    )


def smallest_inputs(inputs: Inputs) -> Inputs:
    """Return the inputs with the smallest size in each dynamic dimension."""
    kwargs = dict(inputs.kwargs)
    for parameter, dims in inputs.dynamic_shapes.items():
        for position, dim in dims.items():
            kwargs[parameter] = kwargs[parameter].narrow(position, 0, dim.min)
    return replace(inputs, kwargs=kwargs)


def with_auto_dims(inputs: Inputs) -> Inputs:
    """Replace the named dimensions of inputs by ``Dim.AUTO``: torch decides which of them are dynamic."""
    auto_shapes = {parameter: dict.fromkeys(dims, Dim.AUTO) for parameter, dims in inputs.dynamic_shapes.items()}
    return replace(inputs, dynamic_shapes=auto_shapes)


def _batch_dim() -> Dim:
    return Dim("batch", min=1, max=_LARGEST_BATCH)


def _token_inputs(config: Any, constants: dict[str, Any], *, with_mask: bool) -> Inputs:
    dims_bs = {0: _batch_dim(), 1: Dim("sequence", min=1, max=_longest_sequence(config))}
    tensors = {"input_ids": _token_ids(config, 2, 8)}
    if with_mask:
        tensors["attention_mask"] = torch.ones_like(tensors["input_ids"])
    return Inputs(kwargs={**tensors, **constants}, dynamic_shapes=dict.fromkeys(tensors, dims_bs))


def _encoder_decoder_inputs(model: Any, constants: dict[str, Any]) -> Inputs:
    config, encoder_input = model.config, model.main_input_name
    batch, longest = _batch_dim(), _longest_sequence(config)
    if encoder_input == "input_ids":
        example, dims = _token_ids(config, 2, 8), {0: batch, 1: Dim("sequence", min=1, max=longest)}
    else:
        example, dims = _audio_features_bmf(model), {0: batch}
    return Inputs(
        kwargs={encoder_input: example, "decoder_input_ids": _token_ids(config, 2, 6), **constants},
        dynamic_shapes={encoder_input: dims, "decoder_input_ids": {0: batch, 1: Dim("decoded", min=1, max=longest)}},
    )


def _image_inputs(model: Any, constants: dict[str, Any]) -> Inputs:
    config = model.config
    size = getattr(config, "image_size", 224) or 224
    height, width = (size, size) if isinstance(size, int) else size
    pixels_bchw = _random(model.dtype, 2, getattr(config, "num_channels", 3), height, width)
    return Inputs(kwargs={"pixel_values": pixels_bchw, **constants}, dynamic_shapes={"pixel_values": {0: _batch_dim()}})


def _longest_sequence(config: Any) -> int:
    """The longest sequence that the configuration allows, in tokens."""
    text_config = config.get_text_config()
    for field in ("max_position_embeddings", "n_positions", "max_target_positions"):
        length = getattr(text_config, field, None)
        if isinstance(length, int) and length > 2:
            return length
    return _LONGEST_SEQUENCE


def _token_ids(config: Any, *shape: int) -> torch.Tensor:
    vocabulary_size: int = getattr(config.get_text_config(), "vocab_size", 128)
    return (torch.arange(math.prod(shape)) * 7 + 5).reshape(shape) % vocabulary_size


def _audio_features_bmf(model: Any) -> torch.Tensor:
    """Audio features of the length that the encoder of a Whisper takes."""
    config = model.config
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise CaptureError(f"{type(model).__name__}: no example is known: pass --inputs FILE.py:FUNCTION")
    return _random(model.dtype, 2, config.num_mel_bins, config.max_source_positions * 2)


def _random(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers that are the same at each export."""
    return torch.rand(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)
