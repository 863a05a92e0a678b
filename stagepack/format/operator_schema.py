"""The schema of an operator, such as ``aten::relu(Tensor self) -> Tensor``, and when calls mean the same under a later one.

The text in a bundle comes from strangers, so it is read here and not by the parser of torch, which a hostile text can crash.
"""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, NamedTuple, TypeVar

from stagepack.format import limits

_OPENING: Final = {"(": ")", "[": "]"}
_SCHEMA: Final = re.compile(r"(?P<name>\w+::\w+(\.\w+)?)(?P<rest>\(.*)", re.ASCII)
_ALIAS_ANNOTATION: Final = re.compile(r"[\w\]]\(([a-z][a-z0-9_|]*!?( -> [a-z0-9_*|]+)?)\)")
_PARAMETER_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Types that take all values of another type.
_WIDER_TYPES: Final = {"int": {"SymInt", "Scalar"}, "float": {"SymFloat", "Scalar"}, "bool": {"SymBool", "Scalar"}}
_Member = TypeVar("_Member")


class SchemaParameter(NamedTuple):
    """A parameter of an operator."""

    type: str  # its type with its alias annotation, such as ``Tensor(a!)`` or ``SymInt[2]?``
    name: str
    default: str | None  # the text of its default value; None if it has none
    keyword_only: bool  # whether it is passed by name only


class OperatorSchema(NamedTuple):
    """A schema."""

    name: str  # the operator with its overload, such as ``aten::add.Tensor``
    parameters: tuple[SchemaParameter, ...]
    results: tuple[str, ...]  # the types of its results, with their names if they have some


def parse_schema(text: str) -> OperatorSchema | None:
    """Return the schema that a text stands for, or None if the text is no schema."""
    match = _SCHEMA.fullmatch(text) if len(text) <= limits.SCHEMA_CHARACTERS else None
    closing = _end_of_bracket(match["rest"]) if match is not None else None
    if match is None or closing is None:
        return None
    arguments, arrow, results = (
        match["rest"][1:closing],
        match["rest"][closing + 1 : closing + 5],
        match["rest"][closing + 5 :],
    )
    if arrow != " -> ":
        return None
    if results.startswith("(") and _end_of_bracket(results) == len(results) - 1:
        results = results[1:-1]
    try:
        return OperatorSchema(match["name"], tuple(_parse_parameters(arguments)), tuple(_split(results)))
    except _NoSchemaError:
        return None


@functools.lru_cache(maxsize=1024)
def schema_parameters(text: str) -> tuple[str, ...] | None:
    """Return the names of the parameters of a schema, in order; None if the text is no schema."""
    # Nearly all schemas are read so: parsing takes a millisecond.
    declarations, _, _ = text.partition("(")[2].rpartition(") -> ")
    names = tuple(
        part.rpartition(" ")[2].partition("=")[0] for part in declarations.split(", ") if part not in ("*", "")
    )
    if '"' not in text and "[" not in declarations.replace("[]", "") and all(map(_PARAMETER_NAME.fullmatch, names)):
        return names
    schema = parse_schema(text)
    return None if schema is None else tuple(parameter.name for parameter in schema.parameters)


class _NoSchemaError(Exception):
    """A text is not a schema."""


class SchemaEffects(NamedTuple):
    """What the alias annotations of a schema say, such as ``Tensor(a!) self``."""

    mutates: frozenset[str]  # the parameters whose memory the operator writes
    # The indices of the results that have an alias set such as ``a`` in their annotation, by the name of the set.
    results_of_set: Mapping[str, tuple[int, ...]]
    parameters_of_set: Mapping[str, tuple[str, ...]]  # the same for the parameters

    def aliases(self) -> Iterator[tuple[int, str]]:
        """Yield the pairs (index of a result, parameter) that may share memory, with repeats. There may be very many."""
        for alias_set, result_indices in self.results_of_set.items():
            for parameter_name in self.parameters_of_set.get(alias_set, ()):
                for result_index in result_indices:
                    yield result_index, parameter_name


# Effects of honest schemas are small; the effects of the longest texts take 100 kB.
@functools.lru_cache(maxsize=256)
def schema_effects(text: str) -> SchemaEffects | None:
    """Return the effects that a schema states; None if the text is no schema, or too long for one."""
    if len(text) > limits.SCHEMA_CHARACTERS:
        return None
    if not _ALIAS_ANNOTATION.search(text):
        # Most operators: parsing takes a millisecond.
        return SchemaEffects(frozenset(), {}, {})
    schema = parse_schema(text)
    if schema is None:
        return None
    return SchemaEffects(
        frozenset(parameter.name for parameter in schema.parameters if "!" in _alias_sets(parameter.type)),
        _members_of_sets((_alias_sets(result), result_index) for result_index, result in enumerate(schema.results)),
        _members_of_sets((_alias_sets(parameter.type), parameter.name) for parameter in schema.parameters),
    )


