"""What a server reports about itself and about its models."""

import importlib.metadata
from collections.abc import Sequence
from typing import Any, Final

from google.protobuf.message import Message
from tritonclient.grpc.model_config_pb2 import ModelConfig

from stagepack_serving.protocol.interface import Interface, build_model_config
from stagepack_serving.server.limits import ServerLimits

# The version of a bundle that is not in a model repository.
FIRST_VERSION: Final = "1"

_PLATFORM: Final = "stagepack"


def server_metadata() -> dict[str, Any]:
    """Return the metadata of the server."""
    return {
        "name": "stagepack",
        "version": importlib.metadata.version("stagepack"),
        "extensions": [
            "binary_tensor_data",
            "generate",
            "logging",
            "model_configuration",
            "model_repository",
            "parameters",
            "sequence",
            "sequence(string_id)",
            "statistics",
        ],
    }


def model_metadata(model_name: str, versions: Sequence[str], interface: Interface) -> dict[str, Any]:
    """Return the metadata of a model as the protocol defines it."""
    tensors = {"inputs": interface.inputs, "outputs": interface.outputs}
    return {"name": model_name, "versions": list(versions), "platform": _PLATFORM} | {
        key: [
            {"name": tensor.name, "datatype": tensor.datatype, "shape": list(tensor.shape)}
            for tensor in tensors_by_name.values()
        ]
        for key, tensors_by_name in tensors.items()
    }


def served_model_config(
    model_name: str,
    version: str,
    interface: Interface,
    limits: ServerLimits,
    *,
    max_batch_size: int,
    has_state: bool,
    adapters: Sequence[str] = (),
) -> ModelConfig:
    """Return the configuration of a model in Triton's format."""
    batch_size = max_batch_size if max_batch_size > 1 else 0
    inputs, outputs = interface.inputs.values(), interface.outputs.values()
    config = build_model_config(model_name, inputs, outputs, max_batch_size=batch_size)
    config.platform = _PLATFORM
    if adapters:
        config.parameters["adapters"].string_value = ", ".join(adapters)
    config.version_policy.specific.versions.append(int(version))
    if batch_size:
        config.dynamic_batching.max_queue_delay_microseconds = round(limits.batching_delay * 1e6)
    if has_state:
        config.sequence_batching.oldest.max_candidate_sequences = limits.max_sequences
        config.sequence_batching.max_sequence_idle_microseconds = round(limits.sequence_idle * 1e6)
    return config


def message_fields(message: Message) -> dict[str, Any]:
    """Convert a protobuf message to plain data."""
    fields: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.type == field.TYPE_MESSAGE and field.message_type.GetOptions().map_entry:
            fields[field.name] = {key: message_fields(item) for key, item in value.items()}
        elif field.type == field.TYPE_MESSAGE:
            fields[field.name] = (
                [message_fields(item) for item in value] if field.is_repeated else message_fields(value)
            )
        elif field.type == field.TYPE_ENUM:
            fields[field.name] = field.enum_type.values_by_number[value].name
        else:
            fields[field.name] = list(value) if field.is_repeated else value
    return fields
