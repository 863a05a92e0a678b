"""A loaded bundle as one callable: it matches a call with the signature, checks it, has an executor run it, and builds the result."""

from collections.abc import Callable, Collection, Iterator, Mapping
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
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.call_future import CallFuture
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.elements import Array
from stagepack_loaders.exchange import array_ops_of_call, check_shared_memory, to_array
from stagepack_loaders.executor import CallOptions, Executor
from stagepack_loaders.module_habits import module_hint
from stagepack_loaders.pinned_pipeline import PinnedPipeline, pinned_together
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.pipeline_versions import PipelineVersions
from stagepack_loaders.placement import current_placement
from stagepack_loaders.run_trace import RunTrace
from stagepack_loaders.stages import CallableStage as CallableStage
from stagepack_loaders.versions import CallSequence, StageVersion


class CallablePipeline(PipelineVersions):
    """A bundle that runs: called like the model, it returns what the model returns.

    A caller gets arrays of the kind of the first array that it gives, or of `arrays` if it gives none.

    Attributes:
        entry_point: the entry point.
        limit: the largest size of values; None for no limit.
        executor: what runs the stages.
    """

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
        self.executor.check_open()
        return self._sequence(self.executor.version)

    def sequences(self, count: int, version: StageVersion | None = None) -> list[PipelineSequence]:
        """Return several sequences on one version of the weights, the newest or another one; see `sequence`."""
        self.executor.check_open()
        pinned = version or self.executor.version
        return [self._sequence(pinned) for _ in range(count)]

    def call_version(self, version: StageVersion, inputs: Mapping[str, Any]) -> Any:
        """Call the pipeline on a version of the weights, with inputs by name."""
        values, sizes, arrays = self._bind(version, (), inputs)
        return self._build_result(self.executor.run(values, sizes, version), arrays)

    def _pinned(self) -> PinnedPipeline:
        """The pipeline at its newest version: all calls for some texts, and what reads these, are of one version."""
        return PinnedPipeline(self, self.executor.version)

    def _sequence(self, version: StageVersion) -> PipelineSequence:
        state = self.executor.begin_sequence(version)
        return PipelineSequence(
            partial(self._submit, state),
            partial(self.executor.end_sequence, state),
            partial(self.executor.forget_sequence, state),
            version.name,
        )

    def generate(
        self,
        inputs: Any = None,
        attention_mask: Any = None,
        *,
        encoder: "CallablePipeline | None" = None,
        on_tokens: Callable[[Array], object] | None = None,
        return_logprobs: bool = False,
        adapter: Any = None,
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
            adapter: of a pipeline with adapters: the name of the adapter for all texts, or a list with a name or None for each prompt.
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
        self.executor.check_open()
        pair = (self._pinned(), None) if encoder is None else pinned_together(self, encoder)
        options = {"return_logprobs": return_logprobs, "adapter": adapter}
        return pipeline_method("generate")(pair[0], inputs, attention_mask, settings, pair[1], on_tokens, **options)

    def encode(
        self,
        sentences: Any,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int = 32,
        adapter: Any = None,
    ) -> Any:
        """Embed texts, as ``encode`` of sentence-transformers does. The bundle has a model of this library and its tokenizer.

        Args:
            sentences: a text, or a list of texts.
            prompt_name: the prompt of the model that is put before each text, such as ``"query"``; None for the default one of the model.
            prompt: a prompt that takes its place.
            batch_size: the number of texts that are run together, the longest first.
            adapter: of a pipeline with adapters: the name of the adapter for all texts, or a list with a name or None for each text.

        Returns:
            The embeddings, [text, dimension], or [dimension] for one text, as an array of the runtime of the first stage. An empty list
            gives [0, dimension].

        Raises:
            InputError: the bundle does not embed texts, or has no tokenizer or no such prompt; or `sentences` are no texts, or there are
                fewer or more adapters in a list.

        Examples:
            >>> pipeline = stagepack.load("minilm.stagepack")
            >>> pipeline.encode(["A cat sits on the mat.", "A kitten rests on a rug."]).shape
            torch.Size([2, 384])
        """
        self.executor.check_open()
        return pipeline_method("encode")(self._pinned(), sentences, prompt_name, prompt, batch_size, adapter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run all stages.

        Args:
            *args: the arguments of the model.
            **kwargs: its keyword arguments. Of a pipeline with adapters also ``adapter``, the name of the adapter for all rows, or a list
                with a name or None for each; ``adapter_`` if the model has an argument ``adapter``.

        Returns:
            The result of the model, in the containers of the model.

        Raises:
            InputError: the call does not fit the signature, or an input does not fit its type, shape or range; or a value of an input
                is out of range for an operator.
            ValueSizeError: a value would be larger than the limit of the pipeline.
            StageFailedError: an operator failed.
        """
        version = self.executor.version
        values, sizes, arrays = self._bind(version, args, kwargs)
        return self._build_result(self.executor.run(values, sizes, version), arrays)

    def _submit(self, state: CallSequence | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> "Future[Any]":
        """Call the pipeline with the state of a sequence, without waiting for the result if the stages run in other processes."""
        version = self.executor.version if state is None else state.version
        values, sizes, arrays = self._bind(version, args, kwargs)
        result = CallFuture(self.executor)

        def finish(answer: "Future[dict[str, Any]]") -> None:
            try:
                result.set_result(self._build_result(answer.result(), arrays))
            except Exception as error:  # noqa: BLE001 - the caller gets it
                result.set_exception(error)

        options = CallOptions(version=version)
        self.executor.submit(values, sizes, state, options).add_done_callback(finish)
        return result

    def _bind(
        self, version: StageVersion, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, int], ArrayOps]:
        """Return the values of a call of a version by edge name, their sizes, and the operations on the arrays of the caller."""
        adapter, kwargs = version.adapters.take(kwargs)
        bound_arguments = bind_call(self.entry_point.signature, args, kwargs)
        sizes = check_values(self._inputs, bound_arguments, self.entry_point.symbols, self.entry_point.guards)
        if self.limit is not None:
            self.limit.check(sizes)
        values = {edge_name: argument.value for edge_name, argument in bound_arguments.items()}
        version.adapters.add(values, sizes, adapter)
        if written_inputs := self.executor.written_inputs:
            check_shared_memory(values, written_inputs)
        return values, sizes, array_ops_of_call(values.values(), self.arrays)

    def _build_result(self, values: Mapping[str, Any], arrays: ArrayOps) -> Any:
        """Return the result of the model, in its containers, with arrays of a kind."""
        result_values = {
            edge_name: to_array(values[edge_name], self._edges[edge_name], arrays) for edge_name in self._results
        }
        return fill_tree(self.entry_point.signature.result, result_values, self._types)
