"""An adapter read as SPEC.md says, by a reader without stagepack, gives the answers of the loader."""

import hashlib
import json
from pathlib import Path

import msgpack
import numpy
import safetensors.numpy
import torch
from blake3 import blake3

import stagepack
from tests.adapters.lora import TinyLayer, write_lora
from tests.conformance.vectors import TINY


def answer(bundle: Path, adapter: Path, x: numpy.ndarray) -> numpy.ndarray:
    """What the bundle of the worked example answers with an adapter of plain linear layers."""
    content = (adapter / "manifest.json").read_bytes()
    document = json.loads(content)
    zeroed = content.replace(document["sha256"].encode(), b"0" * 64)
    assert hashlib.sha256(zeroed).hexdigest() == document["sha256"]
    manifest = json.loads((bundle / "manifest.json").read_text())
    assert document["base"] == manifest["sha256"]
    [file] = document["files"]
    assert blake3((adapter / file["name"]).read_bytes()).hexdigest() == file["blake3"]
    pairs = safetensors.numpy.load_file(adapter / file["name"])
    changes = {change["module"]: change for change in document["changes"]}
    values = {"x": x}
    for stage in manifest["entry_points"][0]["stages"]:
        tensors: dict[str, numpy.ndarray] = {}
        for name in stage.get("weights", []):
            tensors |= safetensors.numpy.load_file(bundle / name)
        tensors |= {name: pairs[name] for name in document["replaced"] if name in tensors}
        graph = msgpack.unpackb((bundle / stage["graph"]).read_bytes())
        weights = {weight["value"]: weight["names"][0] for weight in graph.get("weights", [])}
        local = {name: values[name] for name in stage["inputs"]}
        local |= {value: tensors[name] for value, name in weights.items()}
        for node in graph["nodes"]:
            operands = [argument[1] for argument in node["args"]]
            rows = local[operands[0]]
            if graph["ops"][node["op"]]["name"] == "aten.relu.default":
                made = numpy.maximum(rows, 0)
            else:
                made = rows @ local[operands[1]].T + local[operands[2]]
                change = changes.get(graph["scopes"][node.get("scope", 0)]["path"])
                if change is not None and weights[operands[1]] == change["weight"]:
                    a, b = (pairs[f"{change['module']}.lora_{letter}"] for letter in "AB")
                    made = made + ((rows @ a.T) @ b.T) * change["scale"]
            local[node["outputs"][0]["name"]] = made
        values |= {name: local[name] for name in stage["outputs"]}
    found: numpy.ndarray = values["result"]
    return found


def test_an_adapter_is_read_without_stagepack(tmp_path: Path) -> None:
    bias = torch.tensor([4.0, -3.0, 1.0])
    lora = write_lora(
        TinyLayer(), tmp_path / "lora", {"layer": 2}, replaced={"layer.base_layer.bias": bias}, bias="all"
    )
    path = lora / "adapter_model.safetensors"
    tensors = safetensors.numpy.load_file(path)
    # Whole numbers, so that no sum is rounded.
    safetensors.numpy.save_file({name: numpy.round(4 * tensor) for name, tensor in tensors.items()}, path)
    adapter = stagepack.write_adapter(TINY, lora, out=tmp_path / "a")
    x = numpy.array([[1, -1], [2, 2], [0, 5]], "float32")
    (expected,) = stagepack.load(TINY, adapters=[adapter.path])(x, adapter="a")
    found = answer(TINY, adapter.path, x)
    assert found.tolist() == numpy.asarray(expected).tolist()
    (plain,) = stagepack.load(TINY)(x)
    assert found.tolist() != numpy.asarray(plain).tolist()
