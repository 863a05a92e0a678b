"""Models of transformers from small configurations: random weights, nothing downloaded."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case

BATCH = Dim("batch", min=1, max=64)
SEQUENCE = Dim("sequence", min=3, max=100)
DECODED = Dim("decoded", min=2, max=64)
TOKENS = {0: BATCH, 1: SEQUENCE}

# How a family names its sizes; a configuration takes those that it knows.
SMALL: Mapping[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SMALL_PAIR: Mapping[str, Any] = {
    "vocab_size": 128,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
}

Given = Callable[[], Inputs]
Sizes = Mapping[str, Any]


def table(row: str, entries: Mapping[str, tuple[str, Sizes, Given]], *, operators: str = "") -> list[Case]:
    """A case for each architecture: its name, the class of its model, the sizes of its configuration, and an example."""
    return [
        Case(
            name=f"{row.replace(' ', '-')}-{name}",
            row=row,
            build=functools.partial(_build, *entry),
            operators=operators,
        )
        for name, entry in entries.items()
    ]


def _build(model: str, sizes: Sizes, given: Given) -> tuple[torch.nn.Module, Inputs]:
    import transformers

    cls = getattr(transformers, model)
    return cls(cls.config_class(**sizes)).eval(), given()


def ids(*shape: int) -> torch.Tensor:
    """Token ids of a vocabulary of 128, none of them special."""
    return torch.randint(3, 128, shape)


def tokens(*masks: str, **more: Any) -> Given:
    """Token ids ``[batch, sequence]`` with masks of the same shape, any number of them and of any length."""

    def given() -> Inputs:
        kwargs = {"input_ids": ids(2, 8)} | {name: torch.ones(2, 8, dtype=torch.long) for name in masks}
        return Inputs(kwargs=kwargs | more, dynamic_shapes=dict.fromkeys(kwargs, TOKENS))

    return given


def pixels(size: int = 32, channels: int = 3, name: str = "pixel_values", **more: Any) -> Given:
    """Pictures ``[batch, channels, size, size]``, any number of them."""

    def given() -> Inputs:
        return Inputs(kwargs={name: torch.randn(2, channels, size, size)} | more, dynamic_shapes={name: {0: BATCH}})

    return given


def pair(**more: Any) -> Given:
    """Token ids for an encoder ``[batch, sequence]`` and for a decoder ``[batch, decoded]``."""

    def given() -> Inputs:
        kwargs = {"input_ids": ids(2, 8), "decoder_input_ids": ids(2, 6)}
        shapes = {"input_ids": TOKENS, "decoder_input_ids": {0: BATCH, 1: DECODED}}
        return Inputs(kwargs=kwargs | {"use_cache": False} | more, dynamic_shapes=shapes)

    return given


def fixed(make: Callable[[], dict[str, Any]]) -> Given:
    """Inputs whose sizes are fixed."""
    return lambda: Inputs(kwargs=make())


def batched(make: Callable[[], dict[str, Any]]) -> Given:
    """Inputs of which every tensor has the batch as its first dimension, and nothing else may change."""

    def given() -> Inputs:
        kwargs = make()
        tensors = {name for name, value in kwargs.items() if isinstance(value, torch.Tensor)}
        return Inputs(kwargs=kwargs, dynamic_shapes={name: {0: BATCH} for name in tensors})

    return given
