"""A node as the rules of `stagepack.graph.rows` see it: its arguments by name, with the rows of each."""

import functools
import re
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from stagepack.format.graph import Argument, Node, Op, ValueArg
from stagepack.format.operator_schema import parse_schema
from stagepack.format.traversal import argument_value_names, child_arguments
from stagepack.graph.rows.layout import ONE, UNKNOWN, Rows, RowsMeetError, Shape, Size, SizePoints


class Tracked(NamedTuple):
    """What is known of a value."""

    dtype: str
    shape: Shape = ()  # its shape; empty for a symbolic scalar
    # Where it has the rows of the batch; None for a value that is the same for all rows and all numbers of rows.
    rows: Rows | None = None
    number: Size | None = None  # the value of a symbolic integer, if it is known
    counts_rows: bool = False  # it is a symbolic scalar that depends on the number of rows

    @property
    def varies(self) -> bool:
        """Whether it has rows, or depends on their number."""
        return self.rows is not None or self.counts_rows

    @property
    def rank(self) -> int:
        """The number of dimensions."""
        return len(self.shape)


# Parameters that say how large a result is; the shape of the result tells what they do.
_SIZE_NAMES = "N dims end length normalized_shape output_size repeats shape size sizes split_size split_sizes stride"
_SIZE_PARAMETERS = frozenset(_SIZE_NAMES.split())
_INTEGER = re.compile(r"-?\d{1,18}", re.ASCII)
_FLOAT = re.compile(r"-?\d{1,18}\.\d{0,18}", re.ASCII)


class NodeCall:
    """A node with what is known of its arguments."""

    def __init__(self, op: Op, node: Node, values: Mapping[str, Tracked], points: SizePoints) -> None:
        self.op, self.points = op, points
        operator, _, self.overload = op.name.rpartition(".") if op.schema else (op.name, "", "")
        # Without the underscore of those that write in place.
        self.name = operator if operator.endswith("__") else operator.removesuffix("_")
        # The shape of each result that is a tensor; None for another one.
        self.outputs = [
            None if value is None or value.dtype.startswith("sym") else points.shape(value.shape)
            for value in node.outputs
        ]
        self._values = values
        named = {**dict(zip(op.parameters, node.args, strict=False)), **dict(node.kwargs)}
        self.arguments: dict[str, Argument] = named if op.schema else dict(enumerate(node.args))  # type: ignore[arg-type]

    @property
    def shape(self) -> Shape:
        """The shape of the first result."""
        if not self.outputs or self.outputs[0] is None:
            raise RowsMeetError("has no result that is a tensor")
        return self.outputs[0]

    def all_tensors(self) -> Iterator[tuple[str, Tracked]]:
        """Each tensor among the arguments, with the name of its parameter."""
        for parameter, argument in self.arguments.items():
            for value in self._tracked(argument):
                if not value.dtype.startswith("sym"):
                    yield parameter, value

    def tensors(self, *parameters: str) -> list[Tracked]:
        """The tensors that are passed to parameters."""
        arguments = (self.arguments.get(parameter) for parameter in parameters)
        return [
            value for argument in arguments for value in self._tracked(argument) if not value.dtype.startswith("sym")
        ]

    def tensor(self, *parameters: str) -> Tracked:
        """The tensor that is passed to the first of some parameters that the operator has."""
        if not (passed := self.tensors(*parameters)):
            raise RowsMeetError(UNKNOWN)
        return passed[0]

    def optional_tensors(self, parameter: str) -> list[Tracked | None]:
        """The tensors of a list in which some are None."""
        items = child_arguments(self.arguments.get(parameter))
        return [next(iter(self._tracked(item)), None) for item in items]

    def need_shared(self, *parameters: str) -> None:
        """Raise RowsMeetError if a tensor has rows, except the tensors of some parameters."""
        for parameter, value in self.all_tensors():
            if parameter not in parameters and value.rows is not None:
                raise RowsMeetError(f"takes its argument {parameter} from the rows")

    def need_few_numbers(self, allowed: AbstractSet[str]) -> None:
        """Raise RowsMeetError if a number besides sizes depends on the number of rows."""
        if any(map(self.counts_rows, self.arguments.keys() - _SIZE_PARAMETERS - allowed)):
            raise RowsMeetError("computes with the number of rows")

    def counts_rows(self, parameter: str) -> bool:
        """Whether a number that is passed to a parameter depends on the number of rows."""
        return any(value.counts_rows for value in self._tracked(self.arguments.get(parameter)))

    def option(self, parameter: str) -> bool | float | str | None:
        """A constant argument, or its default."""
        argument = self._argument(parameter)
        return argument if isinstance(argument, bool | int | float | str) else None

    def numbers(self, parameter: str) -> list[Size] | None:
        """The integers that are passed to a parameter, as a list; None if None is passed."""
        argument = self._argument(parameter)
        if argument is None:
            return None
        is_single = isinstance(argument, int | ValueArg)
        items = [argument] if is_single else argument if isinstance(argument, list) else list(child_arguments(argument))
        return [self._number(item) for item in items]

    def axes(self, parameter: str, rank: int) -> list[int]:
        """The dimensions that are passed to a parameter, from 0; all dimensions if none is passed."""
        numbers = self.numbers(parameter)
        if not numbers:
            return list(range(rank))
        return [number[0] + rank if number[0] < 0 else number[0] for number in numbers]

    def axis(self, parameter: str, rank: int) -> int:
        """The dimension that is passed to a parameter, from 0."""
        return self.axes(parameter, rank)[0] if rank else 0

    def has_parameter(self, parameter: str) -> bool:
        """Whether the operator has a parameter."""
        return parameter in self.op.parameters

    def _argument(self, parameter: str) -> "Argument | list[int]":
        """The argument that is passed to a parameter, or its default."""
        if parameter in self.arguments:
            return self.arguments[parameter]
        default_text = _defaults(self.op.schema).get(parameter)
        if default_text is None or default_text == "None":
            return None
        if default_text in ("True", "False"):
            return default_text == "True"
        if default_text.startswith("["):
            return [int(number) for number in re.findall(r"-?\d{1,18}", default_text)]
        if _INTEGER.fullmatch(default_text):
            return int(default_text)
        return float(default_text) if _FLOAT.fullmatch(default_text) else None

    def _number(self, argument: object) -> Size:
        if isinstance(argument, int):
            return (int(argument),) * len(ONE)
        known = self._values.get(argument.name) if isinstance(argument, ValueArg) else None
        if known is None or known.number is None:
            raise RowsMeetError("uses a number that is not known before the call")
        return known.number

    def _tracked(self, argument: Argument) -> list[Tracked]:
        return [self._values[name] for name in argument_value_names(argument) if name in self._values]


@functools.lru_cache(maxsize=256)
def _defaults(schema_text: str) -> Mapping[str, str | None]:
    """The default of each parameter of a schema."""
    schema = parse_schema(schema_text)
    return {parameter.name: parameter.default for parameter in schema.parameters} if schema is not None else {}
