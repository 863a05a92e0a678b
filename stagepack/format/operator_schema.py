"""The text of an operator's schema, such as ``aten::relu(Tensor self) -> Tensor``, and when calls mean the same under a later one.

The text in a bundle comes from strangers, so it is read here and not by the parser of torch, which such a text can crash.
"""

import functools
import re
from typing import Final, NamedTuple

_MAX_LENGTH: Final = 10_000  # the longest of torch has 1,000 characters
_OPENING: Final = {"(": ")", "[": "]"}
_SCHEMA: Final = re.compile(r"(?P<name>\w+::\w+(\.\w+)?)(?P<rest>\(.*)", re.ASCII)
_ALIAS_ANNOTATION: Final = re.compile(r"[\w\]]\(([a-z][a-z0-9_|]*!?( -> [a-z0-9_*|]+)?)\)")
_PARAMETER_NAME: Final = re.compile(r"[A-Za-z_]\w*", re.ASCII)
# Types that take all values of another type.
_WIDER_TYPES: Final = {"int": {"SymInt", "Scalar"}, "float": {"SymFloat", "Scalar"}, "bool": {"SymBool", "Scalar"}}


class SchemaParameter(NamedTuple):
    """A parameter of an operator.

    Attributes:
        type: its type with its alias annotation, such as ``Tensor(a!)`` or ``SymInt[2]?``.
        name: its name.
        default: the text of its default value; None if it has none.
        keyword_only: whether it is passed by name only.
    """

    type: str
    name: str
    default: str | None
    keyword_only: bool


class OperatorSchema(NamedTuple):
    """A schema.

    Attributes:
        name: the operator with its overload, such as ``aten::add.Tensor``.
        parameters: its parameters, in order.
        results: the types of its results, with their names if they have some.
    """

    name: str
    parameters: tuple[SchemaParameter, ...]
    results: tuple[str, ...]


def parse_schema(text: str) -> OperatorSchema | None:
    """Return the schema that a text stands for, or None if the text is no schema.

    Examples:
        >>> parse_schema("aten::relu(Tensor self) -> Tensor").parameters[0].name
        'self'
    """
    match = _SCHEMA.fullmatch(text) if len(text) <= _MAX_LENGTH else None
    closing = _end_of_bracket(match["rest"]) if match is not None else None
    if match is None or closing is None:
        return None
    arguments, arrow, results = (
        match["rest"][1:closing],
        match["rest"][closing + 1 : closing + 5],
        match["rest"][closing + 5 :],
    )
    parameters = _parse_parameters(arguments)
    if arrow != " -> " or parameters is None:
        return None
    if results.startswith("(") and _end_of_bracket(results) == len(results) - 1:
        results = results[1:-1]
    return OperatorSchema(match["name"], parameters, tuple(_split(results)))


class SchemaEffects(NamedTuple):
    """What the alias annotations of a schema say, such as ``Tensor(a!) self``.

    Attributes:
        mutates: the parameters whose memory the operator writes.
        aliases: pairs (index of a result, parameter) that may share memory.
    """

    mutates: frozenset[str]
    aliases: frozenset[tuple[int, str]]


@functools.lru_cache(maxsize=1024)
def schema_effects(text: str) -> SchemaEffects | None:
    """Return the effects that a schema states; None if the text is no schema.

    Examples:
        >>> schema_effects("aten::relu_(Tensor(a!) self) -> Tensor(a!)").mutates
        frozenset({'self'})
    """
    if not _ALIAS_ANNOTATION.search(text):
        # Most operators: parsing takes a millisecond.
        return SchemaEffects(frozenset(), frozenset())
    schema = parse_schema(text)
    if schema is None:
        return None
    return SchemaEffects(
        frozenset(parameter.name for parameter in schema.parameters if "!" in _alias_sets(parameter.type)),
        frozenset(
            (result_index, parameter.name)
            for result_index, result in enumerate(schema.results)
            for parameter in schema.parameters
            if (_alias_sets(result) & _alias_sets(parameter.type)) - {"!"}
        ),
    )


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


def _parse_parameters(text: str) -> tuple[SchemaParameter, ...] | None:
    parameters = []
    keyword_only = False
    for part in _split(text):
        if part == "*" and not keyword_only:
            keyword_only = True
            continue
        type_text, _, declaration = _partition(part, " ")
        name, equals, default = declaration.partition("=")
        if not type_text or not _PARAMETER_NAME.fullmatch(name) or (equals and not default):
            return None
        parameters.append(SchemaParameter(type_text, name, default if equals else None, keyword_only))
    return tuple(parameters)


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
        position += 1 + (end or 0)
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
