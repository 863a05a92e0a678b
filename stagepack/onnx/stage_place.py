"""Where a stage is in its bundle, and how its ONNX model says so."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir

from stagepack.format.manifest import VERSION, Edge
from stagepack.format.weights import StoredTensor

# The first version of ONNX in which a node names its pipeline stage.
_IR_VERSION = 11
_MODULE_KEY = "pkg.stagepack.module"


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlace:
    """Where a stage is in its bundle.

    Attributes:
        stage_number: the number of the stage.
        stage_count: the number of stages of the bundle.
        edges: the edges of the bundle by name.
        stored_tensors: the weight file of each stored tensor that the stage uses, and where it is in the file.
        own_weight_file: the name of the weight file for tensors that are in no other weight file.
    """

    stage_number: int
    stage_count: int
    edges: Mapping[str, Edge]
    stored_tensors: Mapping[str, tuple[Path, StoredTensor]]
    own_weight_file: str


def describe_place(model: ir.Model, stage_place: StagePlace, module_paths: Mapping[ir.Node, str]) -> None:
    """Write into a model which stage it is, and into its nodes which stage and which module they belong to."""
    model.ir_version = _IR_VERSION
    model.producer_name, model.producer_version = "stagepack", importlib.metadata.version("stagepack")
    # onnx.compose refuses to merge models whose metadata differ, so what differs between stages is metadata of the graph.
    model.metadata_props["pkg.stagepack.format_version"] = VERSION
    model.metadata_props["pkg.stagepack.stages"] = str(stage_place.stage_count)
    model.graph.name = f"stage_{stage_place.stage_number}"
    model.graph.metadata_props["pkg.stagepack.stage"] = str(stage_place.stage_number)
    configuration = model.add_device_configuration("stagepack", num_devices=stage_place.stage_count)
    stage_configuration = ir.NodeDeviceConfiguration(configuration, pipeline_stage=stage_place.stage_number)
    for node in model.graph.all_nodes():
        node.device_configurations = (stage_configuration,)
        if module_paths.get(node):
            node.metadata_props[_MODULE_KEY] = module_paths[node]
