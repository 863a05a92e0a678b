"""What is fuzzed: parsers of bytes that other people wrote, with contents to begin from, by name."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, kw_only=True)
class FuzzedParser:
    read: Callable[[bytes], object]  # reads a content. A `StagepackError` refuses it; any other exception is a finding.
    seeds: Sequence[bytes]  # contents that reach much of the parser
    # The structure of a content as plain containers. It may raise any exception for a content without structure.
    decode: Callable[[bytes], Any]
    # The content of a structure, with its lengths and digests made right. It may raise any exception for what is no structure.
    encode: Callable[[Any], bytes]
    close: Callable[[], None] = lambda: None  # gives back what `read` holds, such as an event loop


# The module of `tests.fuzz` that has the function `NAME_parser`. It is imported when its parser is fuzzed: the server takes seconds.
PARSER_MODULES: Final[Mapping[str, str]] = {
    "manifest": "file_parsers",
    "graph": "file_parsers",
    "weights": "file_parsers",
    "onnx": "file_parsers",
    "adapter": "adapter_parsers",
    "delta": "delta_parsers",
    "part": "delta_parsers",
    "published": "checkpoint_delta_parsers",
    "frame": "checkpoint_delta_parsers",
    "rest": "request_parsers",
    "grpc": "request_parsers",
}


def fuzzed_parser(name: str) -> FuzzedParser:
    module = importlib.import_module(f"tests.fuzz.{PARSER_MODULES[name]}")
    parser: FuzzedParser = getattr(module, f"{name}_parser")()
    return parser
