"""Models of transformers as modules that generate: their caches are buffers of fixed size, which each call writes.

`stagepack_loaders.decoders` defines the inputs. Only models whose caches hold the keys and values of all tokens are supported.
"""

import contextlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers import AttentionInterface
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from transformers.modeling_outputs import BaseModelOutput

from stagepack.capture.user_model import take_parts
from stagepack.errors import UnsupportedError

# How transformers names the attention that a model uses, and where its configuration says so.
_PACKED_ATTENTION: Final = "stagepack_packed"
_ATTENTION_FIELD: Final = "_attn_implementation"
_LARGEST_INDEX: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheCall:
    """What a call does with a cache."""

    # The rows and slots that are written, [tokens]: first for the tokens of the call, then for tokens that move.
    rows: torch.Tensor
    slots: torch.Tensor
    # The number of slots that its tokens may see.
    seen_slots: Any
    # The number of tokens before the call, for models that take no positions.
    earlier_tokens: Any = 0
    # Where the tokens that move are, [moves] each.
    sources: tuple[torch.Tensor, torch.Tensor] | None = None


class BufferLayer(CacheLayerMixin):
    """The keys and values of one layer, in a buffer of a module.

    It is [rows, slots, heads, sizes of a key and of a value], so that a token is written as one piece.
    """

    is_compileable = True
    is_sliding = False

    def __init__(self, tokens: torch.Tensor, key_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.module = torch.nn.Module()
        self.module.register_buffer("tokens", tokens, persistent=False)
        self._sizes = [key_size, tokens.shape[3] - key_size]
        self._call: Any = None
        self.is_initialized = True

    def _tokens(self) -> torch.Tensor:
        """The buffer of the module, which a capture replaces while it runs the module."""
        return self.module.tokens  # type: ignore[return-value]

    def begin_call(self, call: CacheCall) -> None:
        """State what a call does with the cache."""
        self._call = call

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """See the base class; there is nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the keys and values of new tokens; return the keys and values of the visible slots."""
        call, tokens = self._call, self._tokens()
        written = torch.cat((key_states.transpose(1, 2), value_states.transpose(1, 2)), -1).flatten(0, 1)
        if call.sources is not None:
            written = torch.cat((written, tokens[call.sources]))
        tokens.index_put_((call.rows, call.slots), written)
        seen = tokens[: key_states.shape[0], : call.seen_slots].transpose(1, 2)
        keys, values = seen.split(self._sizes, -1)
        return keys, values

    def clear(self) -> None:
        """Set the buffer to zeros."""
        self._tokens().zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """See the base class."""
        return self._call.seen_slots, 0

    def get_seq_length(self) -> Any:
        """Return the number of tokens before this call."""
        return self._call.earlier_tokens

    def get_max_length(self) -> int:
        """See the base class."""
        size: int = self._tokens().shape[1]
        return size


# The attributes of the classes below begin with two underscores: Python adds the name of the class, so that no attribute hides a part of
# the model.
class GeneratingDecoder(torch.nn.Module):
    """A causal language model that generates. It has the parts of the model, and its caches."""

    # Bundles hold the name of this class, and the same model gives the same bytes wherever the class lies.
    __module__ = "stagepack.capture.transformers.generating_modules"

    def __init__(self, model: Any, max_positions: int, max_batch: int) -> None:
        super().__init__()
        windows = _windows(model, max_positions)
        with torch.no_grad():
            seen = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), use_cache=True)
        # Further slots: of padding, and of zeros, which no call writes. They replace what an earlier text has left in a row: a mask
        # that is added hides no key or value that is not finite.
        layers = _buffer_layers(seen.past_key_values, max_batch, max_positions + 2)
        take_parts(self, model, {"cache": _module_of(layers)})
        # In a tuple, else it would be a module of this one.
        self.__model = (model,)
        self.__layers = layers
        self.__windows = windows
        self.__group_size = _group_size(model)
        self.__max_positions = max_positions

    def forward(
        self,
        *,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        attention_mask: torch.Tensor,
        cache_moves: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the logits of the last token, [batch, vocabulary]."""
        (model,) = self.__model
        input_ids, cache_position = _refusing_negative(input_ids), _refusing_negative(cache_position)
        rows, slots, sources = _rows(cache_position), cache_position.flatten(), None
        if cache_moves is not None:
            cache_moves = _refusing_negative(cache_moves)
            source_rows, source_slots, target_rows, target_slots = cache_moves.unbind(1)
            rows, slots = torch.cat((rows, target_rows)), torch.cat((slots, target_slots))
            sources = (source_rows, source_slots)
        call = CacheCall(rows=rows, slots=slots, seen_slots=attention_mask.shape[1], sources=sources)
        for layer in self.__layers:
            layer.begin_call(call)
        masks = {
            layer_type: _causal_mask(attention_mask, cache_position, model.dtype, window, self.__group_size)
            for layer_type, window in self.__windows.items()
        }
        with _packed_attention(model.config, self.__group_size):
            result = model(
                input_ids=input_ids,
                attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
                position_ids=_position_ids(cache_position, self.__max_positions),
                past_key_values=Cache(layers=list(self.__layers)),
                use_cache=True,
                logits_to_keep=1,
            )
        logits: torch.Tensor = result.logits[:, -1]
        return logits

    def clear(self) -> None:
        """Forget all texts."""
        for layer in self.__layers:
            layer.clear()


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
        layers = _buffer_layers(seen.self_attention_cache, max_batch, max_positions + 1)
        cross_layers = _buffer_layers(seen.cross_attention_cache, max_batch, max_encoder_positions)
        take_parts(self, model, {"cache": _module_of(layers), "encoder_cache": _module_of(cross_layers)})
        self.__model = (model,)
        self.__layers = layers
        self.__cross_layers = cross_layers
        self.__max_rows = max_encoder_positions
        self.__takes_positions = "decoder_position_ids" in inspect.signature(model.forward).parameters

    def encode(self, **inputs: torch.Tensor) -> torch.Tensor:
        """Return the rows that the decoder reads, [batch, rows, hidden]."""
        (model,) = self.__model
        if "input_ids" in inputs:
            inputs["input_ids"] = _refusing_negative(inputs["input_ids"])
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
        input_ids, cache_position = _refusing_negative(input_ids), _refusing_negative(cache_position)
        positions = cache_position.expand(input_ids.shape)
        encoder_slots = torch.arange(encoder_hidden_states.shape[1], device=input_ids.device)
        encoder_positions = encoder_slots.expand(encoder_hidden_states.shape[:2])
        call = CacheCall(
            rows=_rows(positions),
            slots=positions.flatten(),
            seen_slots=attention_mask.shape[1],
            earlier_tokens=cache_position[0],
        )
        cross_call = CacheCall(
            rows=_rows(encoder_positions), slots=encoder_positions.flatten(), seen_slots=self.__max_rows
        )
        for layer, cross_layer in zip(self.__layers, self.__cross_layers, strict=True):
            layer.begin_call(call)
            cross_layer.begin_call(cross_call)
        further: dict[str, Any] = {}
        if self.__takes_positions:
            further["decoder_position_ids"] = cache_position.expand(input_ids.shape)
        if encoder_attention_mask is not None:
            is_seen = (encoder_attention_mask != 0)[:, None, None]
            further["attention_mask"] = _added_mask(is_seen, model.dtype)
        caches = EncoderDecoderCache(Cache(layers=list(self.__layers)), Cache(layers=list(self.__cross_layers)))
        caches.is_updated = dict.fromkeys(range(len(self.__layers)), False)
        result = model(
            encoder_outputs=BaseModelOutput(last_hidden_state=encoder_hidden_states),
            decoder_input_ids=input_ids,
            decoder_attention_mask=_causal_mask(attention_mask, cache_position[None], model.dtype),
            past_key_values=caches,
            use_cache=True,
            **further,
        )
        logits: torch.Tensor = result.logits[:, -1]
        return logits

    def clear(self) -> None:
        """Forget all texts."""
        for layer in (*self.__layers, *self.__cross_layers):
            layer.clear()


def _refusing_negative(indices: torch.Tensor) -> torch.Tensor:
    """Indices of which negative ones are beyond all that exists: else some operators of some runtimes would count them from the end."""
    return indices & _LARGEST_INDEX


def _rows(positions: torch.Tensor) -> torch.Tensor:
    """The row of the cache that each token has, [batch * length], by the positions of the tokens."""
    rows = torch.arange(positions.shape[0], device=positions.device)
    return rows[:, None].expand(positions.shape).flatten()


def _module_of(layers: list[BufferLayer]) -> torch.nn.Module:
    return torch.nn.ModuleList(layer.module for layer in layers)


def _buffer_layers(seen_cache: Cache, max_batch: int, slot_count: int) -> list[BufferLayer]:
    """The layers of a cache like one that the model has made."""
    layers = []
    for layer_number, layer in enumerate(seen_cache.layers):
        # Subclasses of the two may keep something else.
        is_known = type(layer) in (DynamicLayer, DynamicSlidingWindowLayer)
        if not isinstance(layer, DynamicLayer) or not is_known or layer.keys is None or layer.values is None:
            raise UnsupportedError(
                f"generation: expected caches of the keys and values of all tokens, found {type(layer).__name__} in layer {layer_number}"
            )
        key_size = layer.keys.shape[3]
        size = key_size + layer.values.shape[3]
        layers.append(BufferLayer(layer.keys.new_zeros(max_batch, slot_count, layer.keys.shape[1], size), key_size))
    return layers


def _causal_mask(
    attention_mask: torch.Tensor,
    cache_position: torch.Tensor,
    dtype: torch.dtype,
    window: int | None = None,
    group_size: int = 1,
) -> torch.Tensor:
    """What is added to the scores, [batch, 1, group size * length, slots]: each token sees the tokens up to itself, in its window."""
    slots = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    positions = cache_position[:, :, None]
    is_seen = (slots <= positions) & (attention_mask != 0)[:, None]
    if window is not None:
        is_seen &= slots > positions - window
    mask = _added_mask(is_seen[:, None], dtype)
    if group_size > 1:
        batch, _, length, slot_count = mask.shape
        mask = mask.expand(batch, group_size, length, slot_count).reshape(batch, 1, group_size * length, slot_count)
    return mask


def _added_mask(is_seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    # Not -inf: padding may see nothing, and its NaN would spread through the cache.
    return torch.where(is_seen, 0.0, torch.finfo(dtype).min).to(dtype)


def _position_ids(cache_position: torch.Tensor, max_positions: int) -> torch.Tensor:
    """The positions of tokens in their texts, [batch, length]. Padding, whose slot is `max_positions`, gets one that exists."""
    return cache_position % max_positions


def _windows(model: Any, max_positions: int) -> dict[str, int | None]:
    """How many tokens the layers of a model look back at, by the type of the layer; None for all."""
    config = model.config.get_text_config(decoder=True)
    window = getattr(config, "sliding_window", None)
    window = window if window is not None and window < max_positions else None
    layer_types = getattr(config, "layer_types", None) or ["sliding_attention"]
    windows = {"full_attention": None, "sliding_attention": window}
    if unknown := set(layer_types) - windows.keys():
        raise UnsupportedError(f"generation: expected layers of full or sliding attention, found {sorted(unknown)[0]}")
    return {layer_type: windows[layer_type] for layer_type in dict.fromkeys(layer_types)}


def _group_size(model: Any) -> int:
    """The number of heads that share keys and values, if `_attend_packed` takes the place of the attention of the model; else 1."""
    modules = model.modules()
    sizes = {module.num_key_value_groups for module in modules if hasattr(module, "num_key_value_groups")}
    is_replaced = getattr(model.config, _ATTENTION_FIELD) == "sdpa" and len(sizes) == 1
    return int(sizes.pop()) if is_replaced else 1


@contextlib.contextmanager
def _packed_attention(config: Any, group_size: int) -> Iterator[None]:
    """Let a model attend by `_attend_packed` if heads share keys and values."""
    if group_size == 1:
        yield
        return
    own_attention = getattr(config, _ATTENTION_FIELD)
    setattr(config, _ATTENTION_FIELD, _PACKED_ATTENTION)
    try:
        yield
    finally:
        setattr(config, _ATTENTION_FIELD, own_attention)


def _attend_packed(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend with the heads that share keys and values as one head with more queries.

    It takes 0.03 to 0.3 of the time of keys and values that are expanded, on a CPU with one token, and half of the time of `enable_gqa`.
    """
    batch, head_count, length, head_size = query.shape
    # Cloned: whether a view is possible would depend on the length, and bound it.
    packed = query.flatten().view(batch, key.shape[1], -1, head_size)
    attended = torch.nn.functional.scaled_dot_product_attention(
        packed, key, value, attn_mask=attention_mask, scale=scaling
    )
    attended = attended.flatten().view(batch, head_count, length, value.shape[3])
    return attended.transpose(1, 2), None


AttentionInterface.register(_PACKED_ATTENTION, _attend_packed)
