"""Models of transformers as modules that generate: their caches are buffers of fixed size, which each call writes.

`stagepack_loaders.generation.decoders` defines the inputs. Only models whose caches hold the keys and values of all tokens are supported.
"""

import inspect
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from stagepack.capture.model_runs import take_parts
from stagepack.errors import UnsupportedError


class BufferLayer(CacheLayerMixin):
    """The keys and values of one layer, in buffers of a module."""

    is_compileable = True
    is_sliding = False

    def __init__(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = torch.nn.Module()
        self.module.register_buffer("keys", keys, persistent=False)
        self.module.register_buffer("values", values, persistent=False)
        self._positions = torch.zeros(1, dtype=torch.int64)
        self._earlier_tokens: Any = 0
        self.is_initialized = True

    def _tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The buffers of the module, which a capture replaces while it runs the module."""
        return self.module.keys, self.module.values  # type: ignore[return-value]

    def begin_call(self, positions: torch.Tensor, earlier_tokens: Any) -> None:
        """State the slots that the tokens of a call take, [length]."""
        self._positions = positions
        self._earlier_tokens = earlier_tokens

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See the base class; there is nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens, and return those of all slots."""
        keys, values = (buffer[: key_states.shape[0]] for buffer in self._tensors())
        keys.index_copy_(2, self._positions, key_states)
        values.index_copy_(2, self._positions, value_states)
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See the base class."""
        return self.get_max_length(), 0

    def get_seq_length(self) -> Any:
        """Return the number of tokens before those of this call."""
        return self._earlier_tokens

    def get_max_length(self) -> int:
        """See the base class."""
        size: int = self._tensors()[0].shape[2]
        return size


# The attributes of the classes below begin with two underscores: Python adds the name of the class, so that none of them hides a part of
# the model.
class GeneratingDecoder(torch.nn.Module):
    """A causal language model that generates. It has the parts of the model, and its caches."""

    def __init__(self, model: Any, max_positions: int, max_batch: int) -> None:
        super().__init__()
        _check_windows(model, max_positions)
        with torch.no_grad():
            seen = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True)
        layers = _buffer_layers(seen.past_key_values, max_batch, max_positions)
        take_parts(self, model, {"cache": _module_of(layers)})
        # In a tuple, else it would be a module of this one.
        self.__model = (model,)
        self.__layers = layers

    def forward(
        self, *, input_ids: torch.Tensor, cache_position: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits of the last token, [batch, vocabulary]."""
        (model,) = self.__model
        for layer in self.__layers:
            layer.begin_call(cache_position, cache_position[0])
        result = model(
            input_ids=input_ids,
            attention_mask=_causal_mask(attention_mask, cache_position, model.dtype),
            position_ids=_position_ids(attention_mask, cache_position),
            past_key_values=Cache(layers=list(self.__layers)),
            use_cache=True,
            logits_to_keep=1,
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits


class GeneratingSeq2Seq(torch.nn.Module):
    """A model of an encoder and a decoder that generates, by the methods `encode` and `decode`. It has the parts of the model."""

    def __init__(self, model: Any, max_positions: int, max_encoder_positions: int, max_batch: int) -> None:
        super().__init__()
        with torch.no_grad():
            rows = torch.zeros(
                1, max_encoder_positions, model.config.hidden_size, dtype=model.dtype, device=model.device
            )
            tokens = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
            seen = model(
                encoder_outputs=BaseModelOutput(last_hidden_state=rows), decoder_input_ids=tokens, use_cache=True
            ).past_key_values
        layers = _buffer_layers(seen.self_attention_cache, max_batch, max_positions)
        cross_layers = _buffer_layers(seen.cross_attention_cache, max_batch, max_encoder_positions)
        take_parts(self, model, {"cache": _module_of(layers), "encoder_cache": _module_of(cross_layers)})
        self.__model = (model,)
        self.__layers = layers
        self.__cross_layers = cross_layers
        self.__takes_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters

    def encode(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the rows that the decoder reads, [batch, rows, hidden]."""
        (model,) = self.__model
        rows: torch.Tensor = model.get_encoder()(**inputs).last_hidden_state
        return rows

    def decode(
        self,
        *,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        encoder_attention_mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the last token, [batch, vocabulary]. The rows of the encoder are kept from row 0 on."""
        (model,) = self.__model
        for layer in self.__layers:
            layer.begin_call(cache_position, cache_position[0])
        rows = torch.arange(encoder_hidden_states.shape[1], device=input_ids.device)
        for layer in self.__cross_layers:
            layer.begin_call(rows, 0)
        further: dict[str, Any] = {}
        if self.__takes_positions:
            further["decoder_position_ids"] = _position_ids(attention_mask, cache_position)
        if encoder_attention_mask is not None:
            is_seen = (encoder_attention_mask != 0)[:, None, None]
            further["attention_mask"] = _added_mask(is_seen, model.dtype)
        caches = EncoderDecoderCache(Cache(layers=list(self.__layers)), Cache(layers=list(self.__cross_layers)))
        caches.is_updated = dict.fromkeys(range(len(self.__layers)), False)
        result = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoder_hidden_states),
            decoder_input_ids=input_ids,
            decoder_attention_mask=_causal_mask(attention_mask, cache_position, model.dtype),
            past_key_values=caches,
            use_cache=True,
            **further,
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits


def _module_of(layers: list[BufferLayer]) -> torch.nn.Module:
    return torch.nn.ModuleList(layer.module for layer in layers)


def _buffer_layers(seen_cache: Cache, max_batch: int, max_positions: int) -> list[BufferLayer]:
    """The layers of a cache like one that the model has made."""
    layers = []
    for layer_number, layer in enumerate(seen_cache.layers):
        if type(layer) is not DynamicLayer or layer.keys is None or layer.values is None:
            raise UnsupportedError(
                f"generation: expected caches of the keys and values of all tokens, found {type(layer).__name__} in layer {layer_number}"
            )
        keys, values = (
            torch.zeros(max_batch, seen.shape[1], max_positions, seen.shape[3], dtype=seen.dtype, device=seen.device)
            for seen in (layer.keys, layer.values)
        )
        layers.append(BufferLayer(keys, values))
    return layers


def _causal_mask(attention_mask: torch.Tensor, cache_position: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is added to the scores, [batch, 1, length, positions]: each token sees the tokens before it, and itself."""
    slots = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    is_earlier = slots[None, :] < cache_position[:, None]
    # Padding sees itself: a row without any slot would be NaN, and NaN spreads through the cache.
    is_itself = slots[None, :] == cache_position[:, None]
    is_seen = (is_earlier[None, None] & (attention_mask != 0)[:, None, None]) | is_itself[None, None]
    return _added_mask(is_seen, dtype)


def _added_mask(is_seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)


def _position_ids(attention_mask: torch.Tensor, cache_position: torch.Tensor) -> torch.Tensor:
    """The positions of the tokens in their texts, which begin after the padding, [batch, length]."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, cache_position]


def _check_windows(model: Any, max_positions: int) -> None:
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    if window is not None and window < max_positions and "sliding_attention" in layer_types:
        raise UnsupportedError(
            f"generation: the model looks back {window} tokens only, a cache of {max_positions} positions further: choose at most {window}"
        )
