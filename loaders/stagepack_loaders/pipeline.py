"""Loaded stages as one callable, in one process.

- What pipelines have in common, wherever their stages run: they are called like the model and return what the model returns.
- A loaded stage that can be called on its own, with the arrays of any runtime.
"""

# Long because the interface of pipelines, the pipeline of this process and the interface of its stages call each other.

import copy
import itertools
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import cached_property
from typing import Any, NoReturn, Self

from stagepack.errors import DeviceError, InputError, OptionError
from stagepack.format.aliasing import written_inputs
from stagepack.format.contract import BoundArgument, bind_call, check_values
from stagepack.format.graph import Graph, Value
from stagepack.format.manifest import Edge, format_inputs, format_stage_count
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Guard, Symbol
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant_value, unflatten_tree, value_names
from stagepack_loaders.base import ArrayOps, LoadedStage, Runtime, stage_state
from stagepack_loaders.call_limits import ValueLimit
from stagepack_loaders.embeddings import TextReader, encode, text_reader
from stagepack_loaders.exchange import array_ops_of_call, check_shared_memory, to_array, to_runtime
from stagepack_loaders.generation.generate import TokenCallback, generate
from stagepack_loaders.numpy_interpreter import NUMPY_ARRAYS
from stagepack_loaders.pipeline_sequence import PipelineSequence
from stagepack_loaders.placement import device_list, place_stages
from stagepack_loaders.registry import TORCH_RUNTIME, find_runtime
from stagepack_loaders.run_trace import RunTrace, SpanRecorder
from stagepack_loaders.stage_errors import typed_stage_errors

FIXED_DTYPES = "a bundle computes in the types of the export: export with --dtype, or in Python the model in that type"
_TRAINING = "graphs compute as the model did at the export: export it in training mode, and train with stagepack.train"
# What users of `torch.nn.Module` look for, and what takes its place.
_MODULE_METHODS = {
    **dict.fromkeys(("half", "bfloat16", "float", "double", "type"), FIXED_DTYPES),
    **dict.fromkeys(("cuda", "cpu"), "move the stages with to(), such as to('cuda') or to(['cuda:0', 'cuda:1'])"),
    "compile": "load the bundle with compile=True",
    **dict.fromkeys(("train", "training"), _TRAINING),
    **dict.fromkeys(
        ("named_parameters", "buffers", "named_buffers"),
        "state_dict() has the weights of all stages by their names in the model",
    ),
    "load_state_dict": "load into each stage, pipeline.stages[0].load_state_dict(weights, strict=False), or export with --graph-from",
    "zero_grad": "an optimizer has it: torch.optim.SGD(pipeline.parameters(), lr).zero_grad()",
    "forward": "call the pipeline itself, as the model is called",
    "device": "its stages have one each: pipeline.devices",
    "dtype": "its inputs have one each: pipeline.inputs[0].dtype",
    "config": "the bundle has that of a transformers model: pipeline.bundle.read('config.json')",
    **dict.fromkeys(
        ("save", "save_pretrained", "push_to_hub"),
        "stagepack.save(pipeline, out=...) writes a bundle; 'stagepack push' uploads it",
    ),
}


def _module_hint(attribute_name: str) -> str:
    """What takes the place of an attribute of `torch.nn.Module`; nothing for others."""
    torch = sys.modules.get("torch")
    if attribute_name in _MODULE_METHODS or torch is None or attribute_name.startswith("_"):
        return _MODULE_METHODS.get(attribute_name, "")
    is_of_modules = hasattr(torch.nn.Module, attribute_name)
    return f"each of its stages is a module in PyTorch: pipeline.stages[0].{attribute_name}" if is_of_modules else ""


