"""The estimated costs of a cut as plain data, which `plan` prints and `report` draws."""

from collections.abc import Collection, Sequence
from typing import Any

from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.manifest import Edge
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, format_shape
from stagepack.format.tree import value_names

MICROBATCH_COUNTS = (1, 2, 4, 8, 16, 32)
ASSUMED_LINKS = "links of 25 GB/s, 5 µs for each value"
ASSUMED_DEVICES = f"devices of 50 TFLOP/s and 1 TB/s, 2 µs for each operator; {ASSUMED_LINKS}"


def cut_facts(
    plan: Plan,
    edges: Sequence[Edge],
    symbols: Sequence[Symbol],
    *,
    node_counts: Sequence[int],
    result_names: Collection[str],
) -> dict[str, Any]:
    """Return the stages and edges of a cut with their costs at the sizes of the example.

    node_counts: the number of nodes in the graph of each stage. The plan does not count nodes that several stages compute.
    """
    sizes = example_sizes(symbols)
    stage_times = [stage.time for stage in plan.stages]
    edge_facts = [_edge_facts(edge, value_bytes(edge, sizes), edge.name in result_names) for edge in edges]
    return {
        "sizes": sizes,
        "shared": plan.shared,
        "stages": [
            {
                "stage": stage_number,
                "starts_at": stage.module,
                "nodes": node_count,
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "memory": stage.memory,
                "memory_limit": stage.memory_limit,
                "received": stage.received,
                "speed": stage.speed,
                "picoseconds": round(stage.time),
            }
            for stage_number, (stage, node_count) in enumerate(zip(plan.stages, node_counts, strict=True))
        ],
        "edges": edge_facts,
        "traffic": sum(edge["bytes"] * len(edge["consumers"]) for edge in edge_facts if edge["producer"] is not None),
        "slowest_over_mean": max(stage_times) / (sum(stage_times) / len(stage_times)) if sum(stage_times) else 1.0,
        "bubble": {str(count): bubble_share(stage_times, count) for count in MICROBATCH_COUNTS},
    }


def bundle_cut_facts(bundle: Bundle, plan: Plan) -> dict[str, Any]:
    """Return the facts of the cut of a bundle, with the times of a plan of the same stages."""
    entry_point = bundle.entry_point
    return cut_facts(
        plan,
        bundle.edges,
        entry_point.symbols,
        node_counts=[stage.nodes for stage in bundle.stages],
        result_names=set(value_names(entry_point.signature.result)),
    )


def bubble_share(stage_times: Sequence[float], microbatch_count: int) -> float:
    """Return the share of the devices' time that is idle while a batch passes through the pipeline in microbatches.

    Stages work on different microbatches at the same time: the first microbatch takes the sum of the stage times, each further one the
    time of the slowest stage. For M microbatches and S even stages the share is (S - 1) / (M + S - 1), as in GPipe (Huang et al.,
    2019, arXiv:1811.06965, section 3).
    """
    batch_time = sum(stage_times) + (microbatch_count - 1) * max(stage_times)
    return 1 - sum(stage_times) * microbatch_count / (len(stage_times) * batch_time) if batch_time else 0.0


def _edge_facts(edge: Edge, byte_count: int, is_result: bool) -> dict[str, Any]:
    return {
        "name": edge.name,
        "value": f"{edge.dtype}{format_shape(edge.shape)}",
        "producer": edge.producer,
        "consumers": list(edge.consumers),
        "result": is_result,
        "bytes": byte_count,
        "skips": edge.producer is not None and any(consumer > edge.producer + 1 for consumer in edge.consumers),
    }
