"""Example inputs for models of transformers, by the names of their inputs, their processor and their configuration."""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.checkpoint import DataNeededError
from stagepack.capture.extensions import LibraryModel
from stagepack.capture.inputs import Inputs, on_device_of, required_parameters
from stagepack.capture.model_runs import call_with_shapes
from stagepack.capture.transformers.example_tensors import (
    LARGEST_BATCH,
    ExampleSizes,
    ExampleTensor,
    asks_for_data,
    configured_example,
    decoder_example,
    input_kinds,
    placeholder_tokens,
    several_images_example,
    token_example,
)
from stagepack.capture.transformers.pretrained_model import load_pretrained
from stagepack.capture.transformers.processed_examples import family_processor, folder_processor, processed_examples
from stagepack.errors import STARTING_FILE_MARK, CaptureError

# The names of the dimensions that count tokens.
_SEQUENCES: Final = ("sequence", "decoded")
# The inputs of each kind. A model takes one of them, and may take what describes it, such as a mask.
_INPUTS_OF_KIND: Final = {
    "image": ("pixel_values", "flattened_patches", "image_pixel_values", "pixel_values_images", "hidden_states"),
    "video": ("pixel_values_videos", "pixel_values"),
    "audio": ("input_features", "input_values", "audio_input_features", "audio_values", "audio_mel"),
    "time": ("past_values",),
}
_TEXT_INPUTS: Final = ("input_ids", "attention_mask", "decoder_input_ids")
# Patches, in an encoder of images; models of other kinds call so what another model computes.
_PATCHES: Final = "hidden_states"
# The name of the number of images or sounds, where it may differ from the number of texts.
_OWN_NUMBER: Final = {"image": "images", "video": "videos", "audio": "sounds"}
_Examples = dict[str, ExampleTensor]


@dataclass(frozen=True, slots=True)
class ModelExample:
    """Example inputs that were made for a model."""

    inputs: Inputs
    # Why the model does not take them; None if it does, or that is not known.
    error: str | None = None
    # Kinds of inputs of the model that they do not have.
    left_out: tuple[str, ...] = ()


def example_inputs(model: Any, folder: str | None = None) -> Inputs:
    """Make an example for a model of transformers, with dynamic batch and sequence where its kind has them."""
    try:
        example = model_examples(model, folder)[0]
    except DataNeededError:
        if folder is None:
            raise
        example = model_examples(load_pretrained(folder), folder)[0]
    if example.error is not None:
        raise CaptureError(f"{type(model).__name__}: {example.error}{starting_file(model, example.inputs)}")
    return example.inputs


def model_examples(model: Any, folder: str | None = None) -> list[ModelExample]:
    """Make examples for a model of transformers, the best first."""
    has_example = isinstance(model, LibraryModel)
    made = [ModelExample(model.example())] if has_example else _ExampleMaker(model, folder).examples()
    return [replace(example, inputs=on_device_of(model, example.inputs)) for example in made]


def with_longer_sequences(inputs: Inputs) -> Inputs:
    """Return inputs whose sequences have two tokens or more: some models compute one token in another way than several."""
    longer = {
        id(dim): Dim(dim.__name__, min=2, max=dim.max)
        for dims in inputs.dynamic_shapes.values()
        for dim in dims.values()
        if dim.__name__ in _SEQUENCES and dim.min < 2
    }
    return replace(
        inputs,
        dynamic_shapes={
            parameter: {position: longer.get(id(dim), dim) for position, dim in dims.items()}
            for parameter, dims in inputs.dynamic_shapes.items()
        },
    )


def smallest_inputs(inputs: Inputs) -> Inputs:
    """Return the inputs with the smallest size in each dynamic dimension."""
    kwargs = dict(inputs.kwargs)
    for parameter, dims in inputs.dynamic_shapes.items():
        for position, dim in dims.items():
            kwargs[parameter] = kwargs[parameter].narrow(position, 0, dim.min)
    return replace(inputs, kwargs=kwargs)


def with_auto_dims(inputs: Inputs) -> Inputs:
    """Replace the named dimensions of inputs by ``Dim.AUTO``: torch decides which of them are dynamic."""
    auto_shapes = {parameter: dict.fromkeys(dims, Dim.AUTO) for parameter, dims in inputs.dynamic_shapes.items()}
    return replace(inputs, dynamic_shapes=auto_shapes)


