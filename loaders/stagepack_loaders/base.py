"""The interfaces that a runtime implements: `Runtime`, `ArrayOps`, `PreparedStage` and `LoadedStage`.

Values cross from one runtime to another as *elements* (`stagepack_loaders.elements`): a numpy array of a plain type that shares the
memory of the value. So a runtime must know its own values and numpy arrays, and no other runtime.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stagepack.errors import DeviceError, OptionError
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge
from stagepack.format.reader import Bundle
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.weight_changes import WeightChanges

if TYPE_CHECKING:
    from stagepack_loaders.elements import Array


class ArrayOps(Protocol):
    """Operations on the arrays of a runtime: torch tensors, numpy arrays. One object for all calls; it keeps no state."""

    def is_array(self, value: object) -> bool:
        """Whether a value is an array of this kind, as a caller of a pipeline gives and gets it."""

    def load(self, path: Path) -> dict[str, Any]:
        """Return the tensors of a safetensors file, by name. They need not be writeable.

        Raises:
            OSError: the file cannot be read.
            safetensors.SafetensorError: the file is not a safetensors file.
        """

    def save(self, arrays: Mapping[str, Any], path: Path) -> None:
        """Write arrays as a safetensors file.

        Raises:
            OSError: the file cannot be written.
            KeyError: safetensors has no name for the dtype of an array.
        """

    def copy(self, array: Any) -> Any:
        """Return a writeable copy in aligned memory."""

    def array(self, value: object) -> Any:
        """Return a Python number as an array without dimensions; an array as it is."""

    def join(self, arrays: Sequence[Any]) -> Any:
        """Concatenate arrays along their first dimension."""

    def difference(self, actual: Any, expected: Any, rtol: float, atol: float) -> tuple[float, bool]:
        """Compare two arrays.

        Returns:
            The largest absolute difference, and whether all elements are within ``atol + rtol * abs(expected)``. The difference is 0.0
            when all elements are equal, and infinity when a shape, a dtype or a special value differs.
        """

    def on_host(self, value: Any) -> bool:
        """Whether the memory of a value is memory of the host."""

    def to_elements(self, value: Any, dtype: str) -> "Array":
        """Return the elements of a value as a numpy array, which shares its memory if that is the host's and dense.

        Args:
            value: a value that a stage of the runtime takes or returns, or a Python number.
            dtype: the torch name of its dtype, or ``symint``, ``symfloat``, ``symbool`` for a number.

        Raises:
            InputError: the value is not a dense tensor.
        """

    def device_elements(self, value: Any, dtype: str) -> Any:
        """Return the elements of a value on its own device, contiguous, as an object with ``__dlpack__``. Their computation is finished."""

    def takes_device_memory(self, dtype: str) -> bool:
        """Whether `from_elements` also takes an object with ``__dlpack__`` whose memory is on a device, for a dtype."""

    def from_elements(self, elements: Any, value_type: Value | Edge) -> Any:
        """Return the value that `to_elements` was given. Law: ``from_elements(to_elements(v, dtype), value_type)`` equals ``v``.

        The value shares the memory of the elements where the runtime allows it.

        Args:
            elements: a numpy array, or an object with ``__dlpack__``.
            value_type: dtype and number of dimensions of the value.
        """


class LoadedStage(Protocol):
    """A stage with its weights, ready to run.

    Attributes:
        runtime: the name of its runtime.
    """

    runtime: str

    @property
    def device(self) -> Any:
        """The device it runs on; ``str(device)`` is its name."""

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage.

        Args:
            values: in the order of `Stage.inputs`; all of a kind that `Runtime.takes`, or Python numbers for symbolic scalars. They
                are known to have the recorded types and shapes.

        Returns:
            The outputs, in the order of `Stage.outputs`.

        Raises:
            InputError: the stage writes an input that cannot be written.
        """

    def reset_state(self) -> None:
        """Set the buffers that calls write to their content at loading."""

    def fresh_state(self) -> Any:
        """Return new memory for the buffers that calls write, with their content at loading, for `swap_state`."""

    def swap_state(self, state: Any) -> Any:
        """Exchange the buffers that calls write for others, and return the previous ones. So several sequences take turns in one stage."""

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and persistent buffers, by their names in the model."""

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters."""


