"""The configuration of a model in Triton's format, which clients of the protocol can ask for.

Source: ``model_config.proto`` of https://github.com/triton-inference-server/common. `tritonclient` ships the generated code.
"""

from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from stagepack_serving.protocol.interface import InterfaceTensor


def build_model_config(
    model_name: str, inputs: Iterable[InterfaceTensor], outputs: Iterable[InterfaceTensor], *, max_batch_size: int
) -> ModelConfig:
    """Build the configuration of a model.

    max_batch_size: the largest batch that one run may hold, where the first dimension of all inputs and outputs is the batch dimension;
        Triton leaves that dimension out of ``dims``. 0 if requests must not be batched.
    """
    config = ModelConfig(name=model_name, max_batch_size=max_batch_size)
    for tensors, entries in ((inputs, config.input), (outputs, config.output)):
        for tensor in tensors:
            dims = tensor.shape[1:] if max_batch_size else tensor.shape
            data_type = DataType.Value(f"TYPE_{tensor.datatype}")
            entry = entries.add(name=tensor.name, data_type=data_type, dims=dims or [1])
            if not dims:  # Triton has no tensors without dimensions: it passes one element and reshapes it to ().
                entry.reshape.SetInParent()
    return config
