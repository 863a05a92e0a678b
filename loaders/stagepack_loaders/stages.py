"""A loaded stage that runs: what drives it in a call of a pipeline, and how it is called on its own, with the arrays of any runtime."""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from stagepack.adapter.adapted_bundle import ROWS_NAME
from stagepack.errors import InputError, StageFailedError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Value
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Guard, Symbol
from stagepack_loaders.adapter_calls import AdapterCalls
from stagepack_loaders.base import LoadedStage, Runtime
from stagepack_loaders.exchange import array_ops_of_call, to_array, to_runtime
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS
from stagepack_loaders.registry import find_runtime
from stagepack_loaders.stage_errors import typed_stage_errors


class OwnState:
    """The buffers that calls of a stage write which have no sequence. They pass on from one version of the stage to the next.

    holder: the stage that has them; None for a stage without any, whose versions it must not keep.

    Attributes:
        lock: held while a call uses the buffers of a version, its own or those of a sequence.
    """

    def __init__(self, holder: LoadedStage | None) -> None:
        self.lock = threading.Lock()
        # The stage of the newest version.
        self._holder = holder

    @contextlib.contextmanager
    def lent_to(self, stage: LoadedStage) -> Iterator[None]:
        """Return a context in which a stage has the buffers; the lock is held. A call may still run on a version before the newest."""
        holder = self._holder
        if holder is None or stage is holder:
            yield
            return
        placeholder = holder.fresh_state()
        spare = stage.swap_state(holder.swap_state(placeholder))
        try:
            yield
        finally:
            holder.swap_state(stage.swap_state(spare))

    def pass_on(self, stage: LoadedStage) -> None:
        """Let the stage of a new version have the buffers from now on."""
        with self.lock:
            previous, self._holder = self._holder, stage
            if previous is not None:
                stage.swap_state(previous.swap_state(stage.fresh_state()))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StageDriver:
    """Runs a loaded stage on values by edge name.

    Attributes:
        number: its number.
        loaded: the loaded stage.
        runtime: what runs it.
        inputs: its inputs.
        outputs: the names of its outputs.
        has_state: whether it has buffers that calls write.
        own: these buffers, for calls without a sequence: all executors and versions of a stage share them.
    """

    number: int
    loaded: LoadedStage
    runtime: Runtime
    inputs: tuple[Edge, ...]
    outputs: tuple[str, ...]
    has_state: bool
    own: OwnState

    def take_inputs(self, values: MutableMapping[str, Any]) -> list[Any]:
        """Return the inputs as the runtime takes them. Later stages get the same ones: they are to see what this one writes into them."""
        inputs = []
        for edge in self.inputs:
            values[edge.name] = value = to_runtime(values[edge.name], edge, self.runtime)
            inputs.append(value)
        return inputs

    def run(
        self, inputs: list[Any], states: MutableMapping[int, Any] | None = None, *, waits: bool = False
    ) -> tuple[Any, ...]:
        """Run the stage, and return its outputs in order.

        states: the state of a sequence by stage number, which the call uses and leaves; a stage without one begins with its content at
            loading. None for the state of the stage itself.
        waits: whether to wait until the device of the stage has finished.
        """
        with typed_stage_errors(self.number):
            if self.has_state:
                with self.own.lock:
                    outputs = self._run_alone(inputs) if states is None else self._run_in_sequence(inputs, states)
            else:
                outputs = self.loaded.run(inputs)
            if waits:
                self.runtime.wait(self.loaded.device)
        return outputs

    def _run_alone(self, inputs: list[Any]) -> tuple[Any, ...]:
        with self.own.lent_to(self.loaded):
            return self.loaded.run(inputs)

    def _run_in_sequence(self, inputs: list[Any], states: MutableMapping[int, Any]) -> tuple[Any, ...]:
        state = states[self.number] if self.number in states else self.loaded.fresh_state()
        previous_state = self.loaded.swap_state(state)
        try:
            return self.loaded.run(inputs)
        finally:
            states[self.number] = self.loaded.swap_state(previous_state)

    def reset_state(self) -> None:
        """Set the buffers that calls write to their content at loading."""
        with self.own.lock:
            self.loaded.reset_state()

    def of_version(self, loaded: LoadedStage) -> "StageDriver":
        """Return what runs the same stage with the weights of another version, which does not have its buffers yet."""
        return replace(self, loaded=loaded)

    def take_over(self) -> None:
        """Pass the buffers of calls without a sequence from the version before on to this one, which becomes the newest."""
        # Also where there are none: nothing refers to the version before.
        self.own.pass_on(self.loaded)


