"""What `inspect` and `export` say of a bundle, from its manifest alone."""

from typing import Any

from stagepack.cli.output import print_line, print_table
from stagepack.cli.quantities import format_bytes, format_flops
from stagepack.format.manifest import Edge, Stage
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_range, format_shape
from stagepack.format.tree import value_names


def bundle_facts(bundle: Bundle) -> dict[str, Any]:
    """The facts of a bundle as plain data."""
    manifest = bundle.manifest
    results = set(value_names(manifest.signature.result))
    return {
        "path": str(bundle.path),
        "version": manifest.version,
        "digest": bundle.digest,
        "producer": {"stagepack": manifest.producer.stagepack, "torch": manifest.producer.torch},
        "bytes": sum(file.size for file in manifest.files),
        "symbols": {symbol.name: {"min": symbol.min, "max": symbol.max} for symbol in manifest.symbols},
        "stages": [
            {
                "stage": number,
                "nodes": stage.nodes,
                "weight_bytes": stage.weight_bytes,
                "flops": stage.flops,
                "files": [stage.graph, *stage.weights],
                "onnx": onnx_bytes(bundle, stage),
                "inputs": list(stage.inputs),
                "outputs": list(stage.outputs),
                "namespaces": list(stage.namespaces),
                "state": list(stage.state),
            }
            for number, stage in enumerate(bundle.stages)
        ],
        "edges": [
            {
                "name": edge.name,
                "dtype": edge.dtype,
                "shape": format_shape(edge.shape),
                "producer": edge.producer,
                "consumers": list(edge.consumers),
                "result": edge.name in results,
            }
            for edge in bundle.edges
        ],
    }


def onnx_bytes(bundle: Bundle, stage: Stage) -> dict[str, Any] | None:
    """What a stage has for ONNX beside its weights."""
    if stage.onnx is None:
        return None
    model, weights = stage.onnx.model, stage.onnx.weights
    return {
        "files": [model, *weights],
        "bytes": bundle.files[model].size,
        "own_bytes": sum(bundle.files[name].size for name in weights),
    }


def print_facts(bundle: Bundle) -> None:
    """Print a bundle for people."""
    facts = bundle_facts(bundle)
    producer = f"stagepack {facts['producer']['stagepack']}, torch {facts['producer']['torch']}"
    print_line(f"{facts['path']}: format {facts['version']}, {format_bytes(facts['bytes'])}, made by {producer}")
    print_line(f"sha256 {facts['digest']}")
    if bundle.manifest.symbols:
        print_line(
            "sizes  " + ", ".join(f"{symbol.name}: {format_range(symbol)}" for symbol in bundle.manifest.symbols)
        )
    print_stages(bundle)
    rows = [
        [edge.name, f"{edge.dtype}{format_shape(edge.shape)}", *_ends(edge, fact["result"])]
        for edge, fact in zip(bundle.edges, facts["edges"], strict=True)
    ]
    print_table("edges", ["name", "value", "from", "to"], rows)
    if any(stage["onnx"] for stage in facts["stages"]):
        rows = [
            [
                str(stage["stage"]),
                format_bytes(found["bytes"]),
                format_bytes(found["own_bytes"]),
                " ".join(found["files"]),
            ]
            for stage in facts["stages"]
            if (found := stage["onnx"])
        ]
        print_table("as ONNX", ["#stage", "#model", "#weights of its own", "files"], rows)
    for stage in facts["stages"]:
        if stage["state"]:
            print_line(f"stage {stage['stage']} writes {', '.join(stage['state'])}")
        if stage["namespaces"]:
            print_line(f"stage {stage['stage']} needs --allow-ops {' --allow-ops '.join(stage['namespaces'])}")


def print_stages(bundle: Bundle) -> None:
    """Print the table of stages."""
    rows = [
        [
            str(number),
            str(stage.nodes),
            format_bytes(stage.weight_bytes),
            format_flops(stage.flops),
            " ".join([stage.graph, *stage.weights]),
        ]
        for number, stage in enumerate(bundle.stages)
    ]
    print_table("stages", ["#stage", "#nodes", "#weights", "#compute", "files"], rows)


def _ends(edge: Edge, result: bool) -> list[str]:
    source = "input" if edge.producer is None else f"stage {edge.producer}"
    targets = [f"stage {consumer}" for consumer in edge.consumers] + (["result"] if result else [])
    return [source, ", ".join(targets) or "(unused)"]