class PreparedStage(Protocol):
    """A stage whose graph and operators are checked, and whose weights are not read yet."""

    @property
    def runtime(self) -> str:
        """The name of its runtime."""

    def finish(self, *, verify: bool) -> LoadedStage:
        """Read the weights.

        Args:
            verify: compare the weight files with their digests first.

        Raises:
            DigestError: a weight file is not the one that the manifest lists.
            FormatError: a weight file breaks rules.
            OperatorError: the runtime cannot run the stage.
        """


Shared = TypeVar("Shared")


class SharedObjects:
    """One object of each class, for stages that are loaded together: a runtime keeps there what it has read."""

    def __init__(self) -> None:
        self._objects: dict[type, Any] = {}

    def get(self, kind: type[Shared], make: Callable[[], Shared]) -> Shared:
        """Return the object of a class.

        Args:
            kind: the class.
            make: makes the object, if there is none.
        """
        if kind not in self._objects:
            self._objects[kind] = make()
        found: Shared = self._objects[kind]
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Loading:
    """Stages that are loaded together: the options of the caller, and what else a runtime needs to know.

    Attributes:
        options: how they are loaded.
        types: classes that arguments and results of modules may be built of.
        dense_inputs: values from other stages may be contiguous where the captured values were not.
        autocast: whether ``torch.autocast`` around a call reaches the operators of the stages: there, dtypes of values within a stage may
            differ from the captured dtypes.
        progress: called by several threads with the number of bytes of weight files that were read.
        unchanged: called with the size of each weight file that was not read, because it is unchanged since it was verified.
        shared: what the stages share, also stages of several entry points.
    """

    options: LoadOptions = field(default_factory=LoadOptions)
    types: Collection[type] = ()
    dense_inputs: bool = False
    autocast: bool = False
    progress: ByteProgress | None = None
    unchanged: ByteProgress | None = None
    shared: SharedObjects = field(default_factory=SharedObjects)


