"""A stage in Triton's Python backend.

Source: https://github.com/triton-inference-server/python_backend. Triton calls `initialize` once for each instance, with the
configuration that `stagepack_serving.triton.models` wrote, then `execute` with the requests that it takes as one batch.
"""

import importlib
import itertools
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import triton_python_backend_utils as triton

from stagepack.errors import InputError, StagepackError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.reader import Bundle
from stagepack_loaders.base import PrepareOptions
from stagepack_loaders.preparation import prepare_stage
from stagepack_loaders.registry import find_runtime
from stagepack_serving.protocol.interface import InterfaceTensor
from stagepack_serving.protocol.value_errors import raises_input_errors


class TritonPythonModel:
    """One instance of a stage."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Load the stage, on the device of the instance."""
        config = json.loads(args["model_config"])
        options = {name: value["string_value"] for name, value in config["parameters"].items()}
        for module in filter(None, options["imports"].split(",")):
            importlib.import_module(module)
        bundle = Bundle(Path(args["model_repository"]) / args["model_version"])
        self._number = number = int(options["stage"])
        device = f"cuda:{args['model_instance_device_id']}" if args["model_instance_kind"] == "GPU" else "cpu"
        allowed = list(filter(None, options["allow_ops"].split(",")))
        # Triton hands on bytes in order: what came from another stage has lost its strides.
        prepare_options = PrepareOptions(allow_ops=allowed, dense_inputs=True)
        prepared = prepare_stage(bundle, number, device, options["runtime"], prepare_options)
        self._stage: Any = prepared.finish(verify=True)
        self._runtime = find_runtime(options["runtime"])
        self._arrays = self._runtime.arrays
        edges = {edge.name: edge for edge in bundle.edges}
        entry = bundle.stages[number]
        self._symbols = bundle.manifest.symbols
        self._inputs = [InterfaceTensor(name=name, edge=edges[name]) for name in entry.inputs]
        self._outputs = [InterfaceTensor(name=name, edge=edges[name]) for name in entry.outputs]
        self._batches = config["max_batch_size"] > 0
        self._stateful = bool(entry.state)
        oldest = config.get("sequence_batching", {}).get("oldest", {})
        self._most = int(oldest.get("max_candidate_sequences", 1))
        self._states: OrderedDict[Any, Any] = OrderedDict()

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """Answer the requests, those of one shape as one batch."""
        answers: list[Any] = [None] * len(requests)
        groups: dict[Any, list[int]] = {}
        given: list[list[Any]] = []
        for number, request in enumerate(requests):
            try:
                given.append(self._read(request))
            except StagepackError as error:
                given.append([])
                answers[number] = _refusal(error)
            else:
                kind = tuple(tuple(value.shape[1:]) for value in given[-1]) if self._batches else number
                groups.setdefault(kind, []).append(number)
        for numbers in groups.values():
            for number, answer in zip(
                numbers, self._run([given[number] for number in numbers], requests[numbers[0]]), strict=True
            ):
                answers[number] = answer
        return answers

    def _read(self, request: Any) -> list[Any]:
        """The inputs of a request as the stage takes them.

        Raises:
            InputError: they do not fit the bundle.
        """
        values, bound = [], {}
        for spec in self._inputs:
            tensor = triton.get_input_tensor_by_name(request, spec.name)
            spec.edge_shape(tuple(tensor.shape()))
            # A copy lies where tensors do, so that each kernel adds in the order in which it does elsewhere.
            value = self._arrays.from_elements(tensor, spec.edge)
            values.append(value if spec.edge.dtype in SCALAR_DTYPES else self._arrays.copy(value))
            bound[spec.name] = BoundArgument(spec.name, values[-1])
        check_values([spec.edge for spec in self._inputs], bound, self._symbols)
        return values

    def _run(self, given: Sequence[Sequence[Any]], first: Any) -> list[Any]:
        """Run the stage on the inputs of one request, or of several as one batch."""
        try:
            joined = (
                list(given[0])
                if len(given) == 1
                else [self._arrays.join(values) for values in zip(*given, strict=True)]
            )
            with self._runtime.inference():
                outputs = self._with_state(joined, first) if self._stateful else self._run_stage(joined)
        except Exception as error:  # noqa: BLE001 - whatever the model raises is told to whoever called it
            if len(given) > 1:  # the inputs of one request must not fail the others
                return [answer for values in given for answer in self._run([values], first)]
            return [_refusal(error)]
        elements = [
            (spec.name, self._arrays.device_elements(value, spec.edge.dtype))
            for spec, value in zip(self._outputs, outputs, strict=True)
        ]
        if len(given) == 1:
            return [_answer(elements)]
        ends = list(itertools.accumulate(len(values[0]) for values in given))
        starts = [0, *ends[:-1]]
        return [
            _answer([(name, array[start:end]) for name, array in elements])
            for start, end in zip(starts, ends, strict=True)
        ]

    def _run_stage(self, values: list[Any]) -> tuple[Any, ...]:
        with raises_input_errors(self._number):
            outputs: tuple[Any, ...] = self._stage.run(values)
        return outputs

    def _with_state(self, values: list[Any], request: Any) -> tuple[Any, ...]:
        """Run the stage on what its sequence of calls has written. Triton sends no call of a sequence that did not start."""
        name, flags = request.correlation_id(), request.flags()
        if flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START:
            self._states[name] = self._stage.fresh_state()
        if name not in self._states:
            raise InputError(f"the state of the sequence {name!r} is gone: begin it anew")
        # Taken out, so that what a call leaves half written when it fails is of no use to the next one.
        held = self._stage.swap_state(self._states.pop(name))
        try:
            outputs = self._run_stage(values)
        finally:
            state = self._stage.swap_state(held)
        if not flags & triton.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END:
            self._states[name] = state
            while len(self._states) > self._most:  # those that Triton found idle, of which it says nothing
                self._states.popitem(last=False)
        return outputs


def _answer(elements: Sequence[tuple[str, Any]]) -> Any:
    """An answer of these outputs."""
    return triton.InferenceResponse(output_tensors=[triton.Tensor.from_dlpack(*pair) for pair in elements])


def _refusal(error: Exception) -> Any:
    """An answer that says why there is none."""
    if isinstance(error, StagepackError):
        said = triton.TritonError(str(error), triton.TritonError.INVALID_ARG)
    else:
        message = f"the model fails on these inputs: {type(error).__name__}: {error}"
        said = triton.TritonError(message, triton.TritonError.INTERNAL)
    return triton.InferenceResponse(output_tensors=[], error=said)
