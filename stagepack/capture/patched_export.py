"""Capture a model of transformers by transformers' own exporter, which patches code that ``torch.export`` cannot trace."""

import inspect
from collections.abc import Mapping
from typing import Any

from stagepack.capture.error_location import with_location
from stagepack.capture.inputs import Inputs, with_tensors
from stagepack.capture.module_state import preserve_module
from stagepack.capture.programs import Capture, recorded_trace
from stagepack.capture.torch_messages import format_torch_error
from stagepack.errors import CaptureError
from stagepack.torch_internals import export_by_transformers

PATCHED_EXPORT = "transformers.exporters.DynamoExporter"


def capture_patched(model: Any, inputs: Inputs) -> Capture:
    """Capture a model by transformers' exporter.

    The exporter removes constants such as ``use_cache=False`` from the signature, so they are no inputs of the capture either.
    """
    inputs = with_tensors(inputs)
    input_of_parameter = {**inspect.signature(model.forward).bind_partial(*inputs.args).arguments, **inputs.kwargs}
    tensor_inputs = {
        parameter: example
        for parameter, example in input_of_parameter.items()
        if not isinstance(example, bool | int | float | str | None)
    }
    dynamic_shapes = inputs.dynamic_shapes
    if isinstance(dynamic_shapes, Mapping):
        dynamic_shapes = {parameter: dynamic_shapes.get(parameter) for parameter in tensor_inputs}
    try:
        with preserve_module(model), recorded_trace(model) as recorded:
            program = export_by_transformers(model, input_of_parameter, dynamic_shapes)
    except Exception as error:
        raise CaptureError(with_location(format_torch_error(error), error)) from error
    capture_inputs = Inputs(kwargs=tensor_inputs, dynamic_shapes=dynamic_shapes)
    return Capture(program=program, inputs=capture_inputs, model=model, method=PATCHED_EXPORT, **recorded)
