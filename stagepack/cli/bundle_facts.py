"""The facts of a bundle as plain data and for people, read from its manifest alone."""

from collections.abc import Iterator, Sequence
from typing import Any

from stagepack.cli.output import count_of, print_line, print_table
from stagepack.format.manifest import Edge, Stage, format_inputs
from stagepack.format.quantities import format_bytes, format_flops
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_guard, format_range, format_shape
from stagepack.format.tree import result_names


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """Return the facts of a bundle as plain data: of the selected entry point, or of all of them in the list ``entry_points``."""
    manifest = bundle.manifest
    common_facts: dict[str, Any] = {
        "path": bundle.location,
        "version": manifest.version,
        "digest": bundle.digest,
        "producer": {"stagepack": manifest.producer.stagepack, "torch": manifest.producer.torch},
        "bytes": sum(file.size for file in manifest.files),
    }
    if bundle.selected is None:
        return common_facts | {"entry_points": [_entry_point_facts(selected) for selected in each_entry_point(bundle)]}
    return common_facts | _entry_point_facts(bundle)


def each_entry_point(bundle: Bundle) -> list[Bundle]:
    """Return the bundle at its selected entry point, or if none is selected, at each."""
    if bundle.selected is not None:
        return [bundle]
    return [bundle.select(entry_point.name) for entry_point in bundle.entry_points]


def _entry_point_facts(bundle: Bundle) -> dict[str, Any]:
    input_names = [edge.name for edge in bundle.inputs]
    names_of_value: dict[str, list[str]] = {}
    for output_name, value_name in result_names(bundle.entry_point.signature.result, input_names).items():
        names_of_value.setdefault(value_name, []).append(output_name)
    return {
        "entry_point": bundle.entry_point.name,
        "symbols": {symbol.name: {"min": symbol.min, "max": symbol.max} for symbol in bundle.entry_point.symbols},
        "guards": [format_guard(guard) for guard in bundle.entry_point.guards],
        "stages": [
            {
                "stage": stage_number,
                "nodes": stage.nodes,
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "files": [stage.graph, *stage.weights],
                "onnx": onnx_facts(bundle, stage),
                "inputs": list(stage.inputs),
                "outputs": list(stage.outputs),
                "namespaces": list(stage.namespaces),
                "state": list(stage.state),
            }
            for stage_number, stage in enumerate(bundle.stages)
        ],
        "edges": [
            {
                "name": edge.name,
                "dtype": edge.dtype,
                "shape": format_shape(edge.shape),
                "producer": edge.producer,
                "consumers": list(edge.consumers),
                "result": edge.name in names_of_value,
                "outputs": names_of_value.get(edge.name, []),
            }
            for edge in bundle.edges
        ],
    }


def onnx_facts(bundle: Bundle, stage: Stage) -> dict[str, Any] | None:
    """Return the ONNX files of a stage and their sizes in bytes, or None if it has no ONNX model."""
    if stage.onnx is None:
        return None
    model_file, weight_files = stage.onnx.model, stage.onnx.weights
    return {
        "files": [model_file, *weight_files],
        "bytes": bundle.files[model_file].size,
        "own_bytes": sum(bundle.files[weight_file].size for weight_file in weight_files),
    }


def print_bundle(bundle: Bundle) -> None:
    """Print the facts of a bundle for people."""
    facts = bundle_facts(bundle)
    producer = f"stagepack {facts['producer']['stagepack']}, torch {facts['producer']['torch']}"
    print_line(f"{facts['path']}: format {facts['version']}, {format_bytes(facts['bytes'])}, written by {producer}")
    print_line(f"sha256: {facts['digest']}")
    for selected in each_entry_point(bundle):
        if len(bundle.entry_points) > 1:
            print_line("")
            print_line(f"entry point {selected.entry_point.name}")
        _print_entry_point(selected, _entry_point_facts(selected))


def _print_entry_point(bundle: Bundle, facts: dict[str, Any]) -> None:
    for line in size_lines(bundle):
        print_line(line)
    print_stages(bundle)
    edge_rows = [
        [edge.name, f"{edge.dtype}{format_shape(edge.shape)}", *_ends(edge, fact["outputs"])]
        for edge, fact in zip(bundle.edges, facts["edges"], strict=True)
    ]
    print_table("edges", ["name", "value", "from", "to"], edge_rows)
    onnx_rows = [
        [
            str(stage["stage"]),
            format_bytes(stage["onnx"]["bytes"]),
            format_bytes(stage["onnx"]["own_bytes"]),
            " ".join(stage["onnx"]["files"]),
        ]
        for stage in facts["stages"]
        if stage["onnx"]
    ]
    if onnx_rows:
        print_table("ONNX models", ["#stage", "#model", "#own weights", "files"], onnx_rows)
    for stage in facts["stages"]:
        if stage["state"]:
            print_line(f"stage {stage['stage']} has state: {', '.join(stage['state'])}")
        if stage["namespaces"]:
            print_line(permission_line(stage["stage"], stage["namespaces"]))


def permission_line(stage_number: int, permissions: Sequence[str]) -> str:
    """Say what a stage needs to be allowed."""
    return (
        f"stage {stage_number} runs only with --allow-ops {' --allow-ops '.join(permissions)}: "
        "pass it only if you know and trust the bundle and the library of these operators"
    )


def size_lines(bundle: Bundle) -> Iterator[str]:
    """Yield the ranges of the dynamic sizes, and the conditions on them; nothing if all sizes are fixed."""
    if bundle.entry_point.symbols:
        ranges = ", ".join(f"{symbol.name}: {format_range(symbol)}" for symbol in bundle.entry_point.symbols)
        yield f"dynamic sizes: {ranges}"
    if bundle.entry_point.guards:
        yield f"only for sizes with {', '.join(map(format_guard, bundle.entry_point.guards))}"


def print_written(bundle: Bundle, out: str, seconds: float) -> None:
    """Print that a bundle was written, its inputs with their dynamic sizes, and its table of stages."""
    size = format_bytes(sum(file.size for file in bundle.manifest.files))
    stage_count = sum(len(selected.stages) for selected in each_entry_point(bundle))
    print_line(f"wrote {out}: {count_of('stage', stage_count)}, {size}, in {seconds:.1f} s")
    for selected in each_entry_point(bundle):
        if len(bundle.entry_points) > 1:
            print_line(f"entry point {selected.entry_point.name}")
        print_line(f"inputs: {format_inputs(selected.entry_point)}")
        for line in size_lines(selected):
            print_line(line)
        print_stages(selected)


def print_stages(bundle: Bundle) -> None:
    """Print the table of stages."""
    rows = [
        [
            str(stage_number),
            str(stage.nodes),
            format_bytes(stage.weight_bytes),
            format_flops(stage.flops),
            " ".join([stage.graph, *stage.weights]),
        ]
        for stage_number, stage in enumerate(bundle.stages)
    ]
    print_table("stages", ["#stage", "#nodes", "#weights", "#compute", "files"], rows)


def _ends(edge: Edge, outputs: list[str]) -> list[str]:
    """Return where an edge comes from and where it goes to: the result has the names that callers know."""
    source = "input" if edge.producer is None else f"stage {edge.producer}"
    targets = [f"stage {consumer}" for consumer in edge.consumers] + [f"result {name}" for name in outputs]
    return [source, ", ".join(targets) or "(unused)"]