class Runtime(ABC):
    """What executes stages. A runtime is described without importing the library that it needs.

    Subclass it, and register one object of the subclass: `stagepack_loaders.registry.register_runtime`.

    Attributes:
        name: the value of ``load(runtime=...)`` and of ``--runtime``.
        title: its name in messages.
        packages: top-level modules that must be importable.
        install: the command that installs them.
        keeps_strides: the outputs of a stage have the strides of the capture. If False, they may be contiguous instead.
        runs_modules: it takes ``modules=True``.
        compiles: it has `compile_stages`.
        streams: it takes ``stream=True`` and ``device_memory=``.
        moves: it has `move_stages`.
        joins: it runs stages whose graphs are joined, see `stagepack.partition.joined_bundle`.
        adapts: it takes ``adapters=``, see `stagepack.adapter.adapted_bundle`.
    """

    name: str
    title: str
    packages: tuple[str, ...] = ()
    install: str = ""
    keeps_strides: bool = False
    runs_modules: bool = False
    compiles: bool = False
    streams: bool = False
    moves: bool = False
    joins: bool = False
    adapts: bool = False

    @property
    @abstractmethod
    def arrays(self) -> ArrayOps:
        """The operations on the arrays that a caller gives to stages of this runtime and gets from them."""

    @abstractmethod
    def takes(self, value: object) -> bool:
        """Whether a stage takes a tensor as it is; all others are converted. Imports nothing."""

    @abstractmethod
    def parse_device(self, device: object) -> Any:
        """Return the runtime's own object for a device, given by name or as such an object.

        Raises:
            DeviceError: the runtime has no such device, or this machine does not.
        """

    def own_devices(self) -> list[TargetDevice]:
        """Return the devices of this machine, with what this process may use of each. Default: the CPU."""
        return [TargetDevice(name="cpu")]

    @abstractmethod
    def stage_files(self, bundle: Bundle, stage_number: int) -> tuple[str, ...]:
        """Return the names of the files that running a stage reads, besides the manifest, and read no file.

        Raises:
            OperatorError: the stage lacks a file that the runtime needs.
        """

    @abstractmethod
    def prepare(self, bundle: Bundle, placement: Mapping[int, Any], loading: Loading) -> Mapping[int, PreparedStage]:
        """Read and check stages, all but their weights.

        Args:
            bundle: the bundle of the stages.
            placement: the device of each stage, from `parse_device`, by stage number.
            loading: what the caller asks for.

        Returns:
            The prepared stages, by stage number.

        Raises:
            DigestError: a file is not the one that the manifest lists.
            FormatError: a file breaks rules.
            OperatorError: an operator is missing, not allowed, or has another schema; or the runtime cannot run the stage.
        """

    def finish_stages(
        self, bundle: Bundle, stages: Mapping[int, PreparedStage], *, verify: bool
    ) -> Mapping[int, LoadedStage]:
        """Read the weights of prepared stages. Default: of one stage after the other.

        Args:
            bundle: the bundle of the stages.
            stages: stages that `prepare` or `compile_stages` returned together, by stage number.
            verify: compare the weight files with their digests first.

        Returns:
            The loaded stages, by stage number.

        Raises:
            DigestError, FormatError, OperatorError: see `PreparedStage.finish`.
        """
        return {stage_number: stage.finish(verify=verify) for stage_number, stage in stages.items()}

    def compile_stages(
        self, bundle: Bundle, stages: Mapping[int, PreparedStage], options: LoadOptions
    ) -> Mapping[int, PreparedStage]:
        """Return stages that run compiled, as `options` say: at the first call, or by the native code in a folder.

        Args:
            bundle: the bundle of the stages.
            stages: stages that `prepare` returned, by stage number.
            options: what the caller asks for.

        Raises:
            CompiledError: the folder is of another bundle, for another device or torch, or damaged.
            OptionError: the runtime does not compile.
        """
        raise OptionError(f"{self.title} does not compile stages: leave out compile and compiled")

    def move_stages(self, bundle: Bundle, stages: Mapping[int, Any], placement: Mapping[int, Any]) -> None:
        """Move loaded stages to other devices, with their weights as they are now.

        Args:
            bundle: the bundle of the stages.
            stages: the stages to move, by stage number.
            placement: the device of each of them, from `parse_device`.

        Raises:
            DeviceError: a stage cannot be moved. Default: always.
        """
        raise DeviceError(f"{self.title} does not move stages: load the bundle again with devices=")

    def check_update(self, stages: Mapping[int, Any]) -> None:  # noqa: B027 - a default
        """Check that loaded stages can be replaced by the same stages with other weights. Default: they can.

        Args:
            stages: the loaded stages, by stage number.

        Raises:
            UpdateError: the caller has changed the weights of a stage, or they cannot be in memory twice.
        """

    def stage_version(
        self,
        bundle: Bundle,
        running: Mapping[int, Any],
        changes: WeightChanges,
        loading: Loading,
        report: UpdateReport,
    ) -> Mapping[int, LoadedStage]:
        """Load the stages of another version beside those that run. Default: as any stages.

        Args:
            bundle: the bundle of the version. Its graphs are those of the stages that run.
            running: the stages that run, by stage number.
            changes: which weights are others.
            loading: what the caller asks for.
            report: gets the times of the parts.

        Returns:
            The new stages, by stage number.

        Raises:
            DigestError, FormatError, OperatorError: see `prepare` and `PreparedStage.finish`.
        """
        with report.part("fetch"):
            bundle.fetch(file_name for number in running for file_name in self.stage_files(bundle, number))
        with report.part("stage"):
            prepared = self.prepare(bundle, {number: stage.device for number, stage in running.items()}, loading)
            return self.finish_stages(bundle, prepared, verify=loading.options.verifies_weights)

    def adapt_stages(self, bundle: Bundle, running: Mapping[int, Any], loading: Loading) -> Mapping[int, LoadedStage]:
        """Return stages with the weights of those that run, and the adapters of a bundle. Default: they are loaded as any stages.

        Args:
            bundle: the bundle with its adapters. Its weights are those that run.
            running: see `stage_version`.
            loading: see `stage_version`.

        Raises:
            AdapterError, DigestError, FormatError: an adapter does not fit the stages, or its file is damaged.
        """
        prepared = self.prepare(bundle, {number: stage.device for number, stage in running.items()}, loading)
        return self.finish_stages(bundle, prepared, verify=loading.options.verifies_weights)

    def compile_seconds(self) -> float:
        """Return how long its compiler has worked in this process, in seconds. Default: 0."""
        return 0.0

    def seed(self, seed: int) -> None:  # noqa: B027 - a default
        """Seed the random generators as they were when the example was recorded. Default: nothing."""

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[Any]:
        """Return a context for calls that need no gradients. Default: an empty one.

        for_autograd: whether what they return may be used later where gradients are computed.
        """
        return nullcontext()

    def wait(self, device: Any) -> None:  # noqa: B027 - a default
        """Return when all work given to a device is finished. Default: at once."""
