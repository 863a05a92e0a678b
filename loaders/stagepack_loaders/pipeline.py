"""A loaded bundle as one callable: it matches a call with the signature, checks it, has an executor run it, and builds the result."""

import copy
from abc import ABC
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Self

from stagepack.errors import OptionError
from stagepack.extensions import pipeline_method
from stagepack.format.contract import bind_call, check_values
from stagepack.format.manifest import Edge, format_inputs, format_stage_count
from stagepack.format.reader import Bundle
from stagepack.format.tree import fill_tree, value_names
from stagepack.partition.placement import Placement
from stagepack_loaders.base import ArrayOps, LoadedStage, Loading, Runtime, SharedObjects
from stagepack_loaders.call_limits import Limits, ValueLimit, value_limit
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import array_ops_of_call, check_shared_memory, to_array
from stagepack_loaders.executor import CallFuture, Executor, LocalExecutor
from stagepack_loaders.module_habits import FIXED_DTYPES, module_hint
from stagepack_loaders.options import LoadOptions, device_list
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.placement import current_placement, place_bundle, place_stages
from stagepack_loaders.preparation import compile_prepared, finish_prepared, prepare, reading_progress
from stagepack_loaders.registry import TORCH_RUNTIME
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.stages import CallableStage as CallableStage


class CallablePipeline(ABC):
    """A bundle that runs: called like the model, it returns what the model returns.

    A caller gets arrays of the kind of the first array that it gives, or of `arrays` if it gives none.

    Attributes:
        entry_point: the entry point.
        limit: the largest size of values; None for no limit.
        executor: what runs the stages.
    """

    executor: Executor

    def __init__(
        self, bundle: Bundle, executor: Executor, types: Collection[type] = (), limit: ValueLimit | None = None
    ) -> None:
        self.entry_point = entry_point = bundle.entry_point
        self.executor = executor
        self.limit = limit
        self._types = tuple(types)
        self._edges: dict[str, Edge] = {edge.name: edge for edge in entry_point.edges}
        self._inputs = entry_point.inputs
        self._results = tuple(dict.fromkeys(value_names(entry_point.signature.result)))

    def __repr__(self) -> str:
        """The bundle, the stages with their devices, and the inputs."""
        placed = ", ".join(dict.fromkeys(self.devices))
        inputs = format_inputs(self.entry_point)
        return f"<{type(self).__name__} {self.bundle.location!r}, {format_stage_count(len(self.devices))} on {placed}, {inputs}>"

    def __getattr__(self, attribute_name: str) -> Any:
        hint = module_hint(attribute_name)
        raise AttributeError(f"{type(self).__name__} has no attribute {attribute_name!r}{hint and f': {hint}'}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise OptionError("only pipelines in PyTorch in this process can be copied: load the bundle again")

    def eval(self) -> Self:
        """Return the pipeline: its graphs compute as the model did at the export, in evaluation mode or not."""
        return self

    @property
    def bundle(self) -> Bundle:
        """The bundle, at the entry point that runs, in the stages that run: those of processes which are left may be others."""
        return self.executor.bundle

    @property
    def inputs(self) -> tuple[Edge, ...]:
        """The inputs of the model: their names, dtypes and shapes."""
        return self._inputs

    @property
    def arrays(self) -> ArrayOps:
        """The operations on arrays of the runtime of the first stage: for reading inputs of files and requests."""
        return self.executor.arrays

    @property
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""
        return self.executor.devices

    @property
    def placement(self) -> Placement:
        """The stages of the bundle on each device, with estimates of their memory and times; as chosen, if the load has chosen it."""
        return self.executor.chosen or current_placement(self.bundle, self.devices)

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Return a context in which values may have any size; not while other threads call the pipeline."""
        limit, self.limit = self.limit, None
        try:
            yield
        finally:
            self.limit = limit

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients, in all runtimes. Stages in other processes never compute them.

        Args:
            for_autograd: whether what they return may be used later where gradients are computed; otherwise, calls are a little faster.

        Returns:
            The context.
        """
        return self.executor.inference(for_autograd=for_autograd)

    def trace(self) -> AbstractContextManager[RunTrace]:
        """Return a context in which each process records what it does for each call. At most one at a time.

        Calls of other processes that are in flight at its begin are not in it. In this process, moving values to the device of a stage
        counts as compute, converting them as transfer.

        Returns:
            A context whose value is the trace; the spans are there when it has ended. `stagepack_loaders.run_trace.write_trace` writes
            them as a file.

        Raises:
            OptionError: of stages in other processes, a trace is on, or this is a callback of a call.
            StageLostError: a process is lost.

        Examples:
            >>> with pipeline.trace() as run_trace:
            ...     result = pipeline(*args)
            >>> write_trace(run_trace, "trace.json")
        """
        return self.executor.trace()

    def seed(self, seed: int) -> None:
        """Seed the random generators of all runtimes of the pipeline, in all processes."""
        self.executor.seed(seed)

    def reset_state(self) -> None:
        """Set all buffers that calls write, such as key-value caches and counters, to their content at loading."""
        self.executor.reset_state()

    def sequence(self) -> PipelineSequence:
        """Return the pipeline with state of its own, for models that keep state between calls, such as key-value caches.

        In this process, sequences of several threads take turns; in others, they run at the same time, in different stages.
        """
        state = self.executor.begin_sequence()
        return PipelineSequence(
            partial(self._submit, state),
            partial(self.executor.end_sequence, state),
            partial(self.executor.forget_sequence, state),
        )

    def generate(
        self,
        inputs: Any = None,
        attention_mask: Any = None,
        *,
        encoder: "CallablePipeline | None" = None,
        on_tokens: Callable[[Array], object] | None = None,
        return_logprobs: bool = False,
        **settings: Any,
    ) -> Any:
        """Generate tokens, as ``generate`` of transformers does. The bundle of the pipeline has a decoder with its cache.

        Each generation has state of its own, so that several threads may generate at the same time.

        Args:
            inputs: tokens, [batch, length] or [length], as an array or as lists: those that the decoder continues, or those that the
                encoder reads; or what else the encoder reads, such as the features of speech, [batch, features, frames]; or what a
                tokenizer of transformers returns, which may be given by its names too. A text, or a list of texts, if the bundle has a
                tokenizer.
            attention_mask: 1 for tokens and 0 for padding, [batch, length]. Padding of texts that are continued is moved to their
                beginning. None: the padding token of the model is padding; without one, there is none.
            encoder: of a model with an encoder: its pipeline.
            on_tokens: called with the new tokens, [batch], as soon as they are there.
            return_logprobs: return how likely each new token was, too: the natural logarithm of its probability by the logits, before
                settings change them.
            **settings: how tokens are chosen: the fields of `GenerationSettings`, such as ``max_new_tokens=100``, ``do_sample=True``,
                ``temperature=0.7``, ``seed=0``, ``stop_strings=["END"]``, ``num_return_sequences=3``. Other fields
                have the values of generation_config.json in the bundle, then the defaults of transformers.

        Returns:
            All tokens of the decoder, [batch, length], as an array of the kind and on the device of `inputs`: with the tokens that it
            began with. For a text the text of these tokens. With ``num_return_sequences``, the texts of a prompt follow each other.
            With ``return_logprobs``, a pair of this and the logprobs, float32 [batch, new tokens]; 0 after the end of a text.

        Raises:
            InputError: the bundle has no decoder of this kind, a setting is unknown or out of range, a text has no tokens, a token is not
                one of the model, the cache has not enough positions, or there are ``stop_strings`` and no tokenizer.

        Examples:
            >>> pipeline = stagepack.load("llama.stagepack")
            >>> tokens = pipeline.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=50)
            >>> text = pipeline.generate("Once upon a time", max_new_tokens=50)
        """
        generate = pipeline_method("generate")
        return generate(self, inputs, attention_mask, settings, encoder, on_tokens, return_logprobs=return_logprobs)

    def encode(
        self, sentences: Any, *, prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32
    ) -> Any:
        """Embed texts, as ``encode`` of sentence-transformers does. The bundle has a model of this library and its tokenizer.

        Args:
            sentences: a text, or a list of texts.
            prompt_name: the prompt of the model that is put before each text, such as ``"query"``; None for the default one of the model.
            prompt: a prompt that takes its place.
            batch_size: the number of texts that are run together, the longest first.

        Returns:
            The embeddings, [text, dimension], or [dimension] for one text, as an array of the runtime of the first stage. An empty list
            gives [0, dimension].

        Raises:
            InputError: the bundle does not embed texts, or has no tokenizer or no such prompt; or `sentences` are no texts.

        Examples:
            >>> pipeline = stagepack.load("minilm.stagepack")
            >>> pipeline.encode(["A cat sits on the mat.", "A kitten rests on a rug."]).shape
            torch.Size([2, 384])
        """
        return pipeline_method("encode")(self, sentences, prompt_name, prompt, batch_size)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages.

        Args:
            *args: the arguments of the model.
            **kwargs: its keyword arguments.

        Returns:
            The result of the model, in the containers of the model.

        Raises:
            InputError: the call does not fit the signature, or an input does not fit its type, shape or range; or a value of an input
                is out of range for an operator.
            ValueSizeError: a value would be larger than the limit of the pipeline.
            StageFailedError: an operator failed.
        """
        values, sizes, arrays = self._bind(args, kwargs)
        return self._build_result(self.executor.run(values, sizes), arrays)

    def _submit(self, state: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Future[Any]":
        """Call the pipeline with the state of a sequence, without waiting for the result if the stages run in other processes."""
        values, sizes, arrays = self._bind(args, kwargs)
        result = CallFuture(self.executor)

        def finish(answer: "Future[dict[str, Any]]") -> None:
            try:
                result.set_result(self._build_result(answer.result(), arrays))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        self.executor.submit(values, sizes, state).add_done_callback(finish)
        return result

    def _bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, int], ArrayOps]:
        """Return the values of a call by edge name, the sizes that they determine, and the operations on the arrays of the caller."""
        bound_arguments = bind_call(self.entry_point.signature, args, kwargs)
        sizes = check_values(self._inputs, bound_arguments, self.entry_point.symbols, self.entry_point.guards)
        if self.limit is not None:
            self.limit.check(sizes)
        values = {edge_name: argument.value for edge_name, argument in bound_arguments.items()}
        if written_inputs := self.executor.written_inputs:
            check_shared_memory(values, written_inputs)
        return values, sizes, array_ops_of_call(values.values(), self.arrays)

    def _build_result(self, values: Mapping[str, Any], arrays: ArrayOps) -> Any:
        """Return the result of the model, in its containers, with arrays of a kind."""
        result_values = {
            edge_name: to_array(values[edge_name], self._edges[edge_name], arrays) for edge_name in self._results
        }
        return fill_tree(self.entry_point.signature.result, result_values, self._types)


class Pipeline(CallablePipeline):
    """A loaded bundle, all stages in this process.

    Stages may be of several runtimes; where these differ, values are converted on their way.

    Attributes:
        bundle: the bundle, at the entry point that runs.
        entry_point: the entry point.
        stages: the loaded stages, in order.

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
    ) -> None:
        super().__init__(bundle, LocalExecutor(bundle, stages), types, limit)
        self.stages = tuple(stages)

    @property
    def runtimes(self) -> tuple[Runtime, ...]:
        """The runtime of each stage."""
        return tuple(stage.runtime for stage in self.executor.stages)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Pipeline":
        if any(runtime.name != TORCH_RUNTIME for runtime in self.runtimes):
            return super().__deepcopy__(memo)
        stages = [copy.deepcopy(stage, memo) for stage in self.stages]
        copied = Pipeline(self.bundle, stages, self._types, self.limit)
        copied.executor.chosen = self.executor.chosen
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
    pipeline = Pipeline(bundle, list(stages.values()), types, limit)
    pipeline.executor.chosen = placed.chosen
    return pipeline
