"""A bundle in fewer stages than its files store: consecutive stages are joined when they are loaded, and nothing is written."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec.structs import replace

from stagepack.errors import OptionError
from stagepack.format.file_source import FileStream
from stagepack.format.graph import Graph, value_bytes
from stagepack.format.graph_codec import GraphFile
from stagepack.format.manifest import Edge, EntryPoint, Stage
from stagepack.format.plan import Plan, PlannedStage, run_members, to_runs
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.format.shapes import example_sizes
from stagepack.format.tree import value_names
from stagepack.format.validate.files import NamedWeights
from stagepack.format.validate.graph_rules import check_graph
from stagepack.format.weights import StoredTensor
from stagepack.graph.folding import outline_graph
from stagepack.graph.model_assembly import join_consecutive
from stagepack.partition.costs import REFERENCE_LINK
from stagepack.partition.shared_weights import weight_costs


def join_bundle(bundle: Bundle, stage_counts: Sequence[int]) -> Bundle:
    """Return a bundle in fewer stages: each is as many consecutive stages of `bundle` as `stage_counts` says.

    Only the graph files of its own stored stages are read for a stage. The ONNX models of stages that are joined are left out.
    """
    if any(count < 1 for count in stage_counts) or sum(stage_counts) != len(bundle.stages):
        raise OptionError(
            f"expected numbers of stages from 1 up with the sum {len(bundle.stages)}, the number of stages of the bundle, found "
            f"{', '.join(map(str, stage_counts))}"
        )
    if all(count == 1 for count in stage_counts):
        return bundle
    starts = [0, *itertools.accumulate(stage_counts)]
    stored_counts = [
        sum(len(bundle.stored_stages(number)) for number in range(start, end))
        for start, end in itertools.pairwise(starts)
    ]
    return _JoinedBundle(bundle.stored, stored_counts)


class _JoinedStage(Stage, frozen=True, kw_only=True, omit_defaults=True):
    """The manifest entry of stages that are joined. The number of nodes counts what several of them have several times."""

    joined_graphs: tuple[str, ...] = ()

    @property
    def graph_files(self) -> tuple[str, ...]:
        return self.joined_graphs


class _JoinedBundle(Bundle):
    """A bundle whose consecutive stages are joined; see `join_bundle`. No file stores their graphs, which are outlined, not folded.

    Attributes:
        stage_counts: for each stage, the number of stored stages that it consists of.
    """

    def __init__(self, stored: Bundle, stage_counts: Sequence[int]) -> None:
        vars(self).update(vars(stored))
        self.__dict__.pop("_facts", None)
        self.stage_counts = tuple(stage_counts)
        self._stored = stored.with_graphs_kept()
        starts = itertools.accumulate(stage_counts, initial=0)
        self._ranges = [range(start, end) for start, end in itertools.pairwise(starts)]
        self.selected = _joined_entry_point(stored, self._ranges)
        self._graph_files: dict[tuple[int, bool], tuple[GraphFile, list[int]]] = {}

    @property
    def stored(self) -> Bundle:
        return self._stored

    @property
    def identity(self) -> str:
        return f"{super().identity}@{','.join(map(str, self.stage_counts))}"

    def stored_stages(self, stage_number: int) -> range:
        self.stage(stage_number)
        return self._ranges[stage_number]

    def select(self, name: str) -> Bundle:
        return self._stored.select(name)

    def without_digests(self) -> "_JoinedBundle":
        return _JoinedBundle(self._stored.without_digests(), self.stage_counts)

    def node_numbers(self, stage_number: int) -> list[int]:
        return self._joined(stage_number, module_calls=True)[1]

    def graph_file(self, stage_number: int, *, module_calls: bool = True) -> GraphFile:
        return self._joined(stage_number, module_calls=module_calls)[0]

    def graphs(self) -> tuple[Graph, ...]:
        self._stored.graphs()
        return tuple(self.graph(stage_number) for stage_number in range(len(self.stages)))

    def tensors(
        self,
        stage_number: int,
        graph: Graph,
        stream: FileStream | None = None,
        named_weights: NamedWeights | None = None,
    ) -> dict[str, tuple[Path, StoredTensor]]:
        named_weights = named_weights or NamedWeights()
        located: dict[str, tuple[Path, StoredTensor]] = {}
        for number in self.stored_stages(stage_number):
            stored_graph = self._stored.graph_file(number, module_calls=False).graph
            located |= self._stored.tensors(number, stored_graph, stream, named_weights)
        return located

    def _joined(self, stage_number: int, *, module_calls: bool) -> tuple[GraphFile, list[int]]:
        """The joined graph of a stage, and the position of each of its nodes in the whole model."""
        numbers, key = self.stored_stages(stage_number), (stage_number, module_calls)
        if len(numbers) == 1:
            [number] = numbers
            return self._stored.graph_file(number, module_calls=module_calls), self._stored.node_numbers(number)
        if key not in self._graph_files:
            graphs = [self._stored.graph_file(number, module_calls=module_calls).graph for number in numbers]
            stage = self.stages[stage_number]
            edges = {edge.name: edge for edge in self.edges}
            inputs = [edges[edge_name] for edge_name in stage.inputs]
            entry_point = self._stored.entry_point
            graph, node_numbers = join_consecutive(entry_point, numbers, graphs, inputs, stage.outputs)
            raise_problems(check_graph(graph, stage.graph))
            self._graph_files[key] = GraphFile(outline_graph(graph), graph), node_numbers
        return self._graph_files[key]


def _joined_entry_point(bundle: Bundle, ranges: Sequence[range]) -> EntryPoint:
    """The entry point of a bundle whose stages in each range are one."""
    entry_point = bundle.entry_point
    part_of = [part_number for part_number, numbers in enumerate(ranges) for _ in numbers]
    results = set(value_names(entry_point.signature.result))
    edges = []
    for edge in entry_point.edges:
        producer = None if edge.producer is None else part_of[edge.producer]
        consumers = tuple(sorted({part_of[consumer] for consumer in edge.consumers} - {producer}))
        if producer is None or consumers or edge.name in results:
            edges.append(replace(edge, producer=producer, consumers=consumers))
    costs = list(weight_costs(entry_point, bundle.files.values()))
    weight_bytes = [
        sum(weight.cost for weight in costs if weight.is_used(numbers.start, numbers.stop)) for numbers in ranges
    ]
    stages = [
        entry_point.stages[numbers[0]]
        if len(numbers) == 1
        else replace(_joined_stage(bundle, numbers, part_number, edges), weight_bytes=weight_bytes[part_number])
        for part_number, numbers in enumerate(ranges)
    ]
    plan = entry_point.plan
    if plan is not None:
        sizes = example_sizes(entry_point.symbols)
        planned = [
            _joined_plan(
                plan,
                numbers,
                weight_bytes[part_number],
                [value_bytes(edge, sizes) for edge in edges if part_number in edge.consumers],
            )
            for part_number, numbers in enumerate(ranges)
        ]
        plan = Plan(stages=tuple(planned), shared=plan.shared)
    return replace(entry_point, stages=tuple(stages), edges=tuple(edges), plan=plan)


def _joined_stage(bundle: Bundle, numbers: range, part_number: int, edges: Sequence[Edge]) -> Stage:
    stages = [bundle.stages[number] for number in numbers]
    graph_files = tuple(stage.graph for stage in stages)
    weight_files = _union(stage.weights for stage in stages)
    return _JoinedStage(
        graph=f"{graph_files[0]} to {graph_files[-1]}",
        joined_graphs=graph_files,
        weights=weight_files,
        inputs=tuple(edge.name for edge in edges if part_number in edge.consumers),
        outputs=tuple(edge.name for edge in edges if edge.producer == part_number),
        nodes=sum(stage.nodes for stage in stages),
        flops=sum(stage.flops for stage in stages),
        namespaces=tuple(sorted(_union(stage.namespaces for stage in stages))),
        state=_union(stage.state for stage in stages),
    )


def _joined_plan(plan: Plan, numbers: range, weight_bytes: int, received: Sequence[int]) -> PlannedStage:
    """The costs of stages that are joined: what several of them compute counts each time."""
    stages = [plan.stages[number] for number in numbers]
    return PlannedStage(
        nodes=to_runs(sorted(itertools.chain.from_iterable(run_members(stage.nodes) for stage in stages))),
        module=stages[0].module,
        weight_bytes=weight_bytes,
        flops=sum(stage.flops for stage in stages),
        bytes=sum(stage.bytes for stage in stages),
        received=sum(received),
        picoseconds=sum(stage.picoseconds for stage in stages),
        receiving=sum(map(REFERENCE_LINK.sending_time, received)),
        memory=weight_bytes + max(stage.memory - stage.weight_bytes for stage in stages),
        speed=stages[0].speed,
    )


def _union(name_lists: Iterable[Sequence[str]]) -> tuple[str, ...]:
    """The names in several lists, each once."""
    return tuple(dict.fromkeys(itertools.chain.from_iterable(name_lists)))
