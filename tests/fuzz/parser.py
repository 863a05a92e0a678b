"""What is fuzzed: a parser of bytes that other people wrote, with contents to begin from."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class FuzzedParser:
    """A parser.

    Attributes:
        read: reads a content. A `StagepackError` refuses it; any other exception is a finding.
        seeds: contents that reach much of the parser.
        decode: the structure of a content as plain containers. It may raise any exception for a content without structure.
        encode: the content of a structure, with its lengths and digests made right. It may raise any exception for what is no structure.
        close: gives back what `read` holds, such as an event loop.
    """

    read: Callable[[bytes], object]
    seeds: Sequence[bytes]
    decode: Callable[[bytes], Any]
    encode: Callable[[Any], bytes]
    close: Callable[[], None] = lambda: None
