"""Which values travel between the processes of a pipeline. Computed alike by every process from the manifest; imports no torch."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.tree import value_names
from stagepack_loaders.placement import place_stages

# The rank of the process that is called, which has the inputs of the model and gets its results.
FRONT_RANK = 0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Route:
    """Values that one process sends to another one at one time.

    Attributes:
        source_stage: the stage that has run before they are sent; None for inputs of the model.
        source_rank: the process that sends.
        target_rank: the process that receives.
        edges: the values. A route may have none: it then tells the target of the request, or that the stage has run.
    """

    source_stage: int | None
    source_rank: int
    target_rank: int
    edges: tuple[Edge, ...]

    @property
    def head_tag(self) -> int:
        """The tag of heads; this number and the next two belong to no other route between the two processes."""
        return 1 if self.source_stage is None else 4 + 3 * self.source_stage

    @property
    def body_tag(self) -> int:
        """The tag of bodies of known size."""
        return self.head_tag + 1

    @property
    def late_tag(self) -> int:
        """The tag of values whose shape depends on data."""
        return self.head_tag + 2


def assign_stages(entry_point: EntryPoint, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the rank that runs each stage. Consecutive stages share one if there are fewer ranks than stages."""
    return tuple(place_stages(entry_point, ranks))


def find_routes(
    entry_point: EntryPoint, rank_of_stage: Sequence[int], written_inputs: Mapping[int, Collection[str]]
) -> tuple[Route, ...]:
    """Return all routes, in the order in which a request uses them. Each process but the front has some that end and some that begin there.

    written_inputs: the inputs of the model whose memory a stage writes, by stage number. Their content goes back to the caller.
    """
    routes = [
        Route(source_stage=None, source_rank=FRONT_RANK, target_rank=target_rank, edges=edges)
        for target_rank in sorted(set(rank_of_stage) - {FRONT_RANK})
        if (edges := _edges_to(entry_point, None, target_rank, rank_of_stage))
    ]
    results = set(value_names(entry_point.signature.result))
    for stage_number, source_rank in enumerate(rank_of_stage):
        returned_edges = tuple(
            edge
            for edge in entry_point.edges
            if (edge.producer == stage_number and edge.name in results)
            or edge.name in written_inputs.get(stage_number, ())
        )
        edges_of_target = {
            target_rank: _edges_to(entry_point, stage_number, target_rank, rank_of_stage)
            for target_rank in sorted(set(rank_of_stage) - {FRONT_RANK})
        }
        edges_of_target[FRONT_RANK] = returned_edges
        sends = {target: edges for target, edges in edges_of_target.items() if edges and target != source_rank}
        if not sends and source_rank != FRONT_RANK and stage_number == _last_stage(rank_of_stage, source_rank):
            sends[FRONT_RANK] = ()
        routes += [
            Route(source_stage=stage_number, source_rank=source_rank, target_rank=target, edges=edges)
            for target, edges in sends.items()
        ]
    ranks_without_inputs = set(rank_of_stage) - {FRONT_RANK} - {route.target_rank for route in routes}
    unasked_routes = [
        Route(source_stage=None, source_rank=FRONT_RANK, target_rank=rank, edges=())
        for rank in sorted(ranks_without_inputs)
    ]
    return (*unasked_routes, *routes)


def _edges_to(
    entry_point: EntryPoint, producer: int | None, target_rank: int, rank_of_stage: Sequence[int]
) -> tuple[Edge, ...]:
    """The edges of one producer that stages of a process use."""
    return tuple(
        edge
        for edge in entry_point.edges
        if edge.producer == producer and any(rank_of_stage[consumer] == target_rank for consumer in edge.consumers)
    )


def _last_stage(rank_of_stage: Sequence[int], rank: int) -> int:
    return max(stage_number for stage_number, stage_rank in enumerate(rank_of_stage) if stage_rank == rank)
