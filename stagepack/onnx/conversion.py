"""A stage of a bundle -> the files of its ONNX model."""

import logging
import warnings
from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from stagepack.capture.recurrent_layers import sequences_of_any_length
from stagepack.format.graph import Graph
from stagepack.format.manifest import Stage
from stagepack.format.onnx import onnx_element_type
from stagepack.format.reader import Bundle
from stagepack.format.unfold import trivially_folded
from stagepack.onnx.assertions import lost_assertion
from stagepack.onnx.explain import explain_failure
from stagepack.onnx.finish import OnnxFiles, finish_model
from stagepack.onnx.functional_stage import StageWrites, stage_writes
from stagepack.onnx.stage_place import StagePlace
from stagepack.onnx.trace import trace_stage
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.prepare import read_parts
from stagepack_loaders.torch.weights import WeightCache

_CPU = torch.device("cpu")
# The others are decomposed into the steps of the example, so that their stages are refused where the length is dynamic.
_LAYERS_IN_ONNX = ("lstm", "gru")
_EXPORTER_LOGGERS = ("torch.onnx", "onnx_ir", "onnxscript")


def convert_stage(bundle: Bundle, stage_number: int, allow_ops: Collection[str]) -> OnnxFiles | str:
    """Convert a stage with torch's ONNX exporter."""
    _, graph, targets = read_parts(bundle, stage_number, PrepareOptions(allow_ops=allow_ops))
    writes = stage_writes(graph)
    if reason := _inexpressible(bundle, stage_number, graph, writes):
        return reason
    module = build_graph_module(trivially_folded(graph), graph, targets, _CPU)
    stored_tensors = bundle.tensors(stage_number, graph)
    cache = WeightCache()
    tensors = {weight.value: cache.read(weight, stored_tensors, _CPU) for weight in graph.weights}
    stage_place = StagePlace(
        stage_number=stage_number,
        stage_count=len(bundle.stages),
        edges={edge.name: edge for edge in bundle.edges},
        stored_tensors=stored_tensors,
        own_weight_file=own_weight_file(bundle.stages[stage_number]),
    )
    program = None
    with _exporter_silenced(), sequences_of_any_length(_LAYERS_IN_ONNX):
        try:
            program = trace_stage(module, graph, targets, tensors, writes)
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert converted is not None
            return finish_model(converted.model, graph, writes, stage_place)
        except Exception as error:  # noqa: BLE001 - torch, its exporter and their libraries raise any class
            return explain_failure(graph, program, error)


def model_file(stage: Stage) -> str:
    """Return the name of the ONNX file of a stage: that of its graph, with another suffix."""
    return f"{stage.graph.removesuffix('.msgpack')}.onnx"


def own_weight_file(stage: Stage) -> str:
    """Return the name of the weight file for tensors that only the ONNX model of a stage uses."""
    return f"{model_file(stage)}.safetensors"


def _inexpressible(bundle: Bundle, stage_number: int, graph: Graph, writes: StageWrites) -> str | None:
    """Why ONNX cannot express a stage, if that is known without tracing it."""
    stored_names = {weight.value: weight.stored for weight in graph.weights}
    written_tensors = [stored_names[value_name] for value_name in writes.state]
    if len(set(written_tensors)) < len(written_tensors):
        shared = next(weight.names[0] for weight in graph.weights if written_tensors.count(weight.stored) > 1)
        return f"it writes {shared} in memory that another weight shares"
    edges = {edge.name: edge for edge in bundle.edges}
    stage = bundle.stages[stage_number]
    for edge_name in (*stage.inputs, *stage.outputs):
        if onnx_element_type(edges[edge_name].dtype) is None:
            return f"ONNX has no type for {edges[edge_name].dtype}, of the edge {edge_name}"
    if any(op.name.startswith("aten.as_strided") for op in graph.ops):
        return "aten.as_strided selects elements by their places in memory, and ONNX Runtime gets all inputs in row-major memory"
    return lost_assertion(graph, bundle.entry_point.guards)


@contextmanager
def _exporter_silenced() -> Iterator[None]:
    """Suppress warnings of torch's exporter and its libraries, which are for their own developers."""
    loggers = [logging.getLogger(logger_name) for logger_name in _EXPORTER_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
