"""The models of a repository: one a stage, the ensemble that wires them, and one that hands out what an ensemble cannot.

Source: https://github.com/triton-inference-server/server, docs/user_guide/model_configuration.md and architecture.md.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tritonclient.grpc.model_config_pb2 import ModelConfig, ModelInstanceGroup

from stagepack.errors import DeviceError, OperatorError
from stagepack.format.manifest import Edge, Stage
from stagepack.format.reader import Bundle
from stagepack.format.validate import MANIFEST_NAME
from stagepack_loaders.placement import place
from stagepack_loaders.registry import DEFAULT_RUNTIME, find_runtime
from stagepack_serving.protocol.batching import batch_dimension
from stagepack_serving.protocol.interface import Interface, InterfaceTensor
from stagepack_serving.protocol.model_config import build_model_config

# Triton's backends that a stage can run in: the Python backend runs any runtime, the others run the files of a stage themselves.
BACKENDS = ("python", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the models of a repository run.

    Attributes:
        name: of the ensemble; those of the stages begin with it.
        devices: one a stage in order, or fewer: ``cpu``, ``cuda`` or ``cuda:N``.
        runtime: what the Python backend runs stages in.
        backend: ``"python"``, or ``"onnxruntime"``, Triton's own, which runs the ONNX files of the stages.
        batch: rows of several requests in one run; 0 runs each request alone. More than 0 only where `why_alone` finds nothing.
        delay: how long a request waits for others to join it, in seconds.
        sequences: sequences of calls that a stage with state keeps the state of.
        idle: how long a sequence is kept without a call, in seconds.
        allow_ops: namespaces of custom operators that may run.
        imports: modules that register them.
        copy: copy the files of the stages; else they are hard links to those of the bundle.
    """

    name: str
    devices: Sequence[str] = ("cpu",)
    runtime: str = DEFAULT_RUNTIME
    backend: str = "python"
    batch: int = 0
    delay: float = 0.0
    sequences: int = 8
    idle: float = 60.0
    allow_ops: Sequence[str] = ()
    imports: Sequence[str] = ()
    copy: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A model of the repository.

    Attributes:
        config: its configuration.
        files: the files of the bundle that it has.
        module: what its code is imported from, in `stagepack_serving.triton`; None for one without code.
    """

    config: ModelConfig
    files: Sequence[str] = ()
    module: str | None = None


def why_alone(bundle: Bundle) -> str:
    """Why Triton runs each request to a bundle alone; empty if its rows may run together.

    Triton wants a dimension besides the one that counts rows. A stage can drop it (`reshape`), but then clients would have to send it.
    """
    if isinstance(found := batch_dimension(bundle, bundle.edges), str):
        return found
    ends = Interface(bundle.manifest)
    single = [spec.name for spec in (*ends.inputs.values(), *ends.outputs.values()) if len(spec.shape) == 1]
    return f"{single[0]} has no dimension but the rows, which Triton cannot batch" if single else ""


def models_of(bundle: Bundle, options: Options) -> list[Model]:
    """The models of a bundle, the ensemble last.

    Raises:
        DeviceError: a device is none of Triton's, or there are more devices than stages.
        OperatorError: a stage has no ONNX model, or Triton's ONNX Runtime cannot run it.
    """
    wiring = _Wiring(bundle, options)
    models = [*wiring.stages(), *wiring.results()]
    return [*models, Model(wiring.ensemble(models))]


class _Wiring:
    """How the values of a bundle go through the tensors of an ensemble."""

    def __init__(self, bundle: Bundle, options: Options) -> None:
        self._bundle = bundle
        self._options = options
        self._interface = Interface(bundle.manifest)
        self._edges = {edge.name: edge for edge in bundle.edges}
        # An ensemble gives out each output of a stage once, under one name, and no input.
        outputs = self._interface.outputs.values()
        self._direct: dict[str, str] = {}
        for spec in outputs:
            if spec.edge.producer is not None:
                self._direct.setdefault(spec.edge.name, spec.name)
        self._copied = [spec for spec in outputs if self._direct.get(spec.edge.name) != spec.name]

    def _tensor(self, edge: Edge) -> str:
        """The tensor of the ensemble that carries a value."""
        if edge.producer is None:
            return edge.name
        return self._direct.get(edge.name, f"stage_{edge.producer}.{edge.name}")

    def stages(self) -> Iterator[Model]:
        """A model for each stage; its inputs and outputs have the names of their edges."""
        devices = place(self._bundle.manifest, list(self._options.devices))
        for number, (stage, device) in enumerate(zip(self._bundle.stages, devices, strict=True)):
            inputs, outputs = self._specs(stage.inputs), self._specs(stage.outputs)
            config = self._config(f"stage_{number}", inputs, outputs)
            _add_device(config, device)
            if self._options.backend == "python":
                yield self._in_python(number, stage, config)
            else:
                yield self._in_onnxruntime(number, stage, config)

    def _specs(self, names: Sequence[str]) -> list[InterfaceTensor]:
        return [InterfaceTensor(name=name, edge=self._edges[name]) for name in names]

    def _config(self, name: str, inputs: Sequence[InterfaceTensor], outputs: Sequence[InterfaceTensor]) -> ModelConfig:
        config = build_model_config(f"{self._options.name}_{name}", inputs, outputs, max_batch_size=self._options.batch)
        if self._options.batch:
            config.dynamic_batching.max_queue_delay_microseconds = round(self._options.delay * 1e6)
        return config

    def _in_python(self, number: int, stage: Stage, config: ModelConfig) -> Model:
        options = self._options
        config.backend = "python"
        if stage.state:
            config.sequence_batching.oldest.max_candidate_sequences = options.sequences
            config.sequence_batching.max_sequence_idle_microseconds = round(options.idle * 1e6)
        parameters = {
            "stage": str(number),
            "runtime": options.runtime,
            "allow_ops": ",".join(options.allow_ops),
            "imports": ",".join(options.imports),
        }
        for key, value in parameters.items():
            config.parameters[key].string_value = value
        files = (MANIFEST_NAME, *find_runtime(options.runtime).stage_files(self._bundle, number))
        return Model(config, files, "stage_model")

    def _in_onnxruntime(self, number: int, stage: Stage, config: ModelConfig) -> Model:
        """A stage in Triton's own backend for ONNX Runtime, which knows nothing of bundles."""
        if stage.onnx is None:
            raise OperatorError(
                f"{self._bundle.path}: stage {number} has no ONNX model: add it (stagepack onnx), or choose another runtime"
            )
        bits = [name for name in (*stage.inputs, *stage.outputs) if self._edges[name].dtype.startswith("float8")]
        reason = "it keeps state" if stage.state else f"{bits[0]} is of 8-bit floats" if bits else ""
        if reason:
            raise OperatorError(
                f"stage {number}: {reason}, which Triton's onnxruntime backend does not take: choose the Python backend (--backend python)"
            )
        config.backend = "onnxruntime"
        config.default_model_filename = stage.onnx.model
        return Model(config, (*stage.onnx_files, *stage.weights))

    def results(self) -> Iterator[Model]:
        """A model that copies the results which an ensemble cannot give out: a second name for one, and inputs."""
        if not self._copied:
            return
        sources = list(dict.fromkeys(spec.edge.name for spec in self._copied))
        config = self._config("results", self._specs(sources), self._copied)
        config.backend = "python"
        config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=1)
        for spec in self._copied:
            config.parameters[spec.name].string_value = spec.edge.name
        yield Model(config, (), "results_model")

    def ensemble(self, models: Sequence[Model]) -> ModelConfig:
        """The model that clients call."""
        inputs, outputs = self._interface.inputs.values(), self._interface.outputs.values()
        config = build_model_config(self._options.name, inputs, outputs, max_batch_size=self._options.batch)
        config.platform = "ensemble"
        for model in models:
            step = config.ensemble_scheduling.step.add(model_name=model.config.name, model_version=-1)
            for end in model.config.input:
                step.input_map[end.name] = self._tensor(self._edges[end.name])
            for end in model.config.output:
                step.output_map[end.name] = (
                    end.name if model.module == "results_model" else self._tensor(self._edges[end.name])
                )
        return config


def _add_device(config: ModelConfig, device: str) -> None:
    """Where a stage runs.

    Raises:
        DeviceError: Triton has no such device.
    """
    kind, _, index = device.partition(":")
    if kind == "cpu" and not index:
        config.instance_group.add(kind=ModelInstanceGroup.KIND_CPU, count=1)
    elif kind == "cuda" and (not index or index.isdecimal()):
        config.instance_group.add(kind=ModelInstanceGroup.KIND_GPU, count=1, gpus=[int(index or 0)])
    else:
        raise DeviceError(f"device {device!r}: Triton runs models on cpu, cuda or cuda:N")
