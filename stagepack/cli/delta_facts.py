"""The facts of a delta as plain data and for people, read from its documents alone."""

from collections import Counter
from typing import Any

from stagepack.cli.output import count_of, print_line, print_table
from stagepack.deltas.delta import Delta
from stagepack.format.quantities import format_bytes

_SHOWN_FILES = 40


def delta_facts(delta: Delta) -> dict[str, Any]:
    """Return the facts of a delta as plain data."""
    manifest = delta.result_manifest
    graphs = {stage.graph for entry_point in manifest.entry_points for stage in entry_point.stages}
    return {
        "path": delta.location,
        "digest": delta.digest,
        "base": delta.base,
        "result": delta.result,
        "version": delta.version,
        "bytes": sum(file.size for file in delta.listed),
        "result_bytes": sum(file.size for file in manifest.files),
        "graphs_changed": sorted(graphs & delta.changed_files.keys()),
        "files": [
            {
                "file": changed.name,
                "bytes": delta.files[changed.data].size,
                "tensors": len(changed.tensors),
                "codes": dict(sorted(Counter(part.code for part in changed.parts).items())),
            }
            for changed in delta.document.changed
        ],
    }


def print_delta(delta: Delta) -> None:
    """Print the facts of a delta for people."""
    facts = delta_facts(delta)
    version = f", version {delta.version}" if delta.version else ""
    share = facts["bytes"] / max(1, facts["result_bytes"])
    print_line(f"{delta.location}: a delta{version}: {format_bytes(facts['bytes'])}, {share:.2%} of its result")
    print_line(f"base: {delta.base}")
    print_line(f"result: {delta.result}")
    changed = ", ".join(facts["graphs_changed"])
    print_line(f"graphs: {f'changed: {changed}' if changed else 'those of the base'}")
    rows = [
        [
            file["file"],
            format_bytes(file["bytes"]),
            str(file["tensors"] or ""),
            ", ".join(f"{count} {code}" for code, count in file["codes"].items()),
        ]
        for file in facts["files"][:_SHOWN_FILES]
    ]
    print_table(f"{count_of('changed file', len(facts['files']))}", ["file", "#bytes", "#tensors", "parts"], rows)
    if len(facts["files"]) > _SHOWN_FILES:
        print_line(f"  and {len(facts['files']) - _SHOWN_FILES} more; --json shows all")
