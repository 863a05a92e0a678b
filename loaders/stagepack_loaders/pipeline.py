"""Loaded stages as one callable, in one process."""

from collections.abc import Collection, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from stagepack.format.contract import bind_call, check_values
from stagepack.format.manifest import Edge, Manifest
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant_value, unflatten_tree, value_names
from stagepack_loaders.base import ArrayOps, LoadedStage, Runtime
from stagepack_loaders.exchange import array_ops_of_call, to_array, to_runtime
from stagepack_loaders.registry import find_runtime


class Pipeline:
    """A loaded bundle: called like the model, it returns what the model returns.

    Stages may be of several runtimes; where these differ, values are converted on their way. A caller gets arrays of the kind of the
    first array that it gives, or of the runtime of the first stage if it gives none.

    Attributes:
        manifest: the manifest of the bundle.
        stages: the loaded stages, in order.
        runtimes: the runtime of each stage.

    Examples:
        >>> pipeline = stagepack.load("m.stagepack")
        >>> result = pipeline(*args, **kwargs)
        >>> pipeline.reset_state()
    """

    def __init__(self, manifest: Manifest, stages: Sequence[LoadedStage], types: Collection[type] = ()) -> None:
        """Connect the stages of a bundle.

        Args:
            manifest: the manifest of the bundle.
            stages: its loaded stages, in order.
            types: classes that results may be built of, where the bundle names them.
        """
        self.manifest = manifest
        self.stages = tuple(stages)
        self.runtimes: tuple[Runtime, ...] = tuple(find_runtime(stage.runtime) for stage in stages)
        self._types = tuple(types)
        self._edges: dict[str, Edge] = {edge.name: edge for edge in manifest.edges}
        self._inputs = tuple(edge for edge in manifest.edges if edge.producer is None)
        self._results = tuple(dict.fromkeys(value_names(manifest.signature.result)))
        last_uses: list[list[str]] = [[] for _ in manifest.stages]
        for edge in manifest.edges:
            if edge.consumers and edge.name not in self._results:
                last_uses[edge.consumers[-1]].append(edge.name)
        self._last_uses = tuple(last_uses)

    @property
    def arrays(self) -> ArrayOps:
        """The operations on arrays of the runtime of the first stage: for reading inputs of files and requests."""
        return self.runtimes[0].arrays

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages.

        Args:
            *args: the arguments of the model.
            **kwargs: its keyword arguments.

        Returns:
            The result of the model, in the containers of the model.

        Raises:
            InputError: the call does not fit the signature, or an input does not fit its type, shape or range.
        """
        bound_arguments = bind_call(self.manifest.signature, args, kwargs)
        check_values(self._inputs, bound_arguments, self.manifest.symbols)
        values = {edge_name: argument.value for edge_name, argument in bound_arguments.items()}
        arrays = array_ops_of_call(values.values(), self.arrays)
        for stage_number in range(len(self.stages)):
            self.run_stage(stage_number, values)
        result_values = {
            edge_name: to_array(values[edge_name], self._edges[edge_name], arrays) for edge_name in self._results
        }

        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return result_values[leaf.name] if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        return unflatten_tree(self.manifest.signature.result, leaf_value, self._types)

    def run_stage(self, stage_number: int, values: MutableMapping[str, Any]) -> None:
        """Run one stage on values that are known to fit.

        Args:
            stage_number: the stage.
            values: the values by edge name. Those that the stage makes are added; those that no later stage uses are removed, so that
                their memory is freed.
        """
        stage_entry = self.manifest.stages[stage_number]
        runtime = self.runtimes[stage_number]
        # Converted for later stages too: they are to see what this one writes into it.
        for edge_name in stage_entry.inputs:
            values[edge_name] = to_runtime(values[edge_name], self._edges[edge_name], runtime)
        output_values = self.stages[stage_number].run([values[edge_name] for edge_name in stage_entry.inputs])
        values.update(zip(stage_entry.outputs, output_values, strict=True))
        for edge_name in self._last_uses[stage_number]:
            del values[edge_name]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """A context for calls that need no gradients, in all runtimes of the pipeline."""
        with ExitStack() as contexts:
            for runtime in dict.fromkeys(self.runtimes):
                contexts.enter_context(runtime.inference())
            yield

    def seed(self, seed: int) -> None:
        """Seed the random generators of all runtimes of the pipeline."""
        for runtime in dict.fromkeys(self.runtimes):
            runtime.seed(seed)

    def reset_state(self) -> None:
        """Set all buffers that calls write, such as key-value caches and counters, to their content at loading."""
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
