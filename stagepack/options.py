"""What the command line says of a field of a class of options, as metadata of its type: its flag is made of it."""

import functools
from typing import Any, NamedTuple, get_type_hints


class Option(NamedTuple):
    """The flag of a field: ``stream: Annotated[bool, Option("--stream", "Compute while the weights are read.")] = False``.

    Attributes:
        usage: the flag as the help shows it, such as ``-o, --out FILE``.
        meaning: the help text.
        default_text: the default as the help shows it, where it is no value.
        unit: of a number, one of the flag in the unit of the field, such as 1e-3 for milliseconds of a field in seconds.
        minimum, maximum: of a number that is no count, in the unit of the flag.
    """

    usage: str
    meaning: str
    default_text: str | None = None
    unit: float = 1.0
    minimum: float = 0
    maximum: float = 86_400  # a day in seconds


@functools.cache
def options_of(options_class: type) -> dict[str, tuple[Option, Any, Any]]:
    """Return the options of a class by the names of their fields, each with type and default. All fields of the class have defaults."""
    defaults, annotations = options_class(), get_type_hints(options_class)
    return {
        field_name: (option, annotations[field_name], getattr(defaults, field_name))
        for field_name, annotated in get_type_hints(options_class, include_extras=True).items()
        for option in getattr(annotated, "__metadata__", ())
        if isinstance(option, Option)
    }
