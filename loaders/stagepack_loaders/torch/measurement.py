"""Measure how long the nodes of a bundle take on the devices of this machine."""

import platform
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.folded_graph import trivially_folded
from stagepack.format.reader import Bundle
from stagepack_loaders import example
from stagepack_loaders.base import Loading
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.placement import place_stages
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.torch.build import GRAPH_NODE, build_graph_module
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.prepare import PreparedTorchStage, prepare_stages
from stagepack_loaders.torch.resolved_operators import resolve_operators
from stagepack_loaders.torch.stage import TorchStage

_OVERHEAD_RUNS = 101
# Runs that do not count: the first ones allocate memory and choose kernels.
_WARMUP_RUNS = 3


class NodeTimer:
    """The times of the nodes of one stage, run by run.

    Attributes:
        seconds: the time of each node in the last run, less the time of measuring.
    """

    def __init__(self, node_count: int, wait: Callable[[], None]) -> None:
        self.seconds = [0.0] * max(node_count, 1)
        self._wait = wait
        self._overhead = 0.0
        measure_nothing = self.timed(lambda: None, 0)
        measured = []
        for _ in range(_OVERHEAD_RUNS):
            measure_nothing()
            measured.append(self.seconds[0])
        self._overhead = sorted(measured)[_OVERHEAD_RUNS // 2]

    def timed(self, operator: Callable[..., Any], node_index: int) -> Callable[..., Any]:
        """Return an operator that measures its calls for one node."""
        seconds, wait, clock = self.seconds, self._wait, time.perf_counter

        def timed_operator(*args: Any, **kwargs: Any) -> Any:
            start_time = clock()
            result = operator(*args, **kwargs)
            wait()
            seconds[node_index] = max(clock() - start_time - self._overhead, 0.0)
            return result

        return timed_operator


def with_node_timer(
    stage: PreparedTorchStage, wait: Callable[[], None], allow_ops: Collection[str]
) -> tuple[PreparedTorchStage, NodeTimer]:
    """Return a stage that runs the same operators, and measures each. Its regions are unfolded, so that each node is a call of its own."""
    graph = stage.code.graph
    file_name = stage.weights.bundle.stages[stage.code.stage_number].graph
    operators = resolve_operators(graph.ops, allow_ops, file_name)
    module = build_graph_module(trivially_folded(graph), graph, operators, stage.weights.device)
    timer = NodeTimer(len(graph.nodes), wait)
    # By identity: equal nodes of a graph, such as two calls without results, are two nodes.
    node_indices = {id(node): node_index for node_index, node in enumerate(graph.nodes)}
    for child_module in module.modules():
        if isinstance(child_module, GraphModule):
            _time_operators(child_module, node_indices, timer)
    return replace(stage, code=replace(stage.code, compiled_module=module)), timer


def _time_operators(module: GraphModule, node_indices: dict[int, int], timer: NodeTimer) -> None:
    """Replace the operators of a module by those that measure. The bodies of branches and loops belong to the node that runs them."""
    for fx_node in module.graph.nodes:
        node_index = node_indices.get(id(fx_node.meta.get(GRAPH_NODE)))
        if node_index is not None:
            fx_node.target = timer.timed(fx_node.target, node_index)
    module.recompile()


def copy_tensors(values: list[Any]) -> list[Any]:
    """Return values with memory of their own, for a stage that writes into its inputs."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement:
    """The times of one stage, each the median of several runs.

    Attributes:
        seconds: the time of the stage as a whole.
        node_seconds: the time of each node by its number in the whole model. Nodes that the cut added have none. With these, the times of
            all nodes have the sum `seconds`.
    """

    stage: int
    device: str
    seconds: float
    node_seconds: dict[int, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleMeasurement:
    """The times of a bundle.

    Attributes:
        machine: the names of the processor and of the devices.
        threads: the number of threads that an operator uses on the processor.
        sizes: the size of each symbol in the inputs.
        stages: the times of the stages, in order.
    """

    machine: str
    threads: int
    sizes: dict[str, int]
    stages: list[StageMeasurement] = field(default_factory=list)


def measure_bundle(
    bundle: Bundle,
    devices: Sequence[str] = ("cpu",),
    *,
    inputs_file: Path | None = None,
    allow_ops: Collection[str] = (),
    runs: int = 10,
    progress: Callable[[str], None] = lambda _: None,
) -> BundleMeasurement:
    """Measure how long each node of a bundle takes. One stage after another is loaded, so that only one must fit into memory.

    A stage runs several times as a whole, and several times with each operator measured for itself. The times of the operators are scaled
    so that their sum is the time of the whole stage.

    devices: the device of each stage, in order; with fewer devices, consecutive stages share one.
    inputs_file: a safetensors file with the inputs; None for the recorded example.
    """
    stage_devices = [parse_device(device) for device in place_stages(bundle.entry_point, devices)]
    options = LoadOptions(allow_ops=allow_ops)
    stages = [
        _MeasuredStage(bundle, stage_number, device, Loading(options=options), runs, progress)
        for stage_number, device in enumerate(stage_devices)
    ]
    pipeline = Pipeline(bundle, stages)
    inputs = example.read_inputs(pipeline, inputs_file) if inputs_file else example.read_example(pipeline)[0]
    example.run_on_inputs(pipeline, inputs)
    return BundleMeasurement(
        machine=machine_name(stage_devices),
        threads=torch.get_num_threads(),
        sizes=_sizes(bundle, inputs),
        stages=[stage.measurement for stage in stages if stage.measurement is not None],
    )


def _sizes(bundle: Bundle, inputs: Mapping[str, Any]) -> dict[str, int]:
    """The sizes of the symbols in inputs that the pipeline has taken."""
    tensor_edges = [edge for edge in bundle.edges if edge.producer is None and edge.dtype not in SCALAR_DTYPES]
    bound_inputs = {edge.name: BoundArgument(edge.name, inputs[edge.name]) for edge in tensor_edges}
    return dict(check_values(tensor_edges, bound_inputs, bundle.entry_point.symbols))


def machine_name(devices: Iterable[torch.device]) -> str:
    """Return the names of the processor and of the GPUs among some devices."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    gpus = dict.fromkeys(torch.cuda.get_device_name(device) for device in devices if device.type == "cuda")
    return ", ".join([models[0] if models else platform.machine(), *gpus])


class _MeasuredStage:
    """A stage for a pipeline, which measures itself when it is run. Only while it runs it is loaded."""

    runtime = TorchStage.runtime

    def __init__(
        self,
        bundle: Bundle,
        stage_number: int,
        device: torch.device,
        loading: Loading,
        runs: int,
        progress: Callable[[str], None],
    ) -> None:
        self.device = device
        self.measurement: StageMeasurement | None = None
        self._bundle = bundle
        self._stage_number = stage_number
        self._loading = loading
        self._runs = runs
        self._progress = progress

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Measure the stage; see `stagepack_loaders.base.LoadedStage`."""
        self._progress(f"measuring stage {self._stage_number} of {len(self._bundle.stages)}")
        prepared = prepare_stages(self._bundle, {self._stage_number: self.device}, self._loading)[self._stage_number]
        timed_prepared, timer = with_node_timer(prepared, self._wait, self._loading.options.allow_ops)
        stage, timed_stage = prepared.finish(verify=True), timed_prepared.finish(verify=False)
        # A stage that writes nothing takes the values themselves, whose layout decides how fast some operators are.
        writes = any(op.mutates for op in prepared.code.graph.ops)
        whole_seconds, node_seconds = [], []
        for _ in range(_WARMUP_RUNS + self._runs):  # in turns: a machine that is slower for a while is slower for both
            whole_seconds.append(self._time_run(stage, copy_tensors(values) if writes else values))
            self._time_run(timed_stage, copy_tensors(values) if writes else values)
            node_seconds.append(list(timer.seconds))
        self._finish(whole_seconds[_WARMUP_RUNS:], node_seconds[_WARMUP_RUNS:])
        stage.reset_state()
        return stage.run(values)

    def _time_run(self, stage: TorchStage, values: list[Any]) -> float:
        stage.reset_state()
        self._wait()
        start_time = time.perf_counter()
        stage.run(values)
        self._wait()
        return time.perf_counter() - start_time

    def _wait(self) -> None:
        find_runtime(self.runtime).wait(self.device)

    def _finish(self, whole_seconds: list[float], node_seconds: list[list[float]]) -> None:
        seconds = statistics.median(whole_seconds)
        medians = [statistics.median(times) for times in zip(*node_seconds, strict=True)]
        scale = seconds / (sum(medians) or 1.0)
        node_numbers = self._bundle.node_numbers(self._stage_number)
        self.measurement = StageMeasurement(
            stage=self._stage_number,
            device=str(self.device),
            seconds=seconds,
            node_seconds={
                node_number: median * scale
                for node_number, median in zip(node_numbers, medians, strict=False)
                if node_number >= 0
            },
        )

    def reset_state(self) -> None:
        """See `stagepack_loaders.base.LoadedStage`. Each run starts with the content at loading."""

    def fresh_state(self) -> None:
        """See `stagepack_loaders.base.LoadedStage`."""

    def swap_state(self, state: Any) -> Any:
        """See `stagepack_loaders.base.LoadedStage`."""
        return state

    def state_dict(self) -> dict[str, Any]:
        """See `stagepack_loaders.base.LoadedStage`. Its weights are there only while it runs."""
        return {}

    def parameters(self) -> Iterator[Any]:
        """See `stagepack_loaders.base.LoadedStage`."""
        return iter(())