class CallablePipeline(ABC):
    """A bundle that runs: called like the model, it returns what the model returns.

    A caller gets arrays of the kind of the first array that it gives, or of `arrays` if it gives none.

    Attributes:
        bundle: the bundle, at the entry point that runs.
        entry_point: the entry point.
        limit: the largest size of values; None for no limit.
    """

    def __init__(self, bundle: Bundle, types: Collection[type] = (), limit: ValueLimit | None = None) -> None:
        self.bundle = bundle
        self.entry_point = entry_point = bundle.entry_point
        self._types = tuple(types)
        self.limit = limit
        self._edges: dict[str, Edge] = {edge.name: edge for edge in entry_point.edges}
        self._inputs = entry_point.inputs
        self._results = tuple(dict.fromkeys(value_names(entry_point.signature.result)))
        # Of several stages, where the order of a read and a write of the same memory is not that of the model.
        self._written_inputs: frozenset[str] = frozenset()

    def __repr__(self) -> str:
        """The bundle, the stages with their devices, and the inputs."""
        placed = ", ".join(dict.fromkeys(self.devices))
        inputs = format_inputs(self.entry_point)
        return f"<{type(self).__name__} {self.bundle.location!r}, {format_stage_count(len(self.devices))} on {placed}, {inputs}>"

    def __getattr__(self, attribute_name: str) -> Any:
        hint = _module_hint(attribute_name)
        raise AttributeError(f"{type(self).__name__} has no attribute {attribute_name!r}{hint and f': {hint}'}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise OptionError("only pipelines in PyTorch in this process can be copied: load the bundle again")

    def eval(self) -> Self:
        """Return the pipeline: its graphs compute as the model did at the export, in evaluation mode or not."""
        return self

    @property
    def inputs(self) -> tuple[Edge, ...]:
        """The inputs of the model: their names, dtypes and shapes."""
        return self._inputs

    @property
    @abstractmethod
    def arrays(self) -> ArrayOps:
        """The operations on arrays of the runtime of the first stage: for reading inputs of files and requests."""

    @property
    @abstractmethod
    def devices(self) -> tuple[str, ...]:
        """The device of each stage."""

    @contextmanager
    def without_limit(self) -> Iterator[None]:
        """Return a context in which values may have any size; not while other threads call the pipeline."""
        limit, self.limit = self.limit, None
        try:
            yield
        finally:
            self.limit = limit

    @abstractmethod
    def run_values(self, values: dict[str, Any], sizes: Mapping[str, int]) -> None:
        """Run all stages on values that are known to fit.

        Args:
            values: the inputs of the model by edge name. The results are added; others may be removed.
            sizes: the sizes of the symbols that the inputs determine.

        Raises:
            InputError: a stage cannot use the values of its inputs.
        """

    @abstractmethod
    def inference(self) -> AbstractContextManager[None]:
        """Return a context for calls that need no gradients, in all runtimes of the pipeline."""

    @abstractmethod
    def trace(self) -> AbstractContextManager[RunTrace]:
        """Return a context in which each process records what it does for each call. At most one at a time.

        Returns:
            A context whose value is the trace; the spans are there when it has ended. `stagepack_loaders.run_trace.write_trace` writes
            them as a file.

        Examples:
            >>> with pipeline.trace() as run_trace:
            ...     result = pipeline(*args)
            >>> write_trace(run_trace, "trace.json")
        """

    @abstractmethod
    def seed(self, seed: int) -> None:
        """Seed the random generators of all runtimes of the pipeline."""

    @abstractmethod
    def reset_state(self) -> None:
        """Set all buffers that calls write, such as key-value caches and counters, to their content at loading."""

    @abstractmethod
    def sequence(self) -> PipelineSequence:
        """Return the pipeline with state of its own, for models that keep state between calls, such as key-value caches."""

    def generate(
        self,
        inputs: Any = None,
        attention_mask: Any = None,
        *,
        encoder: "CallablePipeline | None" = None,
        on_tokens: TokenCallback | None = None,
        **settings: Any,
    ) -> Any:
        """Generate tokens, as ``generate`` of transformers does. The pipeline is that of a bundle with a decoder and its cache.

        Each generation has state of its own, so that several threads may generate at the same time.

        Args:
            inputs: tokens, [batch, length] or [length], as an array or as lists: those that the decoder continues, or those that the
                encoder reads; or what else the encoder reads, such as the features of speech, [batch, features, frames]; or what a
                tokenizer of transformers returns, which may be given by its names too. A text, or a list of texts, if the bundle has a
                tokenizer.
            attention_mask: 1 for tokens and 0 for padding, [batch, length]. Padding of texts that are continued is moved to their
                beginning. None for no padding, or for that of the padding token of the model.
            encoder: of a model with an encoder: its pipeline.
            on_tokens: called with the new tokens, [batch], as soon as they are there.
            **settings: how tokens are chosen: the fields of `GenerationSettings`, such as ``max_new_tokens=100``, ``do_sample=True``,
                ``temperature=0.7``, ``seed=0``. Others are those of generation_config.json in the bundle, and the defaults of
                transformers.

        Returns:
            All tokens of the decoder, [batch, length], as an array of the kind and on the device of `inputs`: with the tokens that it
            began with. For a text the text of these tokens.

        Raises:
            InputError: the bundle has no decoder of this kind, a setting is unknown or out of range, a text has no tokens, a token is not
                one of the model, or the cache has not enough positions or holds fewer texts.

        Examples:
            >>> pipeline = stagepack.load("llama.stagepack")
            >>> tokens = pipeline.generate(**tokenizer(texts, return_tensors="pt", padding=True), max_new_tokens=50)
            >>> text = pipeline.generate("Once upon a time", max_new_tokens=50)
        """
        return generate(self, inputs, attention_mask, encoder=encoder, on_tokens=on_tokens, settings=settings)

    def encode(
        self, sentences: Any, *, prompt_name: str | None = None, prompt: str | None = None, batch_size: int = 32
    ) -> Any:
        """Embed texts, as ``encode`` of sentence-transformers does. The pipeline is that of a bundle of such a model, with its tokenizer.

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
        return encode(self, self._text_reader, sentences, prompt_name, prompt, batch_size)

    @cached_property
    def _text_reader(self) -> TextReader:
        return text_reader(self.bundle)

    def to(self, devices: Any) -> Self:
        """Move the stages to other devices; only stages in this process can be moved.

        Args:
            devices: a device, or a device for each stage, in order; with fewer devices, consecutive stages share one.

        Raises:
            DeviceError: the stages run in processes of their own.
        """
        raise DeviceError(
            f"cannot move to {devices}: the stages run in processes of their own: load the bundle again with devices="
        )

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
        values, sizes = self._bind_values(args, kwargs)
        arrays = array_ops_of_call(values.values(), self.arrays)
        self.run_values(values, sizes)
        return self._build_result(values, arrays)

    def _bind_values(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
        """Return the values of a call by edge name, and the sizes of the symbols that they determine."""
        bound_arguments = bind_call(self.entry_point.signature, args, kwargs)
        sizes = check_values(self._inputs, bound_arguments, self.entry_point.symbols, self.entry_point.guards)
        if self.limit is not None:
            self.limit.check(sizes)
        values = {edge_name: argument.value for edge_name, argument in bound_arguments.items()}
        if self._written_inputs:
            check_shared_memory(values, self._written_inputs)
        return values, sizes

    def _build_result(self, values: Mapping[str, Any], arrays: ArrayOps) -> Any:
        """Return the result of the model, in its containers, with arrays of a kind."""
        result_values = {
            edge_name: to_array(values[edge_name], self._edges[edge_name], arrays) for edge_name in self._results
        }

        def leaf_value(leaf: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
            return result_values[leaf.name] if isinstance(leaf, ValueLeaf) else constant_value(leaf)

        return unflatten_tree(self.entry_point.signature.result, leaf_value, self._types)


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


def bind_inputs(inputs: Sequence[Value | Edge], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Match a call of a stage with its inputs: the value of each, by name, in the order of `inputs`."""
    input_names = [value_type.name for value_type in inputs]
    bound_inputs = dict(zip(input_names, args, strict=False)) | dict(kwargs)
    if len(args) > len(input_names) or bound_inputs.keys() != set(input_names):
        expected = ", ".join(input_names) or "(none)"
        raise InputError(f"expected the inputs {expected}, found {len(args)} by position and {sorted(kwargs)} by name")
    return {input_name: bound_inputs[input_name] for input_name in input_names}


def check_inputs(
    inputs: Sequence[Value | Edge],
    bound_inputs: Mapping[str, Any],
    symbols: Iterable[Symbol],
    guards: Iterable[Guard],
) -> None:
    """Check the inputs of a stage against their recorded types, shapes and ranges, and those guards whose symbols they determine."""
    arguments = {input_name: BoundArgument(input_name, value) for input_name, value in bound_inputs.items()}
    check_values(inputs, arguments, symbols, guards)


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

    @abstractmethod
    def run(self, values: list[Any]) -> tuple[Any, ...]:
        """Run the stage; see `stagepack_loaders.base.LoadedStage`."""

    def __call__(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """Check the inputs, run the stage, and convert the outputs.

        Raises:
            InputError: an input is missing, unknown, or does not fit its recorded type, shape or range; or a value of an input is out
                of range for an operator.
            StageFailedError: an operator failed.
        """
        bound_inputs = bind_inputs(self.inputs, args, kwargs)
        check_inputs(self.inputs, bound_inputs, self._symbols, self._guards)
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
