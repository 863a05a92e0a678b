"""A model's configuration as Triton writes it.

Source: ``model_config.proto`` of https://github.com/triton-inference-server/common, as `tritonclient` ships it.
"""

from collections.abc import Iterable

from tritonclient.grpc.model_config_pb2 import DataType, ModelConfig

from stagepack_serving.protocol.interface import InterfaceTensor


def config_of(
    name: str, inputs: Iterable[InterfaceTensor], outputs: Iterable[InterfaceTensor], *, max_batch: int
) -> ModelConfig:
    """The configuration of a model with these inputs and outputs.

    `max_batch`: the rows of one run, if the first dimension of all of them counts rows, which Triton then leaves out of their
    dimensions; 0 for a model whose requests run alone.
    """
    config = ModelConfig(name=name, max_batch_size=max_batch)
    for specs, ends in ((inputs, config.input), (outputs, config.output)):
        for spec in specs:
            dims = spec.shape[1:] if max_batch else spec.shape
            end = ends.add(name=spec.name, data_type=DataType.Value(f"TYPE_{spec.datatype}"), dims=dims or [1])
            if not dims:  # Triton has no tensors without dimensions
                end.reshape.SetInParent()
    return config
