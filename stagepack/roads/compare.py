"""What differs between two bundles: the graph, the weights by name, the cut, and the other files. Without torch.

All fields of all types are compared, those too that later versions add: what is not named here is compared as it is stored. At the end,
bundles whose digests differ are never equal.
"""

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from msgspec import Struct
from msgspec.msgpack import encode

from stagepack.errors import named_errors
from stagepack.format.chunks import File
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest import Manifest
from stagepack.format.node_contents import NodeContents
from stagepack.format.reader import Bundle
from stagepack.format.rules import INDEX_NAME
from stagepack.format.threads import map_in_threads
from stagepack.format.weights import StoredTensor
from stagepack.graph.model_assembly import join_stages
from stagepack.roads.stored_bundle import read_entry_point


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What differs between a bundle A and a bundle B; each entry is a line. All are empty for equal bundles.

    Attributes:
        graph: differences of the model: its signature, sizes, nodes, and which weights it has.
        weights: what differs in a weight, by the name of the weight.
        plan: differences of the cut: the stages, and what crosses between them.
        files: differences of other files, such as ``config.json``, the example and ONNX models.
    """

    graph: tuple[str, ...]
    weights: Mapping[str, str]
    plan: tuple[str, ...]
    files: tuple[str, ...]

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return bool(self.graph or self.weights or self.plan or self.files)


def compare_bundles(first: Bundle, second: Bundle) -> Differences:
    """Compare two bundles.

    Bundles of one digest are equal. Otherwise all graphs are read, and of the weights those whose files differ.

    first: the bundle A. If one of its several entry points is selected, this one is compared with the selected one of B.
    second: the bundle B.
    """
    if first.identity == second.identity:
        return Differences(graph=(), weights={}, plan=(), files=())
    graph = list(_manifest_differences(first.manifest, second.manifest))
    weights: dict[str, str] = {}
    plan: list[str] = []
    files = list(_file_differences(first, second))
    for name, (a, b) in _compared_entry_points(first, second).items():
        if a is None or b is None:
            graph.append(f"entry point {name}: only in {'B' if a is None else 'A'}")
            continue
        prefix = f"{name}: " if name else ""
        models = _Model.read(a), _Model.read(b)
        graph += [prefix + line for line in _model_differences(*models)]
        weights |= _weight_differences(*models)
        plan += [prefix + line for line in _cut_differences(a, b)]
        if not (graph or weights or plan or files) and _is_stored_otherwise(*models):
            files.append(f"{prefix}the graphs of the stages: the same nodes, stored otherwise")
    if not (graph or weights or plan or files or first.fragment):
        files.append("manifest.json: the same model, stored in other files or another order")
    return Differences(graph=tuple(graph), weights=weights, plan=tuple(plan), files=tuple(files))


def _compared_entry_points(first: Bundle, second: Bundle) -> dict[str, tuple[Bundle | None, Bundle | None]]:
    """The entry points of both bundles by name. The only one of both, or the selected one, needs no name."""
    first, second = first.with_graphs_kept(), second.with_graphs_kept()
    if first.fragment or second.fragment:
        return {"": (first.select(first.entry_point.name), second.select(second.entry_point.name))}
    names = [[entry_point.name for entry_point in bundle.entry_points] for bundle in (first, second)]
    if names[0] == names[1] and len(names[0]) == 1:
        return {"": (first, second)}
    return {
        name: (first.select(name) if name in names[0] else None, second.select(name) if name in names[1] else None)
        for name in dict.fromkeys((*names[0], *names[1]))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    """The whole model of a bundle, with its weights by name and where they are stored."""

    bundle: Bundle
    stages: Sequence[Graph]
    graph: Graph
    weights: Mapping[str, Weight]
    locations: Mapping[str, tuple[Path, StoredTensor]]

    @staticmethod
    def read(bundle: Bundle) -> "_Model":
        with named_errors(bundle.location):
            stored = read_entry_point(bundle)
            graph = join_stages(bundle.entry_point, stored.graphs)
        weights = {weight_name: weight for weight in graph.weights for weight_name in weight.names}
        return _Model(bundle=bundle, stages=stored.graphs, graph=graph, weights=weights, locations=stored.locations)


# What the lines of a difference call a field; others have their names.
_TITLES: Final = {
    "signature": "how the model is called",
    "symbols": "the dynamic sizes",
    "guards": "the conditions on sizes",
    "device": "the device",
    "seed": "the seed of the example",
}


def _differing_fields(first: Struct, second: Struct, without: Collection[str]) -> Iterator[str]:
    """Yield the fields of two objects of one type that are not stored alike."""
    for field in first.__struct_fields__:
        if field not in without and not _is_same(getattr(first, field), getattr(second, field)):
            yield field


def _manifest_differences(first: Manifest, second: Manifest) -> Iterator[str]:
    # Entry points and files are compared by name; the digest covers everything else.
    for field in _differing_fields(first, second, ("entry_points", "files", "producer", "sha256")):
        yield f"{_TITLES.get(field, field)}: differs"


def _model_differences(first: _Model, second: _Model) -> Iterator[str]:
    """Yield what differs in the models but for their weights, whatever their cuts."""
    # A name is how the caller finds the entry point, or the file of the example, whose content is compared. What depends on the cut is
    # compared by `_cut_differences`.
    without = ("name", "stages", "edges", "plan", "example")
    for field in _differing_fields(first.bundle.entry_point, second.bundle.entry_point, without):
        yield f"{_TITLES.get(field, field)}: differs"
    examples = [model.bundle.entry_point.example for model in (first, second)]
    if None in examples and examples[0] != examples[1]:
        yield f"the example: only in {'B' if examples[0] is None else 'A'}"
    states = [{name for stage in model.bundle.stages for name in stage.state} for model in (first, second)]
    if states[0] != states[1]:
        yield f"the state: {', '.join(sorted(states[0] ^ states[1]))} in one of them"
    if len(first.graph.nodes) != len(second.graph.nodes):
        yield f"nodes: {len(first.graph.nodes)} and {len(second.graph.nodes)}"
    pairs = itertools.zip_longest(
        *(map(NodeContents(model.graph).content, model.graph.nodes) for model in (first, second))
    )
    position = next((index for index, (a, b) in enumerate(pairs) if a != b), None)
    if position is not None:
        shown = " and ".join(_shown_node(model.graph, position) for model in (first, second))
        yield f"node {position} is the first that differs: {shown}"
    # The tables belong to the nodes, and the symbols to the entry point; weights are compared by name.
    excluded = ("nodes", "symbols", "weights", "ops", "scopes", "contexts", "subgraphs")
    for field in _differing_fields(first.graph, second.graph, excluded):
        yield f"{field}: differ"


def _is_same(a: object, b: object) -> bool:
    """Whether two parts of graphs are stored alike. In Python -0.0 equals 0.0, True equals 1, and NaN does not equal itself."""
    return encode(a) == encode(b)


def _shown_node(graph: Graph, position: int) -> str:
    if position >= len(graph.nodes):
        return "none"
    node = graph.nodes[position]
    return f"{graph.ops[node.op].name} in {graph.scopes[node.scope].path or 'the model itself'}"


def _weight_differences(first: _Model, second: _Model) -> Iterator[tuple[str, str]]:
    """Yield the name of each weight that differs, and how."""
    common = []
    for weight_name in dict.fromkeys((*first.weights, *second.weights)):
        weights = first.weights.get(weight_name), second.weights.get(weight_name)
        a, b = weights
        if a is None or b is None:
            yield weight_name, "only in B" if a is None else "only in A"
        elif (a.dtype, a.shape) != (b.dtype, b.shape):
            described = [f"{weight.dtype}[{', '.join(map(str, weight.shape))}]" for weight in (a, b)]
            yield weight_name, " and ".join(described)
        elif a.names != b.names:
            tied = [", ".join(set(weight.names) - {weight_name}) or "nothing" for weight in (a, b)]
            yield weight_name, f"tied to {tied[0]} and to {tied[1]}"
        elif (a.kind, a.trainable, a.strides) != (b.kind, b.trainable, b.strides):
            yield weight_name, f"{_kind(a)} and {_kind(b)}"
        # A weight of zeros may be stored, and its value is compared with the nodes.
        elif fields := list(_differing_fields(a, b, ("value", "zeros"))):
            yield weight_name, f"other {', '.join(fields)}"
        elif weight_name == a.names[0]:
            common.append((weight_name, a, b))
    same_contents = map_in_threads(lambda pair: _is_same_content(first, second, pair[1], pair[2]), common)
    for (weight_name, _, _), is_same in zip(common, same_contents, strict=True):
        if not is_same:
            yield weight_name, "other values"


def _kind(weight: Weight) -> str:
    return f"{'trainable ' * weight.trainable}{weight.kind.replace('_', ' ')}" + f" of strides {weight.strides}" * bool(
        weight.strides
    )


def _is_same_content(first: _Model, second: _Model, first_weight: Weight, second_weight: Weight) -> bool:
    """Whether two weights of one shape and dtype have the same elements."""
    if first_weight.zeros or second_weight.zeros:
        stored = [
            _content(model, weight)
            for model, weight in ((first, first_weight), (second, second_weight))
            if not weight.zeros
        ]
        return all(not any(piece) for pieces in stored for piece in pieces)
    (first_path, a), (second_path, b) = first.locations[first_weight.stored], second.locations[second_weight.stored]
    first_entry, second_entry = first.bundle.files[first_path.name], second.bundle.files[second_path.name]
    if a.end - a.start != b.end - b.start or first_weight.offset != second_weight.offset:
        return False
    if first_entry.blake3 == second_entry.blake3 and a == b:
        return True
    return all(x == y for x, y in zip(_content(first, first_weight), _content(second, second_weight), strict=True))


def _content(model: _Model, weight: Weight) -> Iterator[bytes]:
    """The bytes of the stored tensor of a weight."""
    path, stored = model.locations[weight.stored]
    return model.bundle.pieces(path.name, stored.start, stored.end)


# The names of files; what they have is compared.
_FILE_NAMES: Final = ("graph", "weights")


def _cut_differences(first: Bundle, second: Bundle) -> Iterator[str]:
    """Yield what differs in the cuts."""
    if len(first.stages) != len(second.stages):
        yield f"stages: {len(first.stages)} and {len(second.stages)}"
        return
    for stage_number, (a, b) in enumerate(zip(first.stages, second.stages, strict=True)):
        if a.places != b.places or a.added != b.added:
            yield f"stage {stage_number}: other nodes, {a.nodes} and {b.nodes}"
        elif fields := list(_differing_fields(a, b, _FILE_NAMES)):
            yield f"stage {stage_number}: other {', '.join(fields)}"
    for field in ("edges", "plan"):
        if not _is_same(getattr(first.entry_point, field), getattr(second.entry_point, field)):
            yield f"{field}: differs"


def _is_stored_otherwise(first: _Model, second: _Model) -> bool:
    """Whether the graphs of the stages differ in what running them does not need, such as entries of tables."""
    return any(not _is_same(a, b) for a, b in zip(first.stages, second.stages, strict=True))


def _file_differences(first: Bundle, second: Bundle) -> Iterator[str]:
    """Yield the differences of files that are neither graphs nor weights, nor those of entry points that are not compared."""
    first_files, second_files = _other_files(first), _other_files(second)
    for file_name in sorted({*first_files, *second_files}):
        a, b = first_files.get(file_name), second_files.get(file_name)
        if a is None or b is None:
            yield f"{file_name}: only in {'B' if a is None else 'A'}"
        elif a.blake3 != b.blake3:
            yield f"{file_name}: other content"
    if first.manifest.producer != second.manifest.producer:
        yield "manifest.json: written by other versions of stagepack or torch"


def _other_files(bundle: Bundle) -> dict[str, File]:
    left_out = {INDEX_NAME}
    for entry_point in bundle.entry_points:
        is_compared = not bundle.fragment or entry_point is bundle.entry_point
        for stage in entry_point.stages:
            left_out |= {stage.graph, *stage.weights, *(() if is_compared else stage.onnx_files)}
        left_out |= set() if is_compared else {entry_point.example or ""}
    return {file_name: file for file_name, file in bundle.files.items() if file_name not in left_out}
