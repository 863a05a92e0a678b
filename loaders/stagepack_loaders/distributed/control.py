"""What a process is to do: words of fixed number, with which each head begins."""

import struct
from collections.abc import Mapping, Sequence
from enum import IntEnum

from msgspec import Struct, structs

from stagepack.format.shapes import Symbol, format_range, size_in_range
from stagepack_loaders.distributed.process_group import ConnectionLostError

WORD_BYTES = 8
# Of messages by which the front announces requests with bodies, and that it closes; routes have the tags above.
ANNOUNCEMENT_TAG = 0
_FIXED_WORDS = struct.Struct("<4q")


class ControlKind(IntEnum):
    """What a process is to do."""

    RUN = 1
    FAIL = 2  # send on that the request has failed
    END_SEQUENCE = 3
    RESET_STATE = 4
    SEED = 5
    CLOSE = 6
    START_TRACE = 7
    STOP_TRACE = 8


# Of messages with the values of a request; the others are commands.
REQUEST_KINDS = (ControlKind.RUN, ControlKind.FAIL)
_KINDS = {kind.value: kind for kind in ControlKind}


class ControlMessage(Struct, frozen=True, kw_only=True):
    """One request or command.

    Attributes:
        kind: what to do.
        number: its number; all processes get the messages in the order of their numbers, without a gap.
        sequence: the number of the sequence whose state is used or ended; 0 for the state of the stage itself.
        seed: the seed of `SEED`.
        size_words: the sizes of the symbols that the inputs determine; see `encode_sizes`. Empty for commands.
    """

    kind: ControlKind
    number: int
    sequence: int = 0
    seed: int = 0
    size_words: bytes = b""

    def failed(self) -> "ControlMessage":
        """The request after a stage has failed on it."""
        return structs.replace(self, kind=ControlKind.FAIL)


def control_bytes(symbols: Sequence[Symbol]) -> int:
    """The size of the words of a message."""
    return _FIXED_WORDS.size + _size_struct(len(symbols)).size


def write_control(memory: memoryview, message: ControlMessage) -> None:
    """Write the words of a message at the beginning of some memory."""
    _FIXED_WORDS.pack_into(memory, 0, message.kind, message.number, message.sequence, message.seed)
    if message.size_words:
        memory[_FIXED_WORDS.size : _FIXED_WORDS.size + len(message.size_words)] = message.size_words


def read_control(memory: memoryview, symbol_count: int) -> ControlMessage:
    """Return the message at the beginning of some memory."""
    kind, number, sequence, seed = _FIXED_WORDS.unpack_from(memory)
    if kind not in _KINDS:
        raise ConnectionLostError(f"expected a control message, found the kind {kind}")
    size_words = b""
    if symbol_count and kind in REQUEST_KINDS:
        size_words = bytes(memory[_FIXED_WORDS.size : _FIXED_WORDS.size + 2 * WORD_BYTES * symbol_count])
    return ControlMessage(kind=_KINDS[kind], number=number, sequence=sequence, seed=seed, size_words=size_words)


def encode_sizes(sizes: Mapping[str, int], symbols: Sequence[Symbol]) -> bytes:
    """Return two words for each symbol: whether its size is known, and the size."""
    words = [word for symbol in symbols for word in (symbol.name in sizes, sizes.get(symbol.name, 0))]
    return _size_struct(len(symbols)).pack(*words)


def decode_sizes(size_words: bytes, symbols: Sequence[Symbol]) -> dict[str, int]:
    """Return the sizes of symbols; the reverse of `encode_sizes`."""
    words = _size_struct(len(symbols)).unpack(size_words)
    sizes = {}
    for symbol, is_known, size in zip(symbols, words[::2], words[1::2], strict=True):
        if is_known:
            if not size_in_range(symbol, size):
                raise ConnectionLostError(f"expected {format_range(symbol)} for {symbol.name!r}, found {size}")
            sizes[symbol.name] = size
    return sizes


def _size_struct(symbol_count: int) -> struct.Struct:
    return struct.Struct(f"<{2 * symbol_count}q")
