"""The model of a stage in Triton's Python backend, https://github.com/triton-inference-server/python_backend."""

import importlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import triton_python_backend_utils as triton

from stagepack.errors import InputError, StagepackError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import prepare
from stagepack_loaders.stages import stage_driver
from stagepack_serving.protocol.interface import InterfaceTensor


class TritonPythonModel:
    """One instance of a stage; Triton requires the name of the class and of its methods.

    In a batch, a number that crosses from stage to stage is an element for each row, so that Triton sees a batch dimension.
    """

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the stage on the device of the instance.

        args: the arguments of Triton; ``model_config`` is the configuration that `stagepack_serving.triton.model_configs` built, as JSON.
        """
        config = json.loads(args["model_config"])
        parameters = {
            parameter_name: parameter["string_value"] for parameter_name, parameter in config["parameters"].items()
        }
        for module_name in filter(None, parameters["imports"].split(",")):
            importlib.import_module(module_name)
        bundle = Bundle(Path(args["model_repository"]) / args["model_version"]).select(parameters["entry_point"])
        stage_number = int(parameters["stage"])
        device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        allow_ops = list(filter(None, parameters["allow_ops"].split(",")))
        # Triton passes contiguous tensors between models: strides of the capture are lost.
        options = LoadOptions(devices=[device], runtime=parameters["runtime"], allow_ops=allow_ops, copy=True)
        prepared_stage = prepare(bundle, Loading(options=options, dense_inputs=True), [stage_number])[stage_number]
        self._stage = stage_driver(bundle.entry_point, stage_number, prepared_stage.finish(verify=True))
        self._arrays = self._stage.runtime.arrays
        self._symbols, self._guards = bundle.entry_point.symbols, bundle.entry_point.guards
        self._inputs = [InterfaceTensor(name=edge.name, edge=edge) for edge in self._stage.inputs]
        self._dtypes = {edge.name: edge.dtype for edge in bundle.edges}
        self._is_batched = config["max_batch_size"] > 0
        oldest_strategy = config.get("sequence_batching", {}).get("oldest", {})
        self._max_sequences = int(oldest_strategy.get("max_candidate_sequences", 1))
        self._states_of_sequence: OrderedDict[Any, dict[int, Any]] = OrderedDict()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer requests. Those with equal numbers and input shapes, but for the batch dimension, run as one batch."""
        responses: list[Any] = [None] * len(requests)
        inputs: dict[int, _Inputs] = {}
        groups: dict[Hashable, list[int]] = {}
        for position, request in enumerate(requests):
            try:
                inputs[position] = self._read_inputs(request)
            except StagepackError as error:
                responses[position] = _error_response(error)
                continue
            group_key = self._group_key(inputs[position]) if self._is_batched else position
            groups.setdefault(group_key, []).append(position)
        for positions in groups.values():
            group_inputs = [inputs[position] for position in positions]
            group_responses = self._answer(group_inputs, requests[positions[0]])
            for position, response in zip(positions, group_responses, strict=True):
                responses[position] = response
        return responses

    def _read_inputs(self, request: Any) -> "_Inputs":
        """The inputs of a request as the stage takes them."""
        values, arguments, row_count = [], {}, 1
        for tensor in self._inputs:
            triton_tensor = triton.get_input_tensor_by_name(request, tensor.name)
            shape = tuple(triton_tensor.shape())
            row_count = shape[0] if shape else 1
            if tensor.edge.dtype in SCALAR_DTYPES:
                value = self._read_number(triton_tensor, tensor)
            else:
                tensor.edge_shape(shape)
                # Memory that the runtime allocates is aligned as elsewhere, so that kernels add in the same order.
                value = self._arrays.copy(self._arrays.from_elements(triton_tensor, tensor.edge))
            values.append(value)
            arguments[tensor.name] = BoundArgument(tensor.name, value)
        check_values(self._stage.inputs, arguments, self._symbols, self._guards)
        return _Inputs(values, row_count)

    def _read_number(self, triton_tensor: Any, tensor: InterfaceTensor) -> Any:
        """The value of a symbolic scalar."""
        if not self._is_batched:
            tensor.edge_shape(tuple(triton_tensor.shape()))
        numbers = numpy.unique(numpy.from_dlpack(triton_tensor))
        if len(numbers) != 1:
            raise InputError(f"{tensor.name}: expected the same number for each row, found {numbers.tolist()[:8]}")
        return numbers[0].item()

    def _group_key(self, inputs: "_Inputs") -> Hashable:
        """What requests have in common that run as one batch."""
        return tuple(tuple(value.shape[1:]) if self._arrays.is_array(value) else value for value in inputs.values)

    def _answer(self, group_inputs: Sequence["_Inputs"], first_request: Any) -> list[Any]:
        """Run the stage on the inputs of one request, or of several as one batch. Return a response to each."""
        try:
            inputs = group_inputs[0].values if len(group_inputs) == 1 else self._concatenate(group_inputs)
            with self._stage.runtime.inference():
                has_state = self._stage.has_state
                values = self._run_sequence(inputs, first_request) if has_state else self._stage.run(inputs)
        except Exception as error:  # noqa: BLE001 - the client gets any error that the model raises
            if len(group_inputs) > 1:  # Run each request alone, so that the inputs of one do not fail the others.
                return [response for inputs in group_inputs for response in self._answer([inputs], first_request)]
            return [_error_response(error)]
        end_positions = list(itertools.accumulate(inputs.row_count for inputs in group_inputs))
        outputs = {}
        for edge_name, value in zip(self._stage.outputs, values, strict=True):
            elements = self._arrays.device_elements(value, self._dtypes[edge_name])
            is_number = self._dtypes[edge_name] in SCALAR_DTYPES
            outputs[edge_name] = elements.repeat(end_positions[-1]) if is_number and self._is_batched else elements
        if len(group_inputs) == 1:
            return [_output_response(outputs)]
        return [
            _output_response({output_name: elements[start:end] for output_name, elements in outputs.items()})
            for start, end in zip([0, *end_positions[:-1]], end_positions, strict=True)
        ]

    def _concatenate(self, group_inputs: Sequence["_Inputs"]) -> list[Any]:
        return [
            self._arrays.join(values) if self._arrays.is_array(values[0]) else values[0]
            for values in zip(*(inputs.values for inputs in group_inputs), strict=True)
        ]

    def _run_sequence(self, inputs: list[Any], request: Any) -> tuple[Any, ...]:
        """Run the stage with the state of the request's sequence. Triton refuses requests of sequences that did not start."""
        sequence_id, flags = request.correlation_id(), request.flags()
        if flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self._states_of_sequence[sequence_id] = {}
        if sequence_id not in self._states_of_sequence:
            raise InputError(f"the state of the sequence {sequence_id!r} was evicted: start the sequence again")
        # Removed while it runs: a call that fails may leave the state half written.
        states = self._states_of_sequence.pop(sequence_id)
        values = self._stage.run(inputs, states)
        if not flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            self._states_of_sequence[sequence_id] = states
            while (
                len(self._states_of_sequence) > self._max_sequences
            ):  # Triton does not tell when it evicts a sequence.
                self._states_of_sequence.popitem(last=False)
        return values


class _Inputs(NamedTuple):
    """The inputs of a request, and the number of its rows where stages run batches."""

    values: list[Any]
    row_count: int


def _output_response(outputs: Mapping[str, Any]) -> Any:
    tensors = [triton.Tensor.from_dlpack(output_name, elements) for output_name, elements in outputs.items()]
    return triton.InferenceResponse(output_tensors=tensors)


def _error_response(error: Exception) -> Any:
    status = triton.TritonError.INVALID_ARG if isinstance(error, InputError) else triton.TritonError.INTERNAL
    triton_error = triton.TritonError(str(error), status)
    return triton.InferenceResponse(output_tensors=[], error=triton_error)
