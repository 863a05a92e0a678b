"""The model for results that a Triton ensemble cannot return itself: copies of inputs, and outputs under a second name.

It runs in Triton's Python backend, https://github.com/triton-inference-server/python_backend.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as triton


class TritonPythonModel:
    """Copies inputs to outputs; Triton requires the name of the class and of its methods."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read which input each output is a copy of.

        args: the arguments of Triton; ``model_config`` is the configuration that `stagepack_serving.triton.repository` built, as JSON.
        """
        config = json.loads(args["model_config"])
        self._input_of_output = {
            output_name: parameter["string_value"] for output_name, parameter in config["parameters"].items()
        }

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests."""
        return [triton.InferenceResponse(output_tensors=self._copy_tensors(request)) for request in requests]

    def _copy_tensors(self, request: Any) -> list[Any]:
        inputs = {
            input_name: triton.get_input_tensor_by_name(request, input_name)
            for input_name in self._input_of_output.values()
        }
        # pb_utils.Tensor(name, ndarray) returns an empty tensor with numpy 2.4; from_dlpack does not.
        return [
            triton.Tensor.from_dlpack(output_name, inputs[input_name].to_dlpack())
            for output_name, input_name in self._input_of_output.items()
        ]
