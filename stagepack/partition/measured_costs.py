"""The times of a profile in the place of estimates."""

from dataclasses import dataclass, replace

from stagepack.errors import CutError
from stagepack.format.graph import Graph
from stagepack.partition.costs import REFERENCE_LINK, GraphCosts, LinkCosts
from stagepack.partition.profile import Profile, model_digest

_PICOSECONDS = 10**12  # in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """The costs of a graph with measured times.

    Attributes:
        costs: the costs; times that were not measured are estimates times `scale`.
        measured_count: the number of nodes whose time was measured.
        scale: the sum of the measured times divided by the sum of the estimates of the same nodes.
    """

    costs: GraphCosts
    measured_count: int
    scale: float


def measured_costs(graph: Graph, costs: GraphCosts, profile: Profile) -> MeasuredCosts:
    """Replace estimated times of nodes by measured ones, and that of sending values if the profile has it. All other costs stay."""
    found_digest = model_digest(graph)
    if profile.model != found_digest:
        raise CutError(
            f"profile: expected times of this model ({found_digest[:12]}), found those of another one ({profile.model[:12]}): "
            "measure this model with 'stagepack profile'"
        )
    measured_times = {
        node_time.node: max(round(node_time.seconds * _PICOSECONDS), 1)
        for node_time in profile.nodes
        if 0 <= node_time.node < len(graph.nodes)
    }
    if not measured_times and graph.nodes:
        raise CutError("profile: expected the time of at least one node, found none: run 'stagepack profile' again")
    estimated_sum = sum(costs.node_times[node_number] for node_number in measured_times)
    scale = sum(measured_times.values()) / estimated_sum if estimated_sum else 1.0
    node_times = tuple(
        measured_times.get(node_number, max(round(estimate * scale), 1))
        for node_number, estimate in enumerate(costs.node_times)
    )
    return MeasuredCosts(
        costs=replace(costs, node_times=node_times, link=_link_costs(profile)),
        measured_count=len(measured_times),
        scale=scale,
    )


def _link_costs(profile: Profile) -> LinkCosts:
    if profile.link is None:
        return REFERENCE_LINK
    return LinkCosts(
        per_value=round(profile.link.seconds_per_value * _PICOSECONDS),
        per_byte=profile.link.seconds_per_byte * _PICOSECONDS,
    )
