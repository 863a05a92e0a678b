"""What the front tells the processes of the stages: words of fixed number, so that they can be received before they come."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import torch

from stagepack.format.shapes import Symbol, format_range, size_in_range
from stagepack_loaders.distributed.process_group import ConnectionLostError
from stagepack_loaders.distributed.tensor_memory import allocate

CONTROL_TAG = 0
_WORD_BYTES = 8
_FIXED_WORDS = 3


class ControlKind(IntEnum):
    """What a process is to do."""

    RUN = 1
    END_SEQUENCE = 2
    RESET_STATE = 3
    SEED = 4
    CLOSE = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlMessage:
    """One message.

    Attributes:
        kind: what to do.
        number: the number of the request for `RUN`; the seed for `SEED`.
        sequence: the number of the sequence whose state is used or ended; 0 for the state of the stage itself.
        sizes: the sizes of the symbols that the inputs determine.
    """

    kind: ControlKind
    number: int = 0
    sequence: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)


def control_memory(symbols: Sequence[Symbol]) -> torch.Tensor:
    """Return memory for one message."""
    return allocate((_FIXED_WORDS + 2 * len(symbols)) * _WORD_BYTES)


def encode_control(message: ControlMessage, symbols: Sequence[Symbol]) -> torch.Tensor:
    """Return the bytes of a message."""
    words = [message.kind, message.number, message.sequence]
    for symbol in symbols:
        words += [symbol.name in message.sizes, message.sizes.get(symbol.name, 0)]
    return torch.tensor(words, dtype=torch.int64).view(torch.uint8)


def decode_control(memory: torch.Tensor, symbols: Sequence[Symbol]) -> ControlMessage:
    """Return the message of some bytes.

    Raises:
        ConnectionLostError: they are no message, or a size is out of its range: another program has connected.
    """
    kind, number, sequence, *symbol_words = memory.view(torch.int64).tolist()
    sizes = {}
    for symbol, is_known, size in zip(symbols, symbol_words[::2], symbol_words[1::2], strict=True):
        if is_known:
            if not size_in_range(symbol, size):
                raise ConnectionLostError(f"expected {format_range(symbol)} for {symbol.name!r}, found {size}")
            sizes[symbol.name] = size
    if kind not in list(ControlKind):
        raise ConnectionLostError(f"expected a control message, found the kind {kind}")
    return ControlMessage(kind=ControlKind(kind), number=number, sequence=sequence, sizes=sizes)
