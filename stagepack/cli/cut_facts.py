"""What a cut costs, as facts: `plan` prints them and `report` draws them."""

from collections.abc import Sequence
from typing import Any

from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.manifest import Edge
from stagepack.format.plan import Plan
from stagepack.format.shapes import Symbol, format_shape

MICROBATCHES = (1, 2, 4, 8, 16, 32)
DEVICES = "devices of 50 TFLOP/s and 1 TB/s that launch an operator in 2 µs, joined by 25 GB/s with 5 µs a value"


def cut_facts(plan: Plan, edges: Sequence[Edge], symbols: Sequence[Symbol]) -> dict[str, Any]:
    """The stages and edges of a cut with their costs at the sizes of the example."""
    sizes = example_sizes(symbols)
    times = [stage.time for stage in plan.stages]
    sent = [_edge_facts(edge, value_bytes(edge, sizes)) for edge in edges]
    between = [edge["bytes"] * len(edge["consumers"]) for edge in sent if edge["producer"] is not None]
    return {
        "sizes": sizes,
        "shared": plan.shared,
        "stages": [
            {
                "stage": number,
                "starts_at": stage.module,
                "nodes": sum(count for _, count in stage.nodes),
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "memory": stage.memory,
                "memory_limit": stage.memory_limit,
                "received": stage.received,
                "speed": stage.speed,
                "picoseconds": round(stage.time),
            }
            for number, stage in enumerate(plan.stages)
        ],
        "edges": sent,
        "traffic": sum(between),
        "slowest_over_mean": max(times) / (sum(times) / len(times)) if sum(times) else 1.0,
        "bubble": {str(count): bubble(times, count) for count in MICROBATCHES},
    }


def bubble(times: Sequence[float], microbatches: int) -> float:
    """The part of the devices' time that is spent waiting, when a batch goes through the stages in so many parts.

    Stages work at the same time on different parts: the first part takes the sum of the times, each further one that of the
    slowest stage. For even stages it is (S - 1) / (M + S - 1), as in GPipe (Huang et al., 2019, arXiv:1811.06965, section 3).
    """
    total = sum(times) + (microbatches - 1) * max(times)
    return 1 - sum(times) * microbatches / (len(times) * total) if total else 0.0


def _edge_facts(edge: Edge, size: int) -> dict[str, Any]:
    skipped = [consumer for consumer in edge.consumers if edge.producer is not None and consumer > edge.producer + 1]
    return {
        "name": edge.name,
        "value": f"{edge.dtype}{format_shape(edge.shape)}",
        "producer": edge.producer,
        "consumers": list(edge.consumers),
        "bytes": size,
        "skips": bool(skipped),
    }
