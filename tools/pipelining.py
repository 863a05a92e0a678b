"""What `torch.distributed.pipelining` makes of a model: the other side of our comparisons."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import fx
from torch.distributed.pipelining import Pipe, pipeline
from torch.distributed.pipelining._IR import aten_pipe_split_alias

from stagepack.capture.inputs import Inputs

Split = Callable[[fx.GraphModule], fx.GraphModule]


def cut(model: torch.nn.Module, inputs: Inputs, split: Split) -> Pipe:
    """Cut a model; the sizes of the example are fixed in what comes out."""
    return pipeline(model, tuple(inputs.args), dict(inputs.kwargs), split_policy=split)


def evenly(stages: int) -> Split:
    """Cut into stages with as many nodes each."""

    def split(module: fx.GraphModule) -> fx.GraphModule:
        nodes = _calls(module)
        return _before(module, [nodes[len(nodes) * stage_number // stages] for stage_number in range(1, stages)])

    return split


def sent_bytes(pipe: Pipe) -> list[int]:
    """The bytes that each stage but the first receives from stages before it in one call, by the shapes that the trace has noted."""
    stages = [node for node in pipe.split_gm.graph.nodes if node.op == "call_module"]
    return [sum(_bytes(pipe.split_gm, stage_input) for stage_input in stage.all_input_nodes) for stage in stages[1:]]


def _bytes(module: fx.GraphModule, stage_input: fx.Node) -> int:
    """The bytes of what a stage is given, unless it is an input of the model."""
    stage: Any
    index: Any
    stage, index = (
        (stage_input.args[0], stage_input.args[1]) if stage_input.op == "call_function" else (stage_input, None)
    )
    if stage.op != "call_module":
        return 0
    submodule: Any = module.get_submodule(stage.target)
    (stage_outputs,) = submodule.graph.find_nodes(op="output")[0].args
    node = stage_outputs if index is None else stage_outputs[index]
    return node.meta["val"].numel() * node.meta["val"].element_size()


def _calls(module: fx.GraphModule) -> list[fx.Node]:
    return [node for node in module.graph.nodes if node.op == "call_function"]


def _before(module: fx.GraphModule, nodes: Iterable[fx.Node]) -> fx.GraphModule:
    for node in nodes:
        with module.graph.inserting_before(node):
            module.graph.call_function(aten_pipe_split_alias, (), {})
    module.recompile()
    return module
