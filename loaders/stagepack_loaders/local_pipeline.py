"""A bundle whose stages run in this process, as one callable."""

import copy
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

from stagepack.errors import OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import LoadedStage, Loading, Runtime, SharedObjects
from stagepack_loaders.call_limits import Limits, ValueLimit, value_limit
from stagepack_loaders.executor import LocalExecutor
from stagepack_loaders.module_habits import FIXED_DTYPES
from stagepack_loaders.options import LoadOptions, device_list
from stagepack_loaders.pipeline import CallablePipeline
from stagepack_loaders.placement import place_bundle, place_stages
from stagepack_loaders.preparation import compile_prepared, finish_prepared, prepare, reading_progress
from stagepack_loaders.registry import TORCH_RUNTIME


class Pipeline(CallablePipeline):
    """A loaded bundle, all stages in this process.

    Stages may be of several runtimes; where these differ, values are converted on their way.

    Attributes:
        bundle: the bundle, at the entry point that runs.
        entry_point: the entry point.

    Examples:
        >>> pipeline = stagepack.load("m.stagepack")
        >>> result = pipeline(*args, **kwargs)
        >>> pipeline.reset_state()
    """

    executor: LocalExecutor

    def __init__(
        self,
        bundle: Bundle,
        stages: Sequence[LoadedStage],
        types: Collection[type] = (),
        limit: ValueLimit | None = None,
        options: LoadOptions = LoadOptions(),  # noqa: B008 - frozen
    ) -> None:
        super().__init__(bundle, LocalExecutor(bundle, stages, options=options), types, limit)

    @property
    def stages(self) -> tuple[Any, ...]:
        """The loaded stages, in order: after an update, other ones."""
        return tuple(driver.loaded for driver in self.executor.stages)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """The runtime of each stage."""
        return tuple(stage.runtime for stage in self.executor.stages)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        if any(runtime.name != TORCH_RUNTIME for runtime in self.runtimes):
            return super().__deepcopy__(memo)
        stages = [copy.deepcopy(stage, memo) for stage in self.stages]
        copied = Pipeline(self.bundle, stages, self._types, self.limit, self.executor.versions.loading.options)
        copied.executor.chosen, copied.trusted_signers = self.executor.chosen, self.trusted_signers
        return copied

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
        self.executor.versions.kept = None  # on the devices before
        moved = {number for number, device in placement.items() if str(device) != str(self.stages[number].device)}
        for stage_number in moved:
            if not self.runtimes[stage_number].moves:
                self.runtimes[stage_number].move_stages(self.bundle, {}, {})
        for runtime in dict.fromkeys(self.runtimes[stage_number] for stage_number in moved):
            numbers = [number for number in sorted(moved) if self.runtimes[number] is runtime]
            stages = {number: self.stages[number] for number in numbers}
            runtime.move_stages(self.bundle, stages, {number: placement[number] for number in numbers})
        return self

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


def load_pipeline(
    bundle: Bundle, options: LoadOptions, types: Collection[type], limits: Limits, shared: SharedObjects | None = None
) -> Pipeline:
    """Load all stages of a bundle into this process.

    shared: what the stages share that are loaded together, also stages of several entry points.
    """
    placed = place_bundle(bundle, options)
    bundle, options = placed.bundle, placed.options
    limit = value_limit(bundle, limits)
    loading = Loading(options=options, shared=shared or SharedObjects())
    with reading_progress(bundle, range(len(bundle.stages)), loading) as loading:
        ready_stages = compile_prepared(bundle, prepare(bundle, loading), options)
        stages = finish_prepared(bundle, ready_stages, verify=options.verifies_weights)
    pipeline = Pipeline(bundle, list(stages.values()), types, limit, options)
    pipeline.executor.chosen = placed.chosen
    return pipeline
