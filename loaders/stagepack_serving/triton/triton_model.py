"""One model of a repository, before it is written."""

from collections.abc import Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig

from stagepack_serving.protocol.interface import InterfaceTensor
from stagepack_serving.protocol.model_config import build_model_config
from stagepack_serving.triton.options import RepositoryOptions


@dataclass(frozen=True, slots=True)
class TritonModel:
    """A model of a repository.

    Attributes:
        config: its configuration, ``config.pbtxt``.
        file_names: the files of the bundle that it needs.
        python_module: the module of `stagepack_serving.triton` that runs it in the Python backend; None if another backend runs it.
    """

    config: ModelConfig
    file_names: Sequence[str] = ()
    python_module: str | None = None


def build_part_config(
    options: RepositoryOptions, suffix: str, inputs: Sequence[InterfaceTensor], outputs: Sequence[InterfaceTensor]
) -> ModelConfig:
    """Build the configuration of a model that is a part of the ensemble.

    suffix: the second part of the name of the model, after that of the ensemble.
    """
    model_name = f"{options.model_name}_{suffix}"
    config = build_model_config(model_name, inputs, outputs, max_batch_size=options.max_batch_size)
    if options.max_batch_size:
        config.dynamic_batching.max_queue_delay_microseconds = round(options.batching_delay * 1e6)
    return config
