"""The facts of an adapter as plain data and for people, read from its document and the header of its tensors."""

from typing import Any

from stagepack.adapter.document import A_SUFFIX, B_SUFFIX, BIAS_SUFFIX
from stagepack.adapter.opened import OpenAdapter
from stagepack.cli.output import count_of, print_line, print_table
from stagepack.format.quantities import format_bytes

_SHOWN_CHANGES = 40


def adapter_facts(adapter: OpenAdapter) -> dict[str, Any]:
    """Return the facts of an adapter as plain data."""
    return {
        "path": adapter.location,
        "digest": adapter.digest,
        "base": adapter.base,
        "bytes": sum(file.size for file in adapter.listed),
        "ranks": sorted({pair.rank for pair in adapter.pairs.values()}),
        "changes": [
            {
                "module": module,
                "weight": change.weight,
                "rank": adapter.pairs[module].rank,
                "in": adapter.tensors[module + A_SUFFIX].shape[1],
                "out": adapter.tensors[module + B_SUFFIX].shape[0],
                "scale": change.scale,
                "bias": module + BIAS_SUFFIX in adapter.tensors,
            }
            for module, change in adapter.changes.items()
        ],
        "replaced": {name: list(adapter.tensors[name].shape) for name in adapter.document.replaced},
    }


def print_adapter(adapter: OpenAdapter) -> None:
    """Print the facts of an adapter for people."""
    facts = adapter_facts(adapter)
    print_line(f"{adapter.location}: an adapter: {format_bytes(facts['bytes'])}, {adapter_line(facts)}")
    print_line(f"base: {adapter.base}")
    print_line(f"sha256: {adapter.digest}")
    rows = [
        [
            change["module"],
            str(change["rank"]),
            str(change["in"]),
            str(change["out"]),
            f"{change['scale']:g}",
            "low-rank, with a bias" if change["bias"] else "low-rank",
        ]
        for change in facts["changes"]
    ]
    rows += [[name, "", "", "", "", f"replaced by {shape}"] for name, shape in facts["replaced"].items()]
    print_table("changes", ["module or weight", "#rank", "#in", "#out", "#scale", "change"], rows[:_SHOWN_CHANGES])
    if len(rows) > _SHOWN_CHANGES:
        print_line(f"  and {len(rows) - _SHOWN_CHANGES} more; --json shows all")


def adapter_line(facts: dict[str, Any]) -> str:
    """Return how many modules and weights an adapter changes."""
    ranks = ", ".join(map(str, facts["ranks"]))
    modules = count_of("module", len(facts["changes"]))
    changes = f"low-rank changes of {modules}, of rank {ranks}" if facts["changes"] else ""
    replaced = count_of("replaced weight", len(facts["replaced"])) if facts["replaced"] else ""
    return "; ".join(filter(None, (changes, replaced)))
