"""Loaded stages -> one callable, in one process."""

from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Protocol

from stagepack.format.contract import bind_call, check_values
from stagepack.format.manifest import Manifest, Stage
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant_value, unflatten_tree, value_names


class LoadedStage(Protocol):
    """What a pipeline needs of a stage, whatever runtime it is of.

    Attributes:
        runtime: the name of the runtime.
        device: where the stage runs.
    """

    runtime: str
    device: Any

    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage on values in the order of its inputs; return the outputs in theirs."""

    def reset_state(self) -> None:
        """Give the buffers that calls write the content that they were loaded with."""

    def fresh_state(self) -> Any:
        """What calls write, with the content that the stage was loaded with: for `swap_state`."""

    def swap_state(self, state: Any) -> Any:
        """Put it in the place of what calls write, and return what was there. Several calls may so take turns in one stage."""

    def state_dict(self) -> dict[str, Any]:
        """The parameters and persistent buffers by the model's own names."""

    def parameters(self) -> Iterator[Any]:
        """The parameters."""


class Pipeline:
    """A loaded bundle: called like the model, it gives what the model gives.

    Attributes:
        manifest: what the bundle says of itself.
        stages: the loaded stages in order.
    """

    def __init__(self, manifest: Manifest, stages: Sequence[LoadedStage], types: Collection[type] = ()) -> None:
        """`types` are classes that results may be built of, when the bundle names them."""
        self.manifest = manifest
        self.stages = tuple(stages)
        self._types = tuple(types)
        self._inputs = tuple(edge for edge in manifest.edges if edge.producer is None)
        results = set(value_names(manifest.signature.result))
        done: list[list[str]] = [[] for _ in manifest.stages]
        for edge in manifest.edges:
            if edge.consumers and edge.name not in results:
                done[edge.consumers[-1]].append(edge.name)
        self._done_after = tuple(done)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages.

        Raises:
            InputError: the call does not fit the signature, or an input does not fit its type, shape or range.
        """
        bound = bind_call(self.manifest.signature, args, kwargs)
        check_values(self._inputs, bound, self.manifest.symbols)
        values = {name: given.value for name, given in bound.items()}
        for number in range(len(self.stages)):
            self.run_stage(number, values)

        def leaf(found: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return results[found.name] if isinstance(found, ValueLeaf) else constant_value(found)

        results = self.results(values, [given.value for given in bound.values()])
        return unflatten_tree(self.manifest.signature.result, leaf, self._types)

    def run_stage(self, number: int, values: MutableMapping[str, Any]) -> None:
        """Run a stage on values by edge name, which are known to fit: put in what it makes, drop what no later stage needs."""
        entry = self.manifest.stages[number]
        values.update(zip(entry.outputs, self._run(self.stages[number], entry, values), strict=True))
        for name in self._done_after[number]:  # nobody needs it any more: its memory may go
            del values[name]

    def _run(self, stage: LoadedStage, entry: Stage, values: MutableMapping[str, Any]) -> tuple[Any, ...]:
        """Run a stage on the values that it takes."""
        return stage.run([values[name] for name in entry.inputs])

    def results(self, values: Mapping[str, Any], given: Iterable[Any]) -> Mapping[str, Any]:
        """The results by edge name, as a caller gets them who gave these inputs."""
        return values

    def reset_state(self) -> None:
        """Give all buffers that calls write, such as key-value caches and counters, the content that they were loaded with."""
        for stage in self.stages:
            stage.reset_state()

    def state_dict(self) -> dict[str, Any]:
        """The parameters and persistent buffers of all stages, by the model's own names."""
        return {name: tensor for stage in self.stages for name, tensor in stage.state_dict().items()}

    def parameters(self) -> Iterator[Any]:
        """The parameters of all stages, each once."""
        seen: set[int] = set()
        for stage in self.stages:
            for parameter in stage.parameters():
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield parameter
