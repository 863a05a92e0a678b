"""A stage that runs with adapters: its own module, or one that applies the change of an adapter, or of each row its own.

The weights of the bundle are in memory once. A module for several adapters is built by the first call that needs it.
"""

import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.fx import GraphModule

from stagepack.adapter.adapted_bundle import ROWS_NAME, AdaptedBundle
from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX
from stagepack.adapter.opened import OpenAdapter, check_shapes
from stagepack.adapter.rewrite import ChangedGraph, Pair, change_graph, computing_dtype, without_rows
from stagepack.adapter.uses import Use, find_uses
from stagepack.errors import InputError
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.graph import Graph
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_loaders.torch.weight_gate import GatedModule
from stagepack_loaders.weight_files import map_adapter_file

# Clients choose which adapters are in a call together: of their modules so many are kept, each of as many nodes as the stage.
_KEPT_FORMS: Final = 16
# Builds the module of a changed graph, and compiles the module of a graph.
BuildModule = Callable[[ChangedGraph], torch.nn.Module]
CompileModule = Callable[[GraphModule, Graph], torch.nn.Module]
# A list of tensors for the further inputs, and the tensors that replace weights, by the position of the weight.
_Extras = tuple[list[torch.Tensor], dict[int, torch.Tensor]]


class _Change(NamedTuple):
    """The tensors of a low-rank change on the device of the stage, as `change_graph` takes them for one change of all rows."""

    a: torch.Tensor
    b: torch.Tensor
    bias: torch.Tensor | None
    scale: float


class _Form(NamedTuple):
    """A module that applies changes, its graph, and the changed modules that compute the same for all rows."""

    module: torch.nn.Module
    changed: ChangedGraph
    shared_modules: Sequence[str]


class StageAdapter:
    """The part of an adapter that changes one stage.

    Attributes:
        adapter: the adapter.
        uses: the uses of the weights that it changes.
        pairs: what the tensors of its changes are like, by the path of the module.
        tensors: these tensors.
        replaced: the tensors that replace weights of the stage, by the position of the weight.
    """

    def __init__(
        self, adapter: OpenAdapter, graph: Graph, uses: Sequence[Use], device: torch.device, *, verify: bool
    ) -> None:
        check_shapes(graph, uses, adapter.document, adapter.tensors, adapter.location)
        self.adapter = adapter
        self.uses = uses
        self.pairs = {use.change.module: adapter.pairs[use.change.module] for use in uses}
        scales = {change.module: change.scale for change in adapter.document.changes}
        content = map_adapter_file(adapter, verify=verify).content

        def read(name: str, dtype: str) -> torch.Tensor:
            stored = adapter.tensors[name]
            count = stored.end - stored.start
            stored_bytes = torch.frombuffer(content, dtype=torch.uint8, count=count, offset=stored.start)
            stored_dtype: torch.dtype = torch_attribute(TORCH_DTYPES[stored.dtype], torch.dtype)
            wanted: torch.dtype = torch_attribute(dtype, torch.dtype)
            return stored_bytes.view(stored_dtype).reshape(stored.shape).to(device, wanted)

        self.tensors = {
            module: _read_change(use, read, self.pairs[module], scales[module])
            for use in uses
            if (module := use.change.module)
        }
        replaced = set(adapter.document.replaced)
        self.replaced = {
            position: read(weight.names[0], weight.dtype)
            for position, weight in enumerate(graph.weights)
            if weight.names[0] in replaced
        }


def _read_change(use: Use, read: Callable[[str, str], torch.Tensor], pair: Pair, scale: float) -> _Change:
    module, dtype = use.change.module, computing_dtype(use.weight.dtype)
    a = read(module + A_SUFFIX, dtype)
    return _Change(
        a=a.T.contiguous() if use.kind == "embedding" else a,
        b=read(module + B_SUFFIX, dtype),
        bias=read(module + BIAS_SUFFIX, dtype) if pair.has_bias else None,
        scale=scale,
    )


