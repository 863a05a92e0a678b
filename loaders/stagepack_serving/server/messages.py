"""Requests and answers in the form that both protocols, REST and gRPC, are translated to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from stagepack_loaders.elements import Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceTensor:
    """A tensor of a request or an answer.

    Attributes:
        name: the name of the input or output.
        datatype: the datatype of the protocol, such as ``FP32``.
        array: the elements, in the dtype of `NUMPY_DTYPES` and the shape that the client sees.
    """

    name: str
    datatype: str
    array: Array


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """A request for an inference.

    Attributes:
        inputs: the input tensors.
        output_names: the requested outputs; None requests all.
        parameters: parameters of the request as a whole, such as ``sequence_id``.
    """

    inputs: Sequence[InferenceTensor]
    output_names: Sequence[str] | None = None
    parameters: Mapping[str, Any] = field(default_factory=dict)
