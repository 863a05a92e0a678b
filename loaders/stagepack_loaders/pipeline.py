"""Loaded stages as one callable, in one process."""

import copy
import itertools
import threading
from collections.abc import Collection, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, Self

from stagepack.errors import OptionError
from stagepack.format.aliasing import written_inputs
from stagepack.format.graph import Graph
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps, LoadedStage, Runtime, stage_state
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.callable_pipeline import FIXED_DTYPES, CallablePipeline
from stagepack_loaders.exchange import array_ops_of_call, to_runtime
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.placement import device_list, place_stages
from stagepack_loaders.registry import TORCH_RUNTIME, find_runtime
from stagepack_loaders.run_trace import RunTrace, SpanRecorder
from stagepack_loaders.stage_errors import typed_stage_errors


class Pipeline(CallablePipeline):
    """A loaded bundle, all stages in this process.

    Stages may be of several runtimes; where these differ, values are converted on their way.

    Attributes:
        bundle: the bundle, at the entry point that runs.
        entry_point: the entry point.
        stages: the loaded stages, in order.
        runtimes: the runtime of each stage.

    Examples:
        >>> pipeline = stagepack.load("m.stagepack")
        >>> result = pipeline(*args, **kwargs)
        >>> pipeline.reset_state()
    """

    def __init__(
        self,
        bundle: Bundle,
        stages: Sequence[LoadedStage],
        types: Collection[type] = (),
        limit: ValueLimit | None = None,
    ) -> None:
        super().__init__(bundle, types, limit)
        self.stages = tuple(stages)
        self.runtimes: tuple[Runtime, ...] = tuple(find_runtime(stage.runtime) for stage in stages)
        if len(stages) > 1:  # stages of other runtimes than torch check the inputs that they write
            graphs = [graph for stage in stages if isinstance(graph := getattr(stage, "graph", None), Graph)]
            self._written_inputs = frozenset().union(*map(written_inputs, graphs))
        last_uses: list[list[str]] = [[] for _ in self.entry_point.stages]
        for edge in self.entry_point.edges:
            if edge.consumers and edge.name not in self._results:
                last_uses[edge.consumers[-1]].append(edge.name)
        self._last_uses = tuple(last_uses)
        self._request_numbers = itertools.count(1)
        self._spans = SpanRecorder()
        self._sequence_lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        if any(runtime.name != TORCH_RUNTIME for runtime in self.runtimes):
            return super().__deepcopy__(memo)
        stages = [copy.deepcopy(stage, memo) for stage in self.stages]
        return Pipeline(self.bundle, stages, self._types, self.limit)

    @property
    def arrays(self) -> ArrayOps:
        """See `CallablePipeline`."""
        return self.runtimes[0].arrays

    @property
    def devices(self) -> tuple[str, ...]:
        """See `CallablePipeline`."""
        return tuple(str(stage.device) for stage in self.stages)

    def to(self, devices: Any = None, *, device: Any = None, dtype: Any = None) -> Self:
        """Move the stages to other devices, with their weights as they are now. Not while a call runs.

        Parameters become other objects: make an optimizer afterwards.

        Args:
            devices: a device, such as ``"cuda:0"``, or a device for each stage, in order; with fewer devices, consecutive stages share
                one.
            device: the device of all stages, in the place of `devices`.
            dtype: refused: a bundle computes in the types of the export.

        Returns:
            The pipeline itself.

        Raises:
            OptionError: a dtype is given, or both `device` and `devices`.
            DeviceError: a device does not exist here, there are more devices than stages, or a stage cannot be moved: stages of ONNX
                Runtime, compiled ones, and those with ``device_memory``.

        Examples:
            >>> pipeline = stagepack.load("m.stagepack")
            >>> pipeline.to(["cuda:0", "cuda:1"]).devices
            ('cuda:0', 'cuda:1')
        """
        if dtype is not None or type(devices).__name__ == "dtype":
            raise OptionError(f"dtype: {FIXED_DTYPES}")
        named = device_list(devices, device)
        placement = {
            stage_number: self.runtimes[stage_number].parse_device(device)
            for stage_number, device in enumerate(place_stages(self.entry_point, named))
        }
        moved = {number for number, device in placement.items() if str(device) != str(self.stages[number].device)}
        for stage_number in moved:
            if not self.runtimes[stage_number].moves:
                self.runtimes[stage_number].move_stages(self.bundle, {}, {})
        for runtime in dict.fromkeys(self.runtimes[stage_number] for stage_number in moved):
            numbers = [number for number in sorted(moved) if self.runtimes[number] is runtime]
            stages = {number: self.stages[number] for number in numbers}
            runtime.move_stages(self.bundle, stages, {number: placement[number] for number in numbers})
        return self

    def run_values(self, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """See `CallablePipeline`."""
        request = next(self._request_numbers)
        for stage_number in range(len(self.stages)):
            self.run_stage(stage_number, values, request)

    def run_stage(self, stage_number: int, values: MutableMapping[str, Any], request: int = 0) -> None:
        """Run one stage on values that are known to fit.

        Args:
            stage_number: the stage.
            values: the values by edge name. Those that the stage makes are added; those that no later stage uses are removed, so that
                their memory is freed.
            request: the number of the call, for `trace`.

        Raises:
            InputError: a value of the inputs is out of range, or the stage writes an input that cannot be written.
            StageFailedError: an operator of the stage failed.
        """
        stage_entry = self.entry_point.stages[stage_number]
        runtime = self.runtimes[stage_number]
        with self._spans.span("transfer", request, stage_number):
            # Converted for later stages too: they are to see what this one writes into it.
            for edge_name in stage_entry.inputs:
                values[edge_name] = to_runtime(values[edge_name], self._edges[edge_name], runtime)
        stage = self.stages[stage_number]
        with self._spans.span("compute", request, stage_number), typed_stage_errors(stage_number):
            output_values = stage.run([values[edge_name] for edge_name in stage_entry.inputs])
            if self._spans.is_on:
                runtime.wait(stage.device)
        values.update(zip(stage_entry.outputs, output_values, strict=True))
        for edge_name in self._last_uses[stage_number]:
            del values[edge_name]

    @contextmanager
    def trace(self) -> Iterator[RunTrace]:
        """See `CallablePipeline`. Moving values to the device of a stage counts as compute, converting them as transfer."""
        run_trace = RunTrace(bundle=self.bundle.identity, processes={0: "process 0"})
        self._spans.start()
        try:
            yield run_trace
        finally:
            run_trace.spans += self._spans.stop()
            run_trace.dropped = self._spans.dropped

    @contextmanager
    def inference(self) -> Iterator[None]:
        """See `CallablePipeline`."""
        with ExitStack() as contexts:
            for runtime in dict.fromkeys(self.runtimes):
                contexts.enter_context(runtime.inference())
            yield

    def seed(self, seed: int) -> None:
        """See `CallablePipeline`."""
        for runtime in dict.fromkeys(self.runtimes):
            runtime.seed(seed)

    def sequence(self) -> PipelineSequence:
        """See `CallablePipeline`. Sequences of several threads take turns."""
        states: dict[int, Any] = {}

        def submit(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Future[Any]:
            values, _ = self._bind_values(args, kwargs)
            arrays = array_ops_of_call(values.values(), self.arrays)
            request, result = next(self._request_numbers), Future[Any]()
            with self._sequence_lock:
                for stage_number, stage in enumerate(self.stages):
                    has_state = bool(self.entry_point.stages[stage_number].state)
                    with stage_state(stage, stage_number, states) if has_state else nullcontext():
                        self.run_stage(stage_number, values, request)
            result.set_result(self._build_result(values, arrays))
            return result

        return PipelineSequence(submit, states.clear, states.clear)

    def reset_state(self) -> None:
        """See `CallablePipeline`."""
        for stage in self.stages:
            stage.reset_state()

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers of all stages, by their names in the model."""
        return {weight_name: array for stage in self.stages for weight_name, array in stage.state_dict().items()}

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all stages, each once."""
        seen: set[int] = set()
        for stage in self.stages:
            for parameter in stage.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
