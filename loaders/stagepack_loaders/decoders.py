"""Which entry points generate: their inputs, and the sizes of their caches. The schema has the contract (SPEC.md, "Generation")."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy

from stagepack.errors import InputError
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Dim, Symbol
from stagepack.format.tree import ValueLeaf, leaves_of_tree
from stagepack_loaders.elements import Array

# The entry point whose result a decoder takes as `encoder_hidden_states`.
ENCODER_NAME: Final = "encode"

_TOKEN_INPUTS: Final = frozenset({"input_ids", "cache_position", "attention_mask"})
_MOVES: Final = "cache_moves"
_ENCODER_INPUT: Final = "encoder_hidden_states"
_ENCODER_MASK: Final = "encoder_attention_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderFacts:
    """What generation needs to know of a decoder.

    Attributes:
        max_positions: the number of tokens that its cache holds.
        logits: the edge of its result.
        takes_encoder: whether it reads what an encoder returns.
        encoder_positions: the size of the mask of the encoder's rows; None if the decoder has no such mask.
        max_batch: the largest number of texts; None for any.
        has_rows: whether each text has positions, and a row of the cache, of its own.
        moves_rows: whether a text may move to another row.
        attends_to_filled: whether a call attends to as many slots as its mask has, and not to the whole cache.
        zero_slot: the slot of each row that holds zeros in all calls; None for a cache without one.
    """

    max_positions: int
    logits: Edge
    takes_encoder: bool
    encoder_positions: int | None
    max_batch: int | None = None
    has_rows: bool = False
    moves_rows: bool = False
    attends_to_filled: bool = False
    zero_slot: int | None = None


def decoder_facts(entry_point: EntryPoint) -> DecoderFacts | None:
    """Return what generation needs to know of a decoder."""
    inputs = {edge.name: edge for edge in entry_point.inputs}
    results = [leaf for leaf in leaves_of_tree(entry_point.signature.result) if isinstance(leaf, ValueLeaf)]
    unknown_inputs = inputs.keys() - _TOKEN_INPUTS - {_ENCODER_INPUT, _ENCODER_MASK, _MOVES}
    if not inputs.keys() >= _TOKEN_INPUTS or unknown_inputs or len(results) != 1:
        return None
    position_rank = len(inputs["cache_position"].shape)
    mask = inputs["attention_mask"].shape
    max_positions = largest_size(mask[1], entry_point.symbols) if len(mask) == 2 else None
    encoder_positions = _mask_size(inputs[_ENCODER_MASK]) if _ENCODER_MASK in inputs else None
    if max_positions is None or not inputs["input_ids"].shape or position_rank not in (1, 2):
        return None
    [logits] = (edge for edge in entry_point.edges if edge.name == results[0].name)
    max_batch = largest_size(inputs["input_ids"].shape[0], entry_point.symbols)
    move_count = largest_size(inputs[_MOVES].shape[0], entry_point.symbols) if _MOVES in inputs else None
    # Slots of tokens, one of padding, and one of zeros. Bundles from before have a move for each slot of a token.
    has_zeros = max_batch is not None and move_count == max_batch * (max_positions + 2)
    return DecoderFacts(
        max_positions=max_positions,
        logits=logits,
        takes_encoder=_ENCODER_INPUT in inputs,
        encoder_positions=encoder_positions,
        max_batch=max_batch,
        has_rows=position_rank == 2,
        moves_rows=_MOVES in inputs,
        attends_to_filled=not isinstance(mask[1], int),
        zero_slot=max_positions + 1 if has_zeros else None,
    )


def check_token_slots(facts: DecoderFacts, inputs: Mapping[str, Array]) -> None:
    """Check that the mask of a call has the slot of each token that is read: a token that sees no key would be answered by a mean.

    In the first version of the contract nothing is checked: the padding of a text has slots there, whose mask is 0.
    """
    positions, mask = inputs["cache_position"], inputs["attention_mask"]
    if not facts.has_rows or len(positions) != len(mask):
        return
    is_read = (positions >= 0) & (positions < facts.max_positions)
    has_slot = positions < mask.shape[1]
    is_seen = has_slot & (numpy.take_along_axis(mask, numpy.where(is_read & has_slot, positions, 0), 1) != 0)
    for row, index in numpy.argwhere(is_read & ~is_seen)[:1].tolist():
        raise InputError(
            f"attention_mask: expected 1 in the slot of each token that is read, found none in slot {positions[row, index]} of row {row}: "
            f"the slot of padding in cache_position is {facts.max_positions}"
        )


def generating_entry_point(bundle: Bundle) -> str | None:
    """Return the entry point of a bundle that generates: a decoder, with the encoder that it needs beside it."""
    names = {entry_point.name for entry_point in bundle.entry_points}
    for entry_point in bundle.entry_points:
        facts = decoder_facts(entry_point)
        if facts is not None and (ENCODER_NAME in names or not facts.takes_encoder):
            return entry_point.name
    return None


def largest_size(dim: Dim, symbols: Iterable[Symbol]) -> int | None:
    """Return the largest size of a dimension."""
    if isinstance(dim, int):
        return dim
    return next((symbol.max for symbol in symbols if symbol.name == dim), None)


def _mask_size(mask: Edge) -> int | None:
    """The number of slots that a mask [batch, slots] has; None if it varies."""
    size = mask.shape[1] if len(mask.shape) == 2 else None
    return size if isinstance(size, int) else None