class _ExampleMaker:
    """Makes examples for one model."""

    def __init__(self, model: Any, folder: str | None) -> None:
        self._model = model
        self._folder = folder
        self._parameters = inspect.signature(model.forward).parameters
        self._required = required_parameters(model.forward)
        main = model.main_input_name
        self._main_inputs = (main,) if isinstance(main, str) else tuple(main)
        self._takes_text = "input_ids" in self._parameters and (
            "text" in input_kinds(model) or "input_ids" in self._main_inputs
        )
        self._kinds = self._kinds_besides_text()
        self._sizes = ExampleSizes.of(model.config)

    def examples(self) -> list[ModelExample]:
        """The examples, the best first."""
        if not self._kinds and self._takes_text:
            return [ModelExample(self._text_inputs())]
        examples: list[ModelExample] = []
        for samples in self._sample_examples() if self._kinds else ():
            example = self._tried(samples)
            if example is not None:
                examples.append(example)
                if example.error is None:
                    break
        with_text_alone = []
        if self._takes_text and self._main_inputs == ("input_ids",):
            text_inputs = self._text_inputs()
            if call_with_shapes(self._model, self._model, text_inputs.kwargs).succeeded:
                with_text_alone = [ModelExample(text_inputs, left_out=self._kinds)]
        if not examples and with_text_alone:
            return with_text_alone
        if not examples:
            input_names = ", ".join(dict.fromkeys((*self._main_inputs, *self._required)))
            advice = starting_file(self._model, Inputs())
            raise CaptureError(
                f"{type(self._model).__name__} takes {input_names}, for which no example is known{advice}"
            )
        # The last is the one that the model takes, or else has the most of its processor.
        return [examples[-1], *with_text_alone]

    def _kinds_besides_text(self) -> tuple[str, ...]:
        """A model that takes images and videos gets images."""
        needed = {*self._main_inputs, *self._required}
        declared = {
            kind
            for kind, input_names in _INPUTS_OF_KIND.items()
            if kind in input_kinds(self._model) and any(input_name in self._parameters for input_name in input_names)
        }
        # A model of images and one of videos may call its input pixel_values.
        implied = {
            kind for kind, input_names in _INPUTS_OF_KIND.items() if (needed - {_PATCHES}).intersection(input_names)
        }
        kinds = dict.fromkeys(
            kind for kind in _INPUTS_OF_KIND if kind in declared or (kind in implied and kind != "video")
        )
        if "pixel_values_videos" in needed:
            kinds["video"] = None
        if "video" in kinds and "image" in kinds:
            del kinds["video" if "pixel_values_videos" not in needed else "image"]
        return tuple(kinds)

    def _text_inputs(self) -> Inputs:
        config = self._model.config
        tokens = token_example(config, self._sizes)
        examples = {"input_ids": tokens}
        if config.is_encoder_decoder and "decoder_input_ids" in self._parameters:
            examples["decoder_input_ids"] = decoder_example(config, self._sizes)
        elif "attention_mask" in self._parameters:
            examples["attention_mask"] = _mask_of(tokens)
        return self._inputs_of(examples)

    def _inputs_of(self, examples: Mapping[str, ExampleTensor]) -> Inputs:
        constants = {"use_cache": False} if "use_cache" in self._parameters else {}
        kwargs = {input_name: example.tensor for input_name, example in examples.items()}
        dynamic_shapes = {input_name: example.dims for input_name, example in examples.items()}
        return Inputs(kwargs={**kwargs, **constants}, dynamic_shapes=dynamic_shapes)

    def _sample_examples(self) -> Iterator[_Examples]:
        """Yield what the inputs besides text may be; of each, what the model needs, and then all that describes it, such as masks.

        The processor of the folder makes them, the configuration states them, also several images a sample, or the family's processor
        makes them.
        """
        sources = [self._of_folder, self._configured, self._of_family]
        if "image" in self._kinds:
            sources.insert(2, self._of_several_images)
        for source in sources:
            of_kinds = [source(kind) for kind in self._kinds]
            if not all(of_kinds):
                continue
            examples = {input_name: example for of_kind in of_kinds for input_name, example in of_kind.items()}
            main = [
                next((input_name for input_name in _INPUTS_OF_KIND[kind] if input_name in examples), "")
                for kind in self._kinds
            ]
            input_names = {*main, *self._main_inputs, *self._required}
            needed = {input_name: example for input_name, example in examples.items() if input_name in input_names}
            yield needed
            if needed != examples:
                yield examples

    def _of_folder(self, kind: str) -> _Examples:
        processor = folder_processor(kind, self._folder)
        return processed_examples(processor, kind, self._model, self._sizes, self._parameters)

    def _of_family(self, kind: str) -> _Examples:
        processor = family_processor(kind, self._model.config)
        return processed_examples(processor, kind, self._model, self._sizes, self._parameters)

    def _configured(self, kind: str) -> _Examples:
        input_names = dict.fromkeys((*_INPUTS_OF_KIND[kind], *self._required))
        candidates = (
            (input_name, configured_example(self._model, input_name, self._sizes))
            for input_name in input_names
            if input_name in self._parameters
        )
        return {input_name: example for input_name, example in candidates if example is not None}

    def _of_several_images(self, kind: str) -> _Examples:
        if kind != "image" or "pixel_values" not in self._parameters:
            return self._configured(kind)
        return self._configured(kind) | {"pixel_values": several_images_example(self._model, self._sizes)}

    def _tried(self, samples: _Examples) -> ModelExample | None:
        """Inputs with text where the model takes it, and whether the model takes them; None if a needed input is missing."""
        # Models such as one with a Q-Former, which has a tokenizer of its own, read a text twice.
        further_texts = [
            input_name
            for input_name in self._required
            if input_name.endswith("_input_ids") and input_name not in (*samples, *_TEXT_INPUTS)
        ]
        if not {*self._required} <= {*samples, *_TEXT_INPUTS, *further_texts}:
            return None
        model, config = self._model, self._model.config
        examples, placeholders = dict(samples), []
        text_count = 2 if all(sample.dims for sample in samples.values()) else 1
        if self._takes_text:
            tensors = {input_name: sample.tensor for input_name, sample in samples.items()}
            placeholders = placeholder_tokens(model, tensors, text_count)
            tokens = token_example(config, self._sizes, placeholders)
            further = {"attention_mask": _mask_of(tokens), "mm_token_type_ids": _kinds_of(tokens, len(placeholders))}
            examples |= {"input_ids": tokens} | {
                input_name: example for input_name, example in further.items() if input_name in self._parameters
            }
        if config.is_encoder_decoder and "decoder_input_ids" in self._parameters:
            examples["decoder_input_ids"] = decoder_example(config, self._sizes)
        examples |= {input_name: token_example(config, self._sizes) for input_name in further_texts}
        if text_count == 1:
            examples |= {
                input_name: _first_row(examples[input_name]) for input_name in examples if input_name not in samples
            }
        inputs = self._inputs_of(
            {input_name: examples[input_name] for input_name in self._parameters if input_name in examples}
        )
        call = call_with_shapes(model, model, inputs.kwargs)
        if call.succeeded and "input_ids" in examples and not placeholders and len(self._kinds) == 1:
            inputs = self._with_own_number(inputs, samples)
        return ModelExample(inputs, None if asks_for_data(call) else call.error)

    def _with_own_number(self, inputs: Inputs, samples: _Examples) -> Inputs:
        """Let there be another number of images or sounds than of texts, if the model takes them, as CLIP does."""
        fewer = {
            input_name: tensor[:1] if input_name in samples and 0 in samples[input_name].dims else tensor
            for input_name, tensor in inputs.kwargs.items()
        }
        if not call_with_shapes(self._model, self._model, fewer).succeeded:
            return inputs
        dynamic_shapes = dict(inputs.dynamic_shapes)
        sample_count = Dim(_OWN_NUMBER[self._kinds[0]], min=1, max=LARGEST_BATCH)
        for input_name in samples:
            dynamic_shapes[input_name] = {axis: sample_count for axis in samples[input_name].dims}
        return replace(inputs, dynamic_shapes=dynamic_shapes)


