"""All fuzzed parsers, by name."""

import importlib
from collections.abc import Mapping
from typing import Final

from tests.fuzz.parser import FuzzedParser

# The module of `tests.fuzz` that has the function `NAME_parser`. It is imported when its parser is fuzzed: the server takes seconds.
PARSER_MODULES: Final[Mapping[str, str]] = {
    "manifest": "file_parsers",
    "graph": "file_parsers",
    "weights": "file_parsers",
    "onnx": "file_parsers",
    "rest": "request_parsers",
    "grpc": "request_parsers",
}


def fuzzed_parser(name: str) -> FuzzedParser:
    """Return a parser by its name."""
    module = importlib.import_module(f"tests.fuzz.{PARSER_MODULES[name]}")
    parser: FuzzedParser = getattr(module, f"{name}_parser")()
    return parser