class AdapterModule(torch.nn.Module):
    """Runs a stage whose input `ROWS_NAME` says which adapter each row has.

    Attributes:
        plain_module: the stage without adapters, compiled, or with questions for its weights.
        adapters: the adapters of the stage, by number.
    """

    def __init__(
        self,
        plain_module: torch.nn.Module,
        graph: Graph,
        bundle: AdaptedBundle,
        device: torch.device,
        build: BuildModule,
    ) -> None:
        super().__init__()
        self.plain_module = plain_module
        self.adapters: dict[int, StageAdapter] = {}
        self._names: dict[int, str] = {}
        self._graph = graph
        self._batch = bundle.batch
        self._device = device
        self._build = build
        self._rows_position = [value.name for value in graph.inputs].index(ROWS_NAME)
        # The modules of all versions of the stage.
        self._modules_of: dict[object, _Form] = {}
        self._lock = threading.Lock()
        self._single: dict[int, tuple[torch.nn.Module, _Extras]] = {}
        # The rows of the last call are kept: most calls of a text have those of the one before.
        self._mixed: tuple[tuple[int, ...], torch.nn.Module, list[torch.Tensor]] | None = None

    def compile_with(self, compile_module: CompileModule) -> None:
        """Compile what runs the stage, at its first call; before `load`."""
        build = self._build

        def build_compiled(changed: ChangedGraph) -> torch.nn.Module:
            module = build(changed)
            assert isinstance(module, GraphModule)
            return compile_module(module, changed.graph)

        assert isinstance(self.plain_module, GraphModule)
        self._build, self.plain_module = build_compiled, compile_module(self.plain_module, self._graph)

    def load(self, bundle: AdaptedBundle, *, verify: bool) -> None:
        """Take the adapters of a bundle: read the tensors of those that are not loaded, and build what applies each to all rows."""
        former = {
            id(part.adapter): (part, form)
            for part, form in zip(self.adapters.values(), self._single.values(), strict=True)
        }
        self.adapters, self._single, self._mixed = {}, {}, None
        self._names = dict(enumerate(bundle.adapters, 1))
        uses_of = {_changed_weights(part.adapter): part.uses for part, _ in former.values()}
        for number, adapter in enumerate(bundle.adapters.values(), 1):
            if id(adapter) in former:
                self.adapters[number], self._single[number] = former[id(adapter)]
                continue
            # Adapters of the same modules have the same uses.
            uses = uses_of.get(_changed_weights(adapter))
            if uses is None:
                uses = uses_of[_changed_weights(adapter)] = find_uses(self._graph, adapter.changes)
            self.adapters[number] = StageAdapter(adapter, self._graph, uses, self._device, verify=verify)
            self._single[number] = self._single_form(self.adapters[number])

    def with_adapters(self, bundle: AdaptedBundle, *, verify: bool) -> "AdapterModule":
        """Return a module that runs the stage with the adapters of another bundle. Calls of this one go on with its own."""
        module = copy.copy(self)
        module.load(bundle, verify=verify)
        return module

    def forward(self, *values: Any) -> Any:
        """Run the stage on its inputs and its weights."""
        numbers = tuple(values[self._rows_position].tolist())
        count = len(self._graph.inputs)
        inputs, weights = values[:count], values[count:]
        if len(set(numbers)) > 1:
            module, tensors = self._mixed_form(numbers)
            return module(*inputs, *tensors, *weights)
        if not numbers or numbers[0] == 0:
            return self.plain_module(*values)
        module, (tensors, replaced) = self._single[numbers[0]]
        if replaced:
            weights = tuple(replaced.get(position, weight) for position, weight in enumerate(weights))
        return module(*inputs, *tensors, *weights)

    def _module(self, uses: Sequence[Use], pairs: Mapping[str, Pair], batch: str | None) -> _Form:
        """The module that applies changes; adapters of the same modules and ranks share it."""
        key = batch, tuple(use.node for use in uses), tuple(pairs.items())
        with self._lock:
            if key not in self._modules_of:
                changed = change_graph(self._graph, uses, pairs, batch)
                module = self._build(changed) if uses else self.plain_module
                shared = [] if batch is None else without_rows(self._graph, uses, batch)
                if len(self._modules_of) >= _KEPT_FORMS:
                    del self._modules_of[next(iter(self._modules_of))]
                self._modules_of[key] = _Form(module, changed, shared)
            return self._modules_of[key]

    def _single_form(self, adapter: StageAdapter) -> tuple[torch.nn.Module, _Extras]:
        """What applies one adapter to all rows."""
        module, changed, _ = self._module(adapter.uses, adapter.pairs, None)
        tensors = []
        for path, role in changed.inputs:
            change = adapter.tensors[path]
            tensors.append(
                torch.tensor(change.scale, dtype=torch.float64) if role == "scale" else getattr(change, role)
            )
        return module, (tensors, adapter.replaced)

    def _mixed_form(self, numbers: tuple[int, ...]) -> tuple[torch.nn.Module, list[torch.Tensor]]:
        """What applies to each row its own adapter."""
        last = self._mixed
        if last is not None and last[0] == numbers:
            return last[1], last[2]
        own = {number: self.adapters[number] for number in sorted(set(numbers)) if number}
        uses = sorted(
            {use.node: use for adapter in own.values() for use in adapter.uses}.values(), key=lambda use: use.node
        )
        pairs = {
            path: Pair(
                max(adapter.pairs[path].rank for adapter in own.values() if path in adapter.pairs),
                any(adapter.pairs[path].has_bias for adapter in own.values() if path in adapter.pairs),
            )
            for path in dict.fromkeys(use.change.module for use in uses)
        }
        assert self._batch is not None  # otherwise a call has one number
        module, changed, shared = self._module(uses, pairs, self._batch)
        self._refuse_mixed(own, shared)
        use_of = {use.change.module: use for use in uses}
        gather = _Gathering(numbers, own, pairs)
        values = changed.graph.inputs[len(self._graph.inputs) :]
        with torch.inference_mode(mode=False):  # later calls may compute gradients with them
            tensors = [
                gather.tensor(use_of[path], role, value.shape)
                for (path, role), value in zip(changed.inputs, values, strict=True)
            ]
        self._mixed = numbers, module, tensors
        return module, tensors

    def _refuse_mixed(self, own: Mapping[int, StageAdapter], shared_modules: Sequence[str]) -> None:
        reasons = [f"{self._names[number]} replaces whole weights" for number, part in own.items() if part.replaced]
        reasons += [f"{module} computes the same for all rows of a batch" for module in shared_modules]
        if reasons:
            raise InputError(
                f"adapter: rows of one call cannot have several adapters: {reasons[0]}: call each on its own"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> "AdapterModule":
        """Return a copy that shares the tensors of the adapters, which no call writes."""
        if isinstance(self.plain_module, GatedModule):
            self.plain_module.wait_for_copy()
        duplicate = copy.copy(self)
        memo[id(self)] = duplicate
        return duplicate


def _changed_weights(adapter: OpenAdapter) -> object:
    return tuple((change.module, change.weight) for change in adapter.document.changes)


class _Gathering:
    """The tensors of the adapters of some rows, side by side; ranks are filled with zeros."""

    def __init__(self, numbers: Sequence[int], adapters: Mapping[int, StageAdapter], pairs: Mapping[str, Pair]) -> None:
        self._numbers, self._adapters, self._pairs = numbers, adapters, pairs

    def tensor(self, use: Use, role: str, shape: Sequence[object]) -> torch.Tensor:
        """The further input of a role for a use, which has as many dimensions as `shape`; see `change_graph`."""
        parts = {number: adapter.tensors.get(use.change.module) for number, adapter in self._adapters.items()}
        some = next(part for part in parts.values() if part is not None)
        rank, (size_in, size_out) = self._pairs[use.change.module].rank, use.sizes
        if role == "scale":
            scales = [0.0 if (part := parts.get(number)) is None else part.scale for number in self._numbers]
            return torch.tensor(scales, dtype=some.b.dtype, device=some.b.device).view(-1, 1, 1)
        if role == "bias":
            zeros = some.b.new_zeros(size_out)
            rows = [
                zeros if (part := parts.get(number)) is None or part.bias is None else part.bias
                for number in self._numbers
            ]
            return torch.stack(rows).unsqueeze(1)
        if use.kind == "embedding" and role == "offset":
            places = {number: place for place, number in enumerate((0, *self._adapters))}
            offsets = [places[number] * size_in for number in self._numbers]
            return torch.tensor(offsets, device=some.b.device).view(-1, *[1] * (len(shape) - 1))
        if use.kind == "embedding" and role == "a":
            tables = [
                some.a.new_zeros(size_in, rank),
                *(self._table(part, some, size_in, rank) for part in parts.values()),
            ]
            return torch.cat(tables)
        sizes = (rank, size_in) if role == "a" else (size_out, rank)
        gathered = some.b.new_zeros((len(self._numbers), *sizes))
        for row, number in enumerate(self._numbers):
            if (part := parts.get(number)) is not None:
                matrix = part.a if role == "a" else part.b
                gathered[row, : matrix.shape[0], : matrix.shape[1]] = matrix
        return gathered.transpose(1, 2)

    def _table(self, part: _Change | None, some: _Change, size_in: int, rank: int) -> torch.Tensor:
        table = some.a.new_zeros(size_in, rank)
        if part is not None:
            table[:, : part.a.shape[1]] = part.a
        return table