def _members_of_sets(members: Iterable[tuple[set[str], _Member]]) -> dict[str, tuple[_Member, ...]]:
    """What has each alias set in its annotation, from pairs (alias sets, member)."""
    members_of_set: dict[str, list[_Member]] = {}
    for alias_sets, member in members:
        for alias_set in alias_sets - {"!"}:
            members_of_set.setdefault(alias_set, []).append(member)
    return {alias_set: tuple(listed) for alias_set, listed in members_of_set.items()}


def _alias_sets(type_text: str) -> set[str]:
    """The names before the arrow in the annotation of a type, such as ``(a! -> a|b)``, with ``!`` if it is written."""
    match = _ALIAS_ANNOTATION.search(type_text)
    return set(re.findall(r"\w+|!", match[1].split("->")[0])) if match is not None else set()


def is_backward_compatible(schema: OperatorSchema, earlier: OperatorSchema) -> bool:
    """Return whether calls that were made under an earlier schema mean the same under a schema.

    Parameters may be added if they have a default value, and a type may become one that takes more values. Source: the rules of
    ``FunctionSchema::isBackwardCompatibleWith`` of PyTorch.
    """
    if schema.name != earlier.name or schema.results != earlier.results:
        return False
    by_position = [parameter for parameter in schema.parameters if not parameter.keyword_only]
    by_name = {parameter.name: parameter for parameter in schema.parameters}
    used: set[str] = set()
    for position, parameter in enumerate(earlier.parameters):
        found = by_name.get(parameter.name)
        if found is None or not _takes(found, parameter):
            return False
        if not parameter.keyword_only and (position >= len(by_position) or by_position[position] is not found):
            return False
        used.add(found.name)
    return all(parameter.default is not None for parameter in schema.parameters if parameter.name not in used)


def _takes(parameter: SchemaParameter, earlier: SchemaParameter) -> bool:
    """Whether a parameter takes all that an earlier one took, and has its default value."""
    if earlier.default is not None and parameter.default != earlier.default:
        return False
    earlier_type, optional = earlier.type.removesuffix("?"), parameter.type.endswith("?")
    if earlier.type.endswith("?") and not optional:
        return False
    current_type = parameter.type.removesuffix("?")
    earlier_item, _, earlier_list = earlier_type.partition("[")
    current_item, _, current_list = current_type.partition("[")
    return earlier_list == current_list and (
        earlier_item == current_item or current_item in _WIDER_TYPES.get(earlier_item, ())
    )


def _parse_parameters(text: str) -> Iterator[SchemaParameter]:
    """Yield the parameters."""
    keyword_only = False
    for part in _split(text):
        if part == "*" and not keyword_only:
            keyword_only = True
            continue
        type_text, _, declaration = _partition(part, " ")
        name, equals, default = declaration.partition("=")
        if not type_text or not _PARAMETER_NAME.fullmatch(name) or (equals and not default):
            raise _NoSchemaError
        yield SchemaParameter(type_text, name, default if equals else None, keyword_only)


def _split(text: str) -> list[str]:
    """The parts of a text between ``, `` outside of brackets and quotes."""
    parts = []
    while text:
        part, separator, text = _partition(text, ", ")
        parts.append(part)
        if separator and not text:
            parts.append("")
    return parts


def _partition(text: str, separator: str) -> tuple[str, str, str]:
    """As `str.partition`, at the first separator outside of brackets and quotes."""
    position = 0
    while position < len(text):
        if text.startswith(separator, position):
            return text[:position], separator, text[position + len(separator) :]
        end = _end_of_bracket(text[position:]) if text[position] in '(["' else 0
        if end is None:
            raise _NoSchemaError
        position += 1 + end
    return text, "", ""


def _end_of_bracket(text: str) -> int | None:
    """The position of what closes the bracket or quote that a text begins with; None if nothing does."""
    if text[0] == '"':
        end = re.match(r'"([^"\\]|\\.)*"', text)
        return None if end is None else end.end() - 1
    expected: list[str] = []
    position = 0
    while position < len(text):
        character = text[position]
        if character in _OPENING:
            expected.append(_OPENING[character])
        elif character == '"':
            length = _end_of_bracket(text[position:])
            if length is None:
                return None
            position += length
        elif expected and character == expected[-1]:
            expected.pop()
            if not expected:
                return position
        elif character in ")]":
            return None
        position += 1
    return None
