"""A bundle that is loaded with adapters: its stages take one more input, the number of the adapter of each row."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy
from msgspec.structs import replace

from stagepack.errors import InputError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.file_source import FileStream
from stagepack.format.graph import Graph, Value
from stagepack.format.graph_codec import GraphFile
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle, OnnxFile
from stagepack.format.validate.files import NamedWeights
from stagepack.format.weights import StoredTensor

if TYPE_CHECKING:
    from stagepack.adapter.opened import OpenAdapter

# The name of the input. Names of values are identifiers, so no bundle has it (SPEC G1).
ROWS_NAME: Final = "adapter.rows"


class AdaptedBundle(Bundle):
    """A bundle with adapters, in the stages of another one; see `stagepack.named_adapters.with_adapters`.

    Attributes:
        adapters: the adapters by name. The first one has the number 1; the number 0 stands for none.
        batch: the symbol of the rows of a batch; None if the model has none: then a call has one adapter.
    """

    def __init__(self, plain: Bundle, adapters: "Mapping[str, OpenAdapter]") -> None:
        vars(self).update(vars(plain))
        self.__dict__.pop("_facts", None)
        self._plain = plain
        self.adapters = dict(adapters)
        entry_point = plain.entry_point
        self.batch = batch_symbol(entry_point)
        stage_numbers = tuple(range(len(entry_point.stages)))
        shape = (1,) if self.batch is None else (self.batch,)
        self.rows_edge = Edge(name=ROWS_NAME, dtype="int64", shape=shape, consumers=stage_numbers)
        count = len(entry_point.inputs)
        stages = tuple(replace(stage, inputs=(*stage.inputs, ROWS_NAME)) for stage in entry_point.stages)
        self.selected = _with_edge(replace(entry_point, stages=stages), self.rows_edge, count)
        self._graph_files: dict[tuple[int, bool], GraphFile] = {}

    @property
    def adapter_digests(self) -> tuple[tuple[str, str], ...]:
        """The names of the adapters, and the digests of their documents: bundles with equal ones give adapters the same numbers."""
        return tuple((name, adapter.document.sha256) for name, adapter in self.adapters.items())

    def with_others(self, adapters: "Mapping[str, OpenAdapter]") -> "AdaptedBundle":
        """Return the same bundle with other adapters."""
        bundle = copy.copy(self)
        bundle.adapters = dict(adapters)
        return bundle

    @property
    def stored(self) -> Bundle:
        """See `Bundle`."""
        return self._plain.stored

    def stored_stages(self, stage_number: int) -> range:
        """See `Bundle`."""
        return self._plain.stored_stages(stage_number)

    def select(self, name: str) -> Bundle:
        """See `Bundle`."""
        return self._plain.select(name)

    def without_digests(self) -> "AdaptedBundle":
        """See `Bundle`."""
        return AdaptedBundle(self._plain.without_digests(), self.adapters)

    def node_numbers(self, stage_number: int) -> list[int]:
        """See `Bundle`."""
        return self._plain.node_numbers(stage_number)

    def graph_file(self, stage_number: int, *, module_calls: bool = True) -> GraphFile:
        """See `Bundle`."""
        key = stage_number, module_calls
        if key not in self._graph_files:
            folded, graph = self._plain.graph_file(stage_number, module_calls=module_calls)
            rows = Value(name=ROWS_NAME, dtype="int64", shape=self.rows_edge.shape)
            inputs = (*graph.inputs, rows)
            self._graph_files[key] = GraphFile(replace(folded, inputs=inputs), replace(graph, inputs=inputs))
        return self._graph_files[key]

    def onnx_file(self, stage_number: int) -> OnnxFile:
        """See `Bundle`. The model of the stage, without adapters."""
        return self._plain.onnx_file(stage_number)

    def graphs(self) -> tuple[Graph, ...]:
        """See `Bundle`."""
        self._plain.graphs()
        return tuple(self.graph(stage_number) for stage_number in range(len(self.stages)))

    def tensors(
        self,
        stage_number: int,
        graph: Graph,
        stream: FileStream | None = None,
        named_weights: NamedWeights | None = None,
    ) -> dict[str, tuple[Path, StoredTensor]]:
        """See `Bundle`."""
        return self._plain.tensors(stage_number, graph, stream, named_weights)

    def numbers(self, names: Any, sizes: Mapping[str, int]) -> Any:
        """Return the number of the adapter of each row of a call, an array of numpy.

        names: the name of an adapter, or None for none; or one for each row, in a list.
        sizes: the sizes of the symbols in the call. The inputs of a stage may leave that of the batch open: all rows then have one adapter.
        """
        row_count = 1 if self.batch is None else sizes.get(self.batch, 1)
        if names is None or isinstance(names, str):
            return numpy.full(row_count, self._number(names), numpy.int64)
        if not isinstance(names, Sequence):
            raise InputError(
                f"adapter: expected the name of an adapter, or a list of names, found {type(names).__name__}"
            )
        has_rows = self.batch in sizes
        if not has_rows and len(set(names)) == 1:
            names = names[:1]
        if len(names) != row_count:
            reason = (
                "the bundle has no batch dimension"
                if self.batch is None
                else "the inputs do not say how many rows there are"
            )
            rows = f"{row_count}, one for each row" if has_rows else f"1, since {reason}"
            raise InputError(f"adapter: expected {rows}, found {len(names)} names")
        return numpy.array([self._number(name) for name in names], numpy.int64).reshape(row_count)

    def _number(self, name: Any) -> int:
        if name is None:
            return 0
        for number, known in enumerate(self.adapters, 1):
            if known == name:
                return number
        raise InputError(
            f"adapter: expected one of {', '.join(self.adapters) or '(none are loaded)'}, or None for none, found {name!r}"
        )


def batch_symbol(entry_point: EntryPoint) -> str | None:
    """Return the symbol that is the first dimension of most inputs, the first of those; None if there is none."""
    firsts = [
        edge.shape[0]
        for edge in entry_point.inputs
        if edge.dtype not in SCALAR_DTYPES and edge.shape and isinstance(edge.shape[0], str)
    ]
    return Counter(firsts).most_common(1)[0][0] if firsts else None


class _AdaptedEntryPoint(EntryPoint, frozen=True, kw_only=True, omit_defaults=True):
    """An entry point with one more edge, which is no input of the model."""

    @property
    def inputs(self) -> tuple[Edge, ...]:
        return tuple(edge for edge in self.edges if edge.producer is None and edge.name != ROWS_NAME)


def _with_edge(entry_point: EntryPoint, edge: Edge, position: int) -> EntryPoint:
    fields = {field: getattr(entry_point, field) for field in EntryPoint.__struct_fields__}
    edges = (*entry_point.edges[:position], edge, *entry_point.edges[position:])
    return _AdaptedEntryPoint(**{**fields, "edges": edges})
