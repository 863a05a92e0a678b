"""How the models of a repository run, and the model of each stage.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_configuration.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from stagepack.errors import DeviceError, OperatorError
from stagepack.format.manifest import Stage
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME
from stagepack.format.shapes import Guard, format_guard
from stagepack_loaders.onnxruntime.runtime import no_onnx_error
from stagepack_loaders.placement import place_stages
from stagepack_loaders.registry import TORCH_RUNTIME, find_runtime
from stagepack_serving.protocol.interface import InterfaceTensor, build_model_config

# Backends of Triton that run a stage. ``python`` runs any runtime of stagepack; ``onnxruntime`` runs the ONNX file without stagepack.
PYTHON_BACKEND: Final = "python"
BACKENDS: Final = (PYTHON_BACKEND, "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """How the models of a repository run.

    Attributes:
        model_name: the name of the ensemble; the names of the other models begin with it.
        devices: the device of each stage, in order: ``cpu``, ``cuda`` or ``cuda:N``; with fewer devices, consecutive stages share one.
        runtime: the runtime of the stages in the Python backend.
        backend: one of `BACKENDS`.
        max_batch_size: the largest batch that Triton joins requests to; 0 runs each request alone. Only 0 is valid where
            `batching_obstacle` finds a reason.
        batching_delay: the time that a request waits for others to join its batch, in seconds.
        max_sequences: the number of sequences whose state a stage keeps.
        sequence_idle: the time without requests after which a sequence is evicted, in seconds.
        allow_ops: as for `stagepack.load`.
        imports: modules that register custom operators.
        copy: whether to copy the files of the bundle; else they are hard links.
    """

    model_name: str
    devices: Sequence[str] = ("cpu",)
    runtime: str = TORCH_RUNTIME
    backend: str = PYTHON_BACKEND
    max_batch_size: int = 0
    batching_delay: float = 0.0
    max_sequences: int = 8
    sequence_idle: float = 60.0
    allow_ops: Sequence[str] = ()
    imports: Sequence[str] = ()
    copy: bool = False


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

    suffix: the second part of the name of the model, after the name of the ensemble.
    """
    model_name = f"{options.model_name}_{suffix}"
    config = build_model_config(model_name, inputs, outputs, max_batch_size=options.max_batch_size)
    if options.max_batch_size:
        config.dynamic_batching.max_queue_delay_microseconds = round(options.batching_delay * 1e6)
    return config


def stage_models(bundle: Bundle, options: RepositoryOptions) -> Iterator[TritonModel]:
    """Describe the model of each stage. Its inputs and outputs have the names of their edges."""
    edges = {edge.name: edge for edge in bundle.edges}
    devices = place_stages(bundle.entry_point, list(options.devices))
    for stage_number, (stage, device) in enumerate(zip(bundle.stages, devices, strict=True)):
        inputs = [InterfaceTensor(name=edge_name, edge=edges[edge_name]) for edge_name in stage.inputs]
        outputs = [InterfaceTensor(name=edge_name, edge=edges[edge_name]) for edge_name in stage.outputs]
        config = build_part_config(options, f"stage_{stage_number}", inputs, outputs)
        _set_device(config, device)
        if options.backend == PYTHON_BACKEND:
            yield _python_model(bundle, stage_number, config, options)
        else:
            dtypes = {tensor.name: tensor.edge.dtype for tensor in (*inputs, *outputs)}
            yield _onnxruntime_model(bundle, stage_number, config, dtypes)


def _python_model(bundle: Bundle, stage_number: int, config: ModelConfig, options: RepositoryOptions) -> TritonModel:
    config.backend = PYTHON_BACKEND
    if bundle.stages[stage_number].state:
        config.sequence_batching.oldest.max_candidate_sequences = options.max_sequences
        config.sequence_batching.max_sequence_idle_microseconds = round(options.sequence_idle * 1e6)
    # Read by stage_model.py.
    parameters = {
        "entry_point": bundle.entry_point.name,
        "stage": str(stage_number),
        "runtime": options.runtime,
        "allow_ops": ",".join(options.allow_ops),
        "imports": ",".join(options.imports),
    }
    for parameter_name, value in parameters.items():
        config.parameters[parameter_name].string_value = value
    stage_files = find_runtime(options.runtime).stage_files(bundle, stage_number)
    return TritonModel(config, (MANIFEST_NAME, *stage_files), "stage_model")


def _onnxruntime_model(bundle: Bundle, stage_number: int, config: ModelConfig, dtypes: dict[str, str]) -> TritonModel:
    """A stage in Triton's onnxruntime backend, which checks nothing of the boundary contract; `dtypes` are those of its edges."""
    stage = bundle.stages[stage_number]
    if stage.onnx is None:
        raise no_onnx_error(bundle, [stage_number])
    if reason := _onnxruntime_obstacle(stage, dtypes, bundle.entry_point.guards):
        raise OperatorError(
            f"stage {stage_number}: {reason}, which Triton's onnxruntime backend does not support: use the Python backend "
            "(--backend python)"
        )
    config.backend = "onnxruntime"
    config.default_model_filename = stage.onnx.model
    # The manifest names the files that stagepack has written, for the next one that replaces them.
    return TritonModel(config, (MANIFEST_NAME, *stage.onnx_files, *stage.weights))


def _onnxruntime_obstacle(stage: Stage, dtypes: dict[str, str], guards: Sequence[Guard]) -> str:
    if stage.state:
        return "it keeps state"
    if guards:
        return f"the model was captured for {format_guard(guards[0])}"
    for edge_name, dtype in dtypes.items():
        if dtype.startswith("float8"):
            return f"{edge_name} has 8-bit floats"
    return ""


def _set_device(config: ModelConfig, device: str) -> None:
    """Place a model on a device."""
    device_type, _, device_index = device.partition(":")
    if device_type == "cpu" and not device_index:
        config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=1)
    elif device_type == "cuda" and (not device_index or device_index.isdecimal()):
        config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, count=1, gpus=[int(device_index or 0)])
    else:
        raise DeviceError(f"device {device!r}: Triton runs models on cpu, cuda or cuda:N")
