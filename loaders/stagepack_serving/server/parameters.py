"""Requests and answers in the form that both protocols are translated to, and the parameters of requests."""

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from stagepack_loaders.elements import Array
from stagepack_serving.server.errors import BadRequestError, RequestError, RequestStatus

_MAX_ID_LENGTH: Final = 1024  # characters
# The parameter of a request that names its adapter.
ADAPTER_PARAMETER: Final = "adapter"


def check_request_id(request_id: Any) -> str:
    """Check the id of a request, which all parts of its answer repeat; it may be empty."""
    if isinstance(request_id, str) and len(request_id) <= _MAX_ID_LENGTH:
        return request_id
    found = f"{len(request_id)} characters" if isinstance(request_id, str) else type(request_id).__name__
    raise BadRequestError(f"id: expected a string of at most {_MAX_ID_LENGTH} characters, found {found}")


def boolean_parameter(parameters: Mapping[str, Any], parameter_name: str, default: bool = False) -> bool:
    """Return a boolean parameter."""
    value = parameters.get(parameter_name, default)
    if not isinstance(value, bool):
        raise BadRequestError(f"the parameter {parameter_name}: expected true or false, found {value!r}")
    return value


def sequence_parameters(parameters: Mapping[str, Any]) -> tuple[int | str, bool, bool]:
    """Return the id of the sequence of a request, whether the request starts it, and whether it ends it."""
    sequence_id = parameters.get("sequence_id", 0)
    if not isinstance(sequence_id, int | str) or isinstance(sequence_id, bool) or not sequence_id:
        raise BadRequestError(
            "the model keeps state between calls: expected the parameter sequence_id, a non-zero integer or a string, "
            f"found {sequence_id!r}; start a sequence with sequence_start"
        )
    is_start = boolean_parameter(parameters, "sequence_start")
    return sequence_id, is_start, boolean_parameter(parameters, "sequence_end")


def timeout_parameter(parameters: Mapping[str, Any]) -> float:
    """Return how long the client waits for the answer, in seconds."""
    timeout = parameters.get("timeout", 0)
    if type(timeout) is not int or not 0 <= timeout < 2**63:
        expected = "expected microseconds, 0 or more and less than 2**63"
        raise BadRequestError(f"the parameter timeout: {expected}, found {timeout!r}")
    return timeout / 1e6 if timeout else math.inf


def refuse_load_parameters(parameter_names: Iterable[str]) -> None:
    """Check that a client who loads a model brings no configuration or files: both come from the repository alone."""
    if names := ", ".join(sorted(parameter_names)):
        raise BadRequestError(f"expected no parameters, found {names}: a model is loaded as it is in the repository")


def named_adapter(parameters: Mapping[str, Any], adapter: str | None) -> dict[str, Any]:
    """Return what the parameters of a request say of its adapter, which it may name as if it were a model, too."""
    if adapter is not None and parameters.get(ADAPTER_PARAMETER, adapter) != adapter:
        found = f"{parameters[ADAPTER_PARAMETER]!r:.100}"
        raise BadRequestError(
            f"adapter: expected {adapter!r}, which the request names as its model, or none, found {found}"
        )
    return {} if adapter is None else {ADAPTER_PARAMETER: adapter}


def check_requested_outputs(outputs: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Check the outputs that a request names."""
    output_names = [output_name for output_name, _ in outputs]
    if len(set(output_names)) < len(output_names):
        raise BadRequestError(f"duplicate output: {', '.join(output_names)}")
    for output_name, parameters in outputs:
        refuse_shared_memory(output_name, parameters)
        if parameters.get("classification"):
            raise BadRequestError(f"{output_name}: this server does not support classification: request the tensor")


def refuse_shared_memory(tensor_name: str, parameter_names: Iterable[str]) -> None:
    """Check that a tensor is sent with the request or answer, not through memory that client and server share."""
    if "shared_memory_region" in parameter_names:
        raise BadRequestError(f"{tensor_name}: this server has no shared memory: send the data in the request")


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTensor:
    """A tensor of a request or an answer: the array has the dtype of `NUMPY_DTYPES`, and the shape that the client sees."""

    name: str
    datatype: str
    array: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A request for an inference.

    Attributes:
        inputs: the inputs.
        output_names: the outputs that it requests; None for all.
        parameters: those such as ``sequence_id``.
        max_answer_bytes: how large the outputs may be together; None if the protocol has no limit.
    """

    inputs: Sequence[InferenceTensor]
    output_names: Sequence[str] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
    max_answer_bytes: int | None = None

    @property
    def adapter(self) -> Any:
        """The adapter that it names, which is not checked."""
        return self.parameters.get(ADAPTER_PARAMETER)

    def check_answer_bytes(self, byte_count: int) -> None:
        """Check the size of the outputs together."""
        if self.max_answer_bytes is not None and byte_count > self.max_answer_bytes:
            expected = f"expected outputs of at most {self.max_answer_bytes:,} bytes in an answer over gRPC, found {byte_count:,}"
            raise RequestError(RequestStatus.TOO_LARGE, f"{expected}: request fewer outputs or rows, or ask over HTTP")


def seconds_left(deadline: asyncio.Timeout) -> float:
    """Return the time until a deadline."""
    end_time = deadline.when()
    return math.inf if end_time is None else end_time - asyncio.get_running_loop().time()


def shorten_deadline(deadline: asyncio.Timeout, seconds: float) -> None:
    """Move a deadline to so many seconds from now, which may be infinite, unless it is earlier already."""
    current_deadline, now = deadline.when(), asyncio.get_running_loop().time()
    if current_deadline is None or now + seconds < current_deadline:
        deadline.reschedule(now + seconds)
