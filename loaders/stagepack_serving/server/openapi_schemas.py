"""The answers of the REST protocol, as types from which the schemas of the OpenAPI document are made."""

from typing import Any

from msgspec import Struct


class Answer(Struct, kw_only=True, forbid_unknown_fields=True):
    """An object in an answer: all its fields are listed."""


class Refusal(Answer):
    """Why a request is refused."""

    error: str


class ServerMetadata(Answer):
    """The name and version of the server, and the extensions of the protocol that it supports."""

    name: str
    version: str
    extensions: list[str]


class TensorMetadata(Answer):
    """An input or output of a model; a dynamic size is -1."""

    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(Answer):
    """A model, and its versions that take requests. The parameter ``adapters`` has the names of its adapters."""

    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]
    parameters: dict[str, Any] = {}


class OutputTensor(Answer):
    """An output of an inference. With the parameter ``binary_data_size``, its elements follow the JSON as bytes."""

    name: str
    datatype: str
    shape: list[int]
    data: list[Any] = []
    parameters: dict[str, Any] = {}


class InferenceAnswer(Answer):
    """The outputs of an inference."""

    model_name: str
    model_version: str
    outputs: list[OutputTensor]
    id: str = ""
    parameters: dict[str, Any] = {}


class UpdateSeconds(Answer):
    """How long the parts of an update took, in seconds."""

    fetch: float
    verify: float
    stage: float
    switch: float
    pause: float


class UpdateAnswer(Answer):
    """The weights that a model has taken, and those before."""

    model_name: str
    model_version: str
    weight_version: str
    previous: str
    seconds: UpdateSeconds


class IndexEntry(Answer):
    """A version of a model in the repository."""

    name: str
    version: str
    state: str
    reason: str = ""


class StatisticDuration(Answer):
    """How often something was done, and for how many nanoseconds together."""

    count: int
    ns: int


class BatchStatistics(Answer):
    """The runs of one batch size."""

    batch_size: int
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration


class InferenceStatistics(Answer):
    """The parts of all requests."""

    success: StatisticDuration
    fail: StatisticDuration
    queue: StatisticDuration
    compute_input: StatisticDuration
    compute_infer: StatisticDuration
    compute_output: StatisticDuration
    cache_hit: StatisticDuration
    cache_miss: StatisticDuration


class ModelStatistics(Answer):
    """What a version has done since it was loaded; times in milliseconds since 1970."""

    name: str
    version: str
    last_inference: int
    inference_count: int
    execution_count: int
    inference_stats: InferenceStatistics
    batch_stats: list[BatchStatistics]


class StatisticsAnswer(Answer):
    """What versions have done."""

    model_stats: list[ModelStatistics]


class LogSettings(Answer):
    """Which levels are logged."""

    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str
