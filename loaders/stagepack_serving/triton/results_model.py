"""Results that a Triton ensemble cannot give out itself: copies of stages' outputs and of inputs, in the Python backend."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import triton_python_backend_utils as triton


class TritonPythonModel:
    """Gives each output the content of the input that its parameter names."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the configuration that `stagepack_serving.triton.models` wrote."""
        config = json.loads(args["model_config"])
        self._sources = {name: value["string_value"] for name, value in config["parameters"].items()}

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Copy what each request brings."""
        return [triton.InferenceResponse(output_tensors=self._copies(request)) for request in requests]

    def _copies(self, request: Any) -> list[Any]:
        given = {source: triton.get_input_tensor_by_name(request, source) for source in self._sources.values()}
        return [triton.Tensor.from_dlpack(name, given[source].to_dlpack()) for name, source in self._sources.items()]
