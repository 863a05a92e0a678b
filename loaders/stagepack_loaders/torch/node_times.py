"""Stages that measure how long each of their nodes takes."""

import time
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.unfold import trivially_folded
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.fx_body import GRAPH_NODE
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.prepare import PreparedTorchStage

_OVERHEAD_RUNS = 101


class NodeTimer:
    """The times of the nodes of one stage, run by run.

    Attributes:
        seconds: the time of each node in the last run, less that of measuring.
    """

    def __init__(self, node_count: int, wait: Callable[[], None]) -> None:
        self.seconds = [0.0] * max(node_count, 1)
        self._wait = wait
        self._overhead = 0.0
        measure_nothing = self.timed(lambda: None, 0)
        measured = []
        for _ in range(_OVERHEAD_RUNS):
            measure_nothing()
            measured.append(self.seconds[0])
        self._overhead = sorted(measured)[_OVERHEAD_RUNS // 2]

    def timed(self, operator: Callable[..., Any], node_index: int) -> Callable[..., Any]:
        """Return an operator that measures its calls for one node."""
        seconds, wait, clock = self.seconds, self._wait, time.perf_counter

        def timed_operator(*args: Any, **kwargs: Any) -> Any:
            start_time = clock()
            result = operator(*args, **kwargs)
            wait()
            seconds[node_index] = max(clock() - start_time - self._overhead, 0.0)
            return result

        return timed_operator


def with_node_timer(
    stage: PreparedTorchStage, wait: Callable[[], None], allow_ops: Collection[str]
) -> tuple[PreparedTorchStage, NodeTimer]:
    """Return a stage that runs the same operators, and measures each. Its regions are unfolded, so that each node is a call of its own."""
    graph = stage.code.graph
    file_name = stage.bundle.stages[stage.stage_number].graph
    operators = resolve_operators(graph.ops, allow_ops, file_name)
    module = build_graph_module(trivially_folded(graph), graph, operators, stage.device)
    timer = NodeTimer(len(graph.nodes), wait)
    # By identity: equal nodes of a graph, such as two calls without results, are two nodes.
    node_indices = {id(node): node_index for node_index, node in enumerate(graph.nodes)}
    for child_module in module.modules():
        if isinstance(child_module, GraphModule):
            _time_operators(child_module, node_indices, timer)
    return replace(stage, code=replace(stage.code, compiled_module=module)), timer


def _time_operators(module: GraphModule, node_indices: dict[int, int], timer: NodeTimer) -> None:
    """Replace the operators of a module by those that measure. The bodies of branches and loops belong to the node that runs them."""
    for fx_node in module.graph.nodes:
        node_index = node_indices.get(id(fx_node.meta.get(GRAPH_NODE)))
        if node_index is not None:
            fx_node.target = timer.timed(fx_node.target, node_index)
    module.recompile()


def copy_tensors(values: list[Any]) -> list[Any]:
    """Return values with memory of their own, for a stage that writes into its inputs."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
