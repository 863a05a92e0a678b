"""Results of the user's own dataclasses: a captured result has a `CapturedRecord` in the place of each.

Torch refuses dataclasses that are not registered. A registration lasts as long as the process and can be done once, by the user.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from stagepack.format.tree import Record, type_name
from stagepack.torch_internals import (
    is_registered,
    register_container,
    tree_map,
)


class CapturedRecord(Record):
    """The fields of an object of a dataclass, with the name of the class."""

    def __init__(self, class_name: str, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.__class_name = class_name

    def __reduce__(self) -> tuple[Any, ...]:
        return CapturedRecord, (self.__class_name, dict.copy(self))

    def flatten(self) -> tuple[list[Any], tuple[str, tuple[str, ...]]]:
        """Return the fields, and what remains: the name of the class, and the names of the fields."""
        return list(dict.values(self)), (self.__class_name, tuple(self))


register_container(
    CapturedRecord,
    CapturedRecord.flatten,
    lambda fields, context: CapturedRecord(context[0], dict(zip(context[1], fields, strict=True))),
)


def with_records(result: Any) -> Any:
    """Return a result with a record in the place of each object of an unregistered dataclass."""
    return tree_map(lambda leaf: _record(leaf) if _is_unregistered(leaf) else leaf, result)


def _is_unregistered(leaf: object) -> bool:
    return dataclasses.is_dataclass(leaf) and not isinstance(leaf, type) and not is_registered(type(leaf))


def _record(leaf: Any) -> CapturedRecord:
    fields = {field.name: with_records(getattr(leaf, field.name)) for field in dataclasses.fields(leaf)}
    if isinstance(leaf, Mapping):  # such as a ModelOutput, whose fields that are None are no items
        fields = {field_name: field for field_name, field in fields.items() if field is not None}
    return CapturedRecord(type_name(type(leaf)), fields)
