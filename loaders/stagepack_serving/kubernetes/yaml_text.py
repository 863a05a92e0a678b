"""Plain data as YAML: dicts, lists, texts, integers and booleans, which is what the objects of a deployment are made of."""

import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

# Texts that YAML 1.1 and 1.2 read as themselves without quotes. All others are quoted as in JSON, which YAML reads.
_PLAIN_TEXT = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_OTHER_MEANINGS = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null"})


def to_yaml(documents: Iterable[dict[str, Any]]) -> str:
    """Return some documents as YAML.

    Law: a reader of YAML returns the same data. The texts must be printable.

    documents: not empty, as are all dicts in them but those of a value.
    """
    return "---\n".join("".join(f"{line}\n" for line in _mapping_lines(document)) for document in documents)


def _mapping_lines(mapping: dict[str, Any]) -> Iterator[str]:
    for key, value in mapping.items():
        if isinstance(value, dict) and value:
            yield f"{_scalar(key)}:"
            yield from (f"  {line}" for line in _mapping_lines(value))
        elif isinstance(value, list) and value:
            yield f"{_scalar(key)}:"
            yield from (f"  {line}" for line in _list_lines(value))
        else:
            yield f"{_scalar(key)}: {_scalar(value)}"


def _list_lines(items: list[Any]) -> Iterator[str]:
    for item in items:
        if isinstance(item, dict) and item:
            first_line, *further_lines = _mapping_lines(item)
            yield f"- {first_line}"
            yield from (f"  {line}" for line in further_lines)
        else:
            yield f"- {_scalar(item)}"


def _scalar(value: Any) -> str:
    """A text, an integer, a boolean, or an empty dict or list."""
    if isinstance(value, str) and _PLAIN_TEXT.fullmatch(value) and value.lower() not in _OTHER_MEANINGS:
        return value
    return json.dumps(value, ensure_ascii=False)
