"""Inputs whose dynamic sizes a caller leaves out have those of the example, whatever container they are."""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.capture.dynamic_dims import declared_dims
from stagepack.capture.inputs import Inputs, complete_dynamic_shapes
from stagepack.errors import CaptureError
from tests.modules import module_of


class Pair(NamedTuple):
    """Two values."""

    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Record:
    """An object that torch takes for a container."""

    table: torch.Tensor
    more: list[torch.Tensor]


torch.export.register_dataclass(Record, serialized_type_name="test_left_out_sizes.Record")


def _sum(value: Any) -> Any:
    leaves = torch.utils._pytree.tree_leaves(value)
    return sum((leaf.sum() for leaf in leaves if isinstance(leaf, torch.Tensor)), torch.zeros(()))


CONTAINERS: Mapping[str, Callable[[], Any]] = {
    "dict": lambda: {"t": torch.ones(4)},
    "empty dict": dict,
    "ordered dict": lambda: collections.OrderedDict(t=torch.ones(4)),
    "default dict": lambda: collections.defaultdict(list, t=torch.ones(4)),
    "list": lambda: [torch.ones(4), 2],
    "empty list": list,
    "tuple": lambda: (torch.ones(4), None),
    "empty tuple": tuple,
    "deque": lambda: collections.deque([torch.ones(2)]),
    "named tuple": lambda: Pair(torch.ones(4), {"a": torch.ones(3)}),
    "dataclass": lambda: Record(torch.ones(4), [torch.ones(2)]),
    "nested": lambda: {"a": [torch.ones(2), {"b": (torch.ones(3), None)}], "c": {}},
    "none": lambda: None,
    "tensor": lambda: torch.ones(4),
}
# How the sizes of `x` are stated, which is the first of two arguments.
FORMS: Mapping[str, Callable[[Any], Any]] = {
    "by name": lambda dims: {"x": dims},
    "by name, the other is None": lambda dims: {"x": dims, "table": None},
    "by position": lambda dims: (dims, None),
    "by position, in a list": lambda dims: [dims, None],
    "by position, shorter": lambda dims: (dims,),
}


@pytest.mark.parametrize(("container", "form"), list(itertools.product(CONTAINERS, FORMS)))
def test_argument_that_is_left_out_is_static(container: str, form: str) -> None:
    model = module_of(lambda self, x, table: x * 2 + _sum(table))
    table, dims = CONTAINERS[container](), {0: Dim("rows", min=1, max=9)}
    for args, kwargs in (((torch.ones(3, 4), table), {}), ((torch.ones(3, 4),), {"table": table})):
        inputs = Inputs(args=args, kwargs=kwargs, dynamic_shapes=FORMS[form](dims))
        shapes = complete_dynamic_shapes(model.forward, inputs)
        program = torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
        assert torch.equal(program.module()(torch.ones(5, 4), *args[1:], **kwargs), model(torch.ones(5, 4), table))
        assert [given for _, given in declared_dims(model.forward, inputs) if given] == [dims]


def _variadic() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    x, table = torch.ones(3, 4), {"t": [torch.ones(2)]}
    yield lambda _, x, *tables: x * 2 + _sum(tables), (x, table, ()), {}
    yield lambda _, x, **tables: x * 2 + _sum(tables), (x,), {"table": table, "none": None}
    yield lambda _, table, x: x * 2 + _sum(table), (table, x), {}
    yield lambda _, x, *, table, other: x * 2 + _sum((table, other)), (), {"other": [], "table": table, "x": x}


@pytest.mark.parametrize(("forward", "args", "kwargs"), list(_variadic()))
def test_bundle_takes_other_sizes_of_the_argument_that_is_named(
    forward: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tmp_path: Path
) -> None:
    model, dims = module_of(forward), {0: Dim("rows", min=1, max=9)}
    bundle = stagepack.export(model, args, kwargs, dynamic_shapes={"x": dims}, out=tmp_path / "m.stagepack")
    longer = [torch.ones(5, 4) if isinstance(arg, torch.Tensor) else arg for arg in args]
    named = {key: torch.ones(5, 4) if isinstance(arg, torch.Tensor) else arg for key, arg in kwargs.items()}
    assert torch.equal(stagepack.load(bundle)(*longer, **named), model(*longer, **named))


def test_items_of_a_dict_are_left_out() -> None:
    forward = module_of(lambda self, pair: pair["x"] * 2 + _sum(pair["table"])).forward
    dims = {0: Dim("rows", min=1, max=9)}
    pair = {"table": [torch.ones(2), {"u": torch.ones(2)}], "x": torch.ones(3, 4)}
    inputs = Inputs(args=(pair,), dynamic_shapes={"pair": {"x": dims}})
    assert complete_dynamic_shapes(forward, inputs) == {"pair": {"table": [None, {"u": None}], "x": dims}}


@pytest.mark.parametrize(
    ("shapes", "says"),
    [
        ({"x": None, "tables": None}, "top-level keys must be the arg names"),
        ({"table": {"u": None}}, "do not match|differ|mismatch"),
        ({"table": [None]}, "mismatch"),
        (({0: Dim.AUTO}, None, None), "mismatch|elements"),
    ],
)
def test_sizes_that_fit_no_argument_are_refused(shapes: Any, says: str, tmp_path: Path) -> None:
    model = module_of(lambda self, x, table: x * 2 + table["t"])
    with pytest.raises(CaptureError, match=says):
        stagepack.export(
            model, (torch.ones(3, 4), {"t": torch.ones(4)}), dynamic_shapes=shapes, out=tmp_path / "m.stagepack"
        )