def stage_driver(entry_point: EntryPoint, stage_number: int, loaded: LoadedStage) -> StageDriver:
    """Return what runs a loaded stage of an entry point."""
    edges = {edge.name: edge for edge in entry_point.edges}
    stage = entry_point.stages[stage_number]
    return StageDriver(
        number=stage_number,
        loaded=loaded,
        runtime=find_runtime(loaded.runtime),
        inputs=tuple(edges[edge_name] for edge_name in stage.inputs),
        outputs=tuple(stage.outputs),
        has_state=bool(stage.state),
        own=OwnState(loaded if stage.state else None),
    )


def bind_inputs(inputs: Sequence[Value | Edge], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Match a call of a stage with its inputs: the value of each, by name, in the order of `inputs`."""
    input_names = [value_type.name for value_type in inputs]
    bound_inputs = dict(zip(input_names, args, strict=False)) | dict(kwargs)
    if len(args) > len(input_names) or bound_inputs.keys() != set(input_names):
        expected = ", ".join(input_names) or "(none)"
        raise InputError(f"expected the inputs {expected}, found {len(args)} by position and {sorted(kwargs)} by name")
    return {input_name: bound_inputs[input_name] for input_name in input_names}


def checked_inputs(
    inputs: Sequence[Value | Edge],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    symbols: Iterable[Symbol],
    guards: Iterable[Guard],
    adapters: AdapterCalls,
) -> dict[str, Any]:
    """Match a call of a stage with its inputs; return the value of each, by name, in the order of `inputs`.

    They are checked against their recorded types, shapes and ranges, and those guards whose symbols they determine. The adapters of the
    rows are named by a keyword.
    """
    own_inputs = [value_type for value_type in inputs if value_type.name != ROWS_NAME]
    adapter, kwargs = adapters.take(kwargs)
    bound_inputs = bind_inputs(own_inputs, args, kwargs)
    arguments = {input_name: BoundArgument(input_name, value) for input_name, value in bound_inputs.items()}
    adapters.add(bound_inputs, check_values(own_inputs, arguments, symbols, guards), adapter)
    return {value_type.name: bound_inputs[value_type.name] for value_type in inputs}


class CallableStage(ABC):
    """A stage that is called with its inputs, by position or by edge name, and returns a tuple of its outputs.

    Inputs are arrays of any runtime. Outputs are arrays of the kind of the first input that is one; numpy arrays, if none is.
    Subclasses of a runtime whose stages write buffers override `reset_state`, `fresh_state` and `swap_state`.

    Attributes:
        runtime: the name of the runtime.
        device: the device it runs on.
        inputs: the edges that it takes, in order.
        outputs: the edges that it makes, in order.
    """

    runtime: str

    def __init__(self, bundle: Bundle, stage_number: int, device: Any) -> None:
        edges = {edge.name: edge for edge in bundle.edges}
        stage_entry = bundle.stages[stage_number]
        self.device = device
        self.inputs: list[Edge] = [edges[edge_name] for edge_name in stage_entry.inputs]
        self.outputs: list[Edge] = [edges[edge_name] for edge_name in stage_entry.outputs]
        self._stage_number = stage_number
        self._symbols, self._guards = bundle.entry_point.symbols, bundle.entry_point.guards
        self._adapter_calls = AdapterCalls(bundle, stage_entry.inputs)

    @abstractmethod
    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage; see `stagepack_loaders.base.LoadedStage`."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Check the inputs, run the stage, and convert the outputs. With adapters, ``adapter`` names that of all rows, or of each.

        Raises:
            InputError: an input is missing, unknown, or does not fit its recorded type, shape or range; or a value of an input is out
                of range for an operator.
            StageFailedError: an operator failed.
        """
        bound_inputs = checked_inputs(self.inputs, args, kwargs, self._symbols, self._guards, self._adapter_calls)
        runtime = find_runtime(self.runtime)
        values = [to_runtime(bound_inputs[edge.name], edge, runtime) for edge in self.inputs]
        with typed_stage_errors(self._stage_number):
            output_values = self.run(values)
        arrays = array_ops_of_call(bound_inputs.values(), NUMPY_ARRAYS)
        return tuple(to_array(value, edge, arrays) for value, edge in zip(output_values, self.outputs, strict=True))

    def reset_state(self) -> None:  # noqa: B027 - a default
        """See `stagepack_loaders.base.LoadedStage`. Default: nothing, for a stage that writes no buffers."""

    def fresh_state(self) -> Any:
        """See `stagepack_loaders.base.LoadedStage`. Default: None, for a stage that writes no buffers."""
        return None

    def swap_state(self, state: Any) -> Any:
        """See `stagepack_loaders.base.LoadedStage`. Default: `state`, for a stage that writes no buffers."""
        return state

    def __reduce_ex__(self, _: Any) -> NoReturn:
        """Refuse to be pickled or copied.

        Raises:
            TypeError: always.
        """
        raise TypeError("a loaded stage cannot be pickled or copied: pass on the bundle, and load the stage there")


class OutputContract:
    """Checks the outputs of a stage, given its inputs.

    Attributes:
        dtypes: the dtypes of the outputs that are tensors, by position.
    """

    def __init__(
        self,
        inputs: Sequence[Value | Edge],
        outputs: Sequence[Value | Edge | None],
        symbols: Sequence[Symbol],
        dtype_of: Callable[[str], Any] = str,
    ) -> None:
        self._inputs = inputs
        # The other sizes come from the inputs, which were checked.
        self._symbols_of_data = [symbol for symbol in symbols if symbol.example is None]
        self._outputs = [(position, value) for position, value in enumerate(outputs) if value is not None]
        self._tensors = [
            (position, dtype_of(value.dtype), value.shape)
            for position, value in self._outputs
            if value.dtype not in SCALAR_DTYPES
        ]
        self.dtypes = {position: dtype for position, dtype, _ in self._tensors}
        # An input and its dimension that is the size of a symbol.
        self._symbols = {
            dim: (position, index)
            for position, value in enumerate(inputs)
            for index, dim in enumerate(value.shape)
            if isinstance(dim, str)
        }
        self._is_plain = len(self._tensors) == len(outputs) and all(
            isinstance(dim, int) or dim in self._symbols for _, _, dims in self._tensors for dim in dims
        )

    def check(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Check outputs."""
        if self._is_plain and self._fit(inputs, outputs):
            return
        bound = {
            value.name: BoundArgument(value.name, outputs[position])
            for position, value in self._outputs
            if position < len(outputs)
        }
        bound |= {
            value.name: BoundArgument(value.name, given) for value, given in zip(self._inputs, inputs, strict=True)
        }
        expected = {value.name: value for value in (*self._inputs, *(value for _, value in self._outputs))}
        try:
            check_values(expected.values(), bound, self._symbols_of_data)
        except InputError as error:
            raise StageFailedError(f"the stage returns a value that the bundle does not state: {error}") from None

    def _fit(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> bool:
        """Whether all outputs fit, for a stage whose outputs are tensors with sizes that are numbers or those of inputs."""
        for position, dtype, dims in self._tensors:
            output = outputs[position]
            if getattr(output, "dtype", None) != dtype or len(output.shape) != len(dims):
                return False
            for dim, size in zip(dims, output.shape, strict=True):
                if isinstance(dim, str):
                    input_position, index = self._symbols[dim]
                    dim = inputs[input_position].shape[index]
                if dim != size:
                    return False
        return True
