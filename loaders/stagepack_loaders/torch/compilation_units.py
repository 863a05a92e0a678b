"""What is compiled as one: a region that a stage calls several times, or a whole stage."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.graph import Graph
from stagepack_loaders.torch.build import NODE_COUNT


@dataclass(frozen=True, slots=True)
class CompilationUnit:
    """A region of a stage, or the whole stage.

    Attributes:
        stage_module: the module of the stage.
        region_name: the name of the region's module in it; empty for the whole stage.
    """

    stage_module: GraphModule
    region_name: str

    @property
    def module(self) -> GraphModule:
        """The module that is compiled."""
        module = self.stage_module.get_submodule(self.region_name) if self.region_name else self.stage_module
        assert isinstance(module, GraphModule)
        return module


def compilation_units(stage_module: GraphModule, graph: Graph) -> list[CompilationUnit]:
    """Return the units of a stage: the regions that it calls several times, or the stage if most of its nodes are outside of these."""
    calls = Counter(str(node.target) for node in stage_module.graph.nodes if node.op == "call_module")
    call_counts = {
        CompilationUnit(stage_module, region_name): count for region_name, count in calls.items() if count > 1
    }
    nodes_in_regions = sum(unit.module.meta[NODE_COUNT] * count for unit, count in call_counts.items())
    return list(call_counts) if 2 * nodes_in_regions >= len(graph.nodes) else [CompilationUnit(stage_module, "")]


def content_key(module: GraphModule) -> tuple[Any, ...]:
    """Return a key that is equal for modules that compute the same: their code, and the strings and modules that it uses."""
    attribute_names = dict.fromkeys(
        str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")
    )
    attributes = {attribute_name: getattr(module, attribute_name) for attribute_name in attribute_names}
    return (
        module.code,
        *(
            (attribute_name, content_key(attribute) if isinstance(attribute, GraphModule) else attribute)
            for attribute_name, attribute in attributes.items()
        ),
    )


def replace_units(
    stage_module: GraphModule, replacements: Mapping[CompilationUnit, torch.nn.Module]
) -> torch.nn.Module:
    """Replace units of a stage by other modules; return the module of the stage, or that which replaces the whole stage."""
    for unit, module in replacements.items():
        if not unit.region_name:
            return module
        setattr(stage_module, unit.region_name, module)
    return stage_module
