"""What the rules of several files share: names, strict JSON (SPEC E1, E2), and the error that reports what is broken."""

import collections
import contextlib
import itertools
import json
import keyword
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import msgspec

from stagepack.errors import DigestError, FormatError, LimitError, Problem
from stagepack.format import limits

MANIFEST_NAME = "manifest.json"
# The configuration of a model of transformers, beside its weights or in a bundle.
MODEL_CONFIG_NAME = "config.json"
# The settings of an adapter of peft, in its own folder.
PEFT_SETTINGS_NAME = "adapter_config.json"
SIGNATURE_NAME = "model.sig"
INDEX_NAME = "model.safetensors.index.json"
PADDING_PREFIX = "__padding__"
# The key of a weight header whose value is no tensor but a dict of strings. No reader of a bundle uses it.
METADATA_KEY = "__metadata__"

FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,198}[A-Za-z0-9_-])?", re.ASCII)
# The name of a dtype, a device type, a layout or a memory format (M11).
WORD_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
DECIMAL_PATTERN = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")
# What `msgspec.json.decode` raises for bytes that are not JSON in UTF-8, are nested too deep, or are of another type.
JSON_ERRORS: Final = (msgspec.DecodeError, RecursionError, UnicodeDecodeError)

# By the letter of the rules that are broken.
_ERROR_CLASSES: Final = {"D": DigestError, "L": LimitError}
# A problem in one file: the number of the rule, the location in the file, and a message.
BrokenRule = tuple[str, str, str]


def is_identifier(value_name: str) -> bool:
    """Whether a value may have this name: ASCII, not a Python keyword, not too long (G1)."""
    well_formed = value_name.isidentifier() and value_name.isascii() and len(value_name) <= limits.NAME_CHARACTERS
    return well_formed and not keyword.iskeyword(value_name)


def is_tensor_name(tensor_name: str) -> bool:
    """Whether a tensor in a weight file may have this name (G9)."""
    reserved = tensor_name.startswith(PADDING_PREFIX) or tensor_name == METADATA_KEY
    return 0 < len(tensor_name) <= limits.NAME_CHARACTERS and not reserved


def split_call_path(path: str) -> tuple[str, str]:
    """Split the path of a module call into the path of the module and the number of the call in digits: empty for the first call."""
    module_path, separator, call_number = path.rpartition("@")
    return (module_path, call_number) if separator and call_number.isdecimal() else (path, "")


def rule_error(rule: str, location: str, message: str) -> FormatError:
    """Return the error of one broken rule."""
    return _error_of([Problem(rule=rule, where=location, message=message)])


def raise_problems(problems: Iterable[Problem]) -> None:
    """Raise one error with all problems, if there are any.

    An iterator, such as the problems of a graph from a stranger, is read up to `limits.REPORTED_PROBLEMS` problems. A list, such as the
    damaged files of a bundle, is reported whole.
    """
    reported = problems if isinstance(problems, list) else list(itertools.islice(problems, limits.REPORTED_PROBLEMS))
    if reported:
        raise _error_of(reported)


def _error_of(problems: list[Problem]) -> FormatError:
    """The error whose class is that of the rules, by their letter, if this is the same for all of them."""
    letters = {problem.rule[0] for problem in problems}
    error_class = _ERROR_CLASSES.get(letters.pop(), FormatError) if len(letters) == 1 else FormatError
    return error_class(problems)


def format_names(listed_names: Sequence[object]) -> str:
    """Return the first names of a sequence as text, for a message."""
    return ", ".join(str(listed_name)[:80] for listed_name in listed_names[:9]) or "none"


def parse_json(content: bytes, file_name: str) -> Any:
    """Parse JSON strictly: duplicate keys, NaN, infinities, lone surrogates and the integer ``-0`` are refused."""

    def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        fields = dict(pairs)
        if len(fields) != len(pairs):
            [(duplicate, _)] = collections.Counter(key for key, _ in pairs).most_common(1)
            raise rule_error("E2", file_name, f"duplicate key {duplicate[:80]!r}")
        return fields

    with typed_errors(file_name, "JSON"):
        # msgspec is stricter than json, but accepts duplicate keys.
        try:
            msgspec.json.decode(content)
        except msgspec.DecodeError as error:
            raise type(error)(f"{error}{_infinite_field(content)}") from None
        return json.loads(content.decode(), object_pairs_hook=unique_keys, parse_int=_parse_integer)


def _infinite_field(content: bytes) -> str:
    """Say which field of JSON has a number that no float holds; nothing if the content is malformed in another way."""
    names = list[str]()

    def note(pairs: list[tuple[str, Any]]) -> None:
        names.extend(
            name
            for name, value in pairs
            for number in (value if isinstance(value, list) else [value])
            if isinstance(number, float) and not math.isfinite(number)
        )

    with contextlib.suppress(ValueError, RecursionError):
        json.loads(content, object_pairs_hook=note, parse_int=float)
    return f": the field {names[0][:80]!r} has a number that no float holds: expected a finite one" if names else ""


def _parse_integer(text: str) -> int:
    """Parse an integer of JSON. Others than Python read ``-0`` as the float -0.0."""
    if text == "-0":
        raise ValueError("found the integer -0, expected 0 or -0.0")
    return int(text)


@contextmanager
def deep_nesting_refused(file_name: str) -> Iterator[None]:
    """Refuse content that is nested deeper than Python can walk: from 3.12 on, the decoders, which are in C, go deeper than that."""
    try:
        yield
    except RecursionError:
        raise rule_error("L2", file_name, "nested too deep") from None


@contextmanager
def typed_errors(file_name: str, encoding: str) -> Iterator[None]:
    """Convert the exceptions of the decoders to errors of stagepack."""
    try:
        with deep_nesting_refused(file_name):
            yield
    except msgspec.ValidationError as error:
        raise rule_error("E3", file_name, str(error)[:300]) from None
    # Bytes that are not UTF-8 raise a ValueError.
    except (msgspec.DecodeError, ValueError) as error:
        raise rule_error("E1", file_name, f"not {encoding}: {str(error)[:300]}") from None


def refuse_encoding(file_name: str, decoded: Any, expected: Any) -> None:
    """Raise the error for content that is not the one encoding of its value."""
    difference = _first_difference(decoded, expected, "$")
    message = difference or "duplicate key, fields out of order, or a value that is not in its shortest form"
    raise rule_error("E2", file_name, message)


def _first_difference(decoded: Any, expected: Any, path: str) -> str | None:
    """The first location where the decoded content has fields or items that its one encoding does not have, if there is one."""
    if isinstance(decoded, dict) and isinstance(expected, dict):
        extra_key = next((key for key in decoded if key not in expected), None)
        if extra_key is not None:
            return (
                f"{path}: the field {str(extra_key)[:80]!r} is unknown, or has its default value and must be left out"
            )
        pairs = ((decoded[key], expected[key], f"{path}.{key}") for key in decoded)
    elif isinstance(decoded, list | tuple) and isinstance(expected, list | tuple):
        if len(decoded) != len(expected):
            return f"{path}: expected {len(expected)} items, found {len(decoded)}"
        pairs = ((*pair, f"{path}[{index}]") for index, pair in enumerate(zip(decoded, expected, strict=True)))
    else:
        return None
    return next(filter(None, (_first_difference(*pair) for pair in pairs)), None)