def _mask_of(tokens: ExampleTensor) -> ExampleTensor:
    return ExampleTensor(torch.ones_like(tokens.tensor), tokens.dims)


def _first_row(example: ExampleTensor) -> ExampleTensor:
    return ExampleTensor(example.tensor[:1], {axis: dim for axis, dim in example.dims.items() if axis > 0})


def _kinds_of(tokens: ExampleTensor, placeholder_count: int) -> ExampleTensor:
    """1 for each token that stands for an image, and 0 for others."""
    kinds_bs = torch.zeros_like(tokens.tensor)
    kinds_bs[:, :placeholder_count] = 1
    return ExampleTensor(kinds_bs, tokens.dims)


def starting_file(model: Any, inputs: Inputs) -> str:
    """Return the end of an error message: what to pass, and after an empty line the content of the file to start from."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", ())
    needed = ([main] if isinstance(main, str) else list(main)) + required_parameters(model.forward)
    named = dict.fromkeys(input_name for input_name in needed if input_name in parameters) | dict(inputs.kwargs)
    other_names = [
        input_name
        for input_name, parameter in parameters.items()
        if input_name not in named and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    lines = [
        "import torch",
        "",
        "",
        "def inputs():",
        f"    # {type(model).__name__} also takes {', '.join(other_names)}." if other_names else "",
        "    return {",
        *(f"        {input_name!r}: {_expression(value)}" for input_name, value in named.items()),
        "    }",
    ]
    file_text = "\n".join(line for index, line in enumerate(lines) if line or index < 3)
    return f": write its inputs into a file such as inputs.py, and {STARTING_FILE_MARK}{file_text}"


def _expression(value: Any) -> str:
    if value is None:
        return "torch.zeros(2, 8),  # its shape and dtype are not known"
    if not isinstance(value, torch.Tensor):
        return f"{value!r},"
    shape = ", ".join(map(str, value.shape))
    function = "rand" if value.is_floating_point() else "ones"
    return f"torch.{function}({shape}, dtype={value.dtype}),"
