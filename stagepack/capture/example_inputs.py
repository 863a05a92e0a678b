"""Example inputs for models of transformers, by the names of their inputs, their processor and their configuration."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.checkpoint import DataNeededError
from stagepack.capture.example_tensors import (
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
from stagepack.capture.inputs import Inputs, on_device_of, required_parameters
from stagepack.capture.model_runs import call_with_shapes
from stagepack.capture.pretrained_model import load_pretrained
from stagepack.capture.processed_examples import family_processor, folder_processor, processed_examples
from stagepack.capture.sentence_pipeline import SentencePipeline
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
# Of an encoder of images, they are patches; models of other kinds call so what another model computes.
_PATCHES: Final = "hidden_states"
# The name of the number of images or sounds, where it may be another than that of texts.
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
    made = _made_examples(model, folder)
    return [replace(example, inputs=on_device_of(model, example.inputs)) for example in made]


def _made_examples(model: Any, folder: str | None) -> list[ModelExample]:
    if isinstance(model, SentencePipeline):
        return [ModelExample(model.example())]
    parameters = inspect.signature(model.forward).parameters
    kinds = _kinds(model, parameters)
    if not kinds and _takes_text(model, parameters):
        return [ModelExample(_text_inputs(model, parameters))]
    sizes = ExampleSizes.of(model.config)
    examples: list[ModelExample] = []
    for samples in _sample_examples(model, parameters, folder, kinds, sizes) if kinds else ():
        example = _tried(model, parameters, kinds, samples, sizes)
        if example is not None:
            examples.append(example)
            if example.error is None:
                break
    with_text_alone = []
    if _takes_text(model, parameters) and _main_inputs(model) == ("input_ids",):
        text_inputs = _text_inputs(model, parameters)
        if call_with_shapes(model, model, text_inputs.kwargs).succeeded:
            with_text_alone = [ModelExample(text_inputs, left_out=kinds)]
    if not examples and with_text_alone:
        return with_text_alone
    if not examples:
        input_names = ", ".join(dict.fromkeys((*_main_inputs(model), *required_parameters(model.forward))))
        raise CaptureError(
            f"{type(model).__name__} takes {input_names}, for which no example is known{starting_file(model, Inputs())}"
        )
    # The last is the one that the model takes, or else has the most of its processor.
    return [examples[-1], *with_text_alone]


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


def _main_inputs(model: Any) -> tuple[str, ...]:
    input_name = model.main_input_name
    return (input_name,) if isinstance(input_name, str) else tuple(input_name)


def _takes_text(model: Any, parameters: Mapping[str, Any]) -> bool:
    return "input_ids" in parameters and ("text" in input_kinds(model) or "input_ids" in _main_inputs(model))


def _kinds(model: Any, parameters: Mapping[str, Any]) -> tuple[str, ...]:
    """The kinds of inputs besides text. Of images and videos, a model gets images, unless it takes videos alone."""
    needed = {*_main_inputs(model), *required_parameters(model.forward)}
    declared = {
        kind
        for kind, input_names in _INPUTS_OF_KIND.items()
        if kind in input_kinds(model) and any(input_name in parameters for input_name in input_names)
    }
    # A model of images and one of videos may call its input pixel_values.
    implied = {kind for kind, input_names in _INPUTS_OF_KIND.items() if (needed - {_PATCHES}).intersection(input_names)}
    kinds = dict.fromkeys(kind for kind in _INPUTS_OF_KIND if kind in declared or (kind in implied and kind != "video"))
    if "pixel_values_videos" in needed:
        kinds["video"] = None
    if "video" in kinds and "image" in kinds:
        del kinds["video" if "pixel_values_videos" not in needed else "image"]
    return tuple(kinds)


def _text_inputs(model: Any, parameters: Mapping[str, Any]) -> Inputs:
    sizes = ExampleSizes.of(model.config)
    tokens = token_example(model.config, sizes)
    examples = {"input_ids": tokens}
    if model.config.is_encoder_decoder and "decoder_input_ids" in parameters:
        examples["decoder_input_ids"] = decoder_example(model.config, sizes)
    elif "attention_mask" in parameters:
        examples["attention_mask"] = _mask_of(tokens)
    return _inputs_of(examples, parameters)


def _mask_of(tokens: ExampleTensor) -> ExampleTensor:
    return ExampleTensor(torch.ones_like(tokens.tensor), tokens.dims)


def _inputs_of(examples: Mapping[str, ExampleTensor], parameters: Mapping[str, Any]) -> Inputs:
    constants = {"use_cache": False} if "use_cache" in parameters else {}
    kwargs = {input_name: example.tensor for input_name, example in examples.items()}
    return Inputs(
        kwargs={**kwargs, **constants},
        dynamic_shapes={input_name: example.dims for input_name, example in examples.items()},
    )


def _sample_examples(
    model: Any, parameters: Mapping[str, Any], folder: str | None, kinds: Sequence[str], sizes: ExampleSizes
) -> Iterator[_Examples]:
    """Yield what the inputs besides text may be; of each, what the model needs, and then all that describes it, such as masks.

    The processor of the folder makes them, the configuration states them, also several images a sample, or the family's processor makes
    them.
    """
    required = required_parameters(model.forward)

    def configured(kind: str) -> _Examples:
        input_names = (
            input_name for input_name in dict.fromkeys((*_INPUTS_OF_KIND[kind], *required)) if input_name in parameters
        )
        candidates = ((input_name, configured_example(model, input_name, sizes)) for input_name in input_names)
        return {input_name: example for input_name, example in candidates if example is not None}

    def several_images(kind: str) -> _Examples:
        if kind != "image" or "pixel_values" not in parameters:
            return configured(kind)
        return configured(kind) | {"pixel_values": several_images_example(model, sizes)}

    for source in (
        lambda kind: processed_examples(folder_processor(kind, folder), kind, model, sizes, parameters),
        configured,
        *((several_images,) if "image" in kinds else ()),
        lambda kind: processed_examples(family_processor(kind, model.config), kind, model, sizes, parameters),
    ):
        of_kinds = [source(kind) for kind in kinds]
        if not all(of_kinds):
            continue
        examples = {input_name: example for of_kind in of_kinds for input_name, example in of_kind.items()}
        main = [
            next((input_name for input_name in _INPUTS_OF_KIND[kind] if input_name in examples), "") for kind in kinds
        ]
        input_names = {*main, *_main_inputs(model), *required}
        needed = {input_name: example for input_name, example in examples.items() if input_name in input_names}
        yield needed
        if needed != examples:
            yield examples


def _tried(
    model: Any, parameters: Mapping[str, Any], kinds: Sequence[str], samples: _Examples, sizes: ExampleSizes
) -> ModelExample | None:
    """Inputs with text where the model takes it, and whether the model takes them; None if a needed input is missing."""
    # Of models that read a text twice, such as one with a Q-Former, which has a tokenizer of its own.
    further_texts = [
        input_name
        for input_name in required_parameters(model.forward)
        if input_name.endswith("_input_ids") and input_name not in (*samples, *_TEXT_INPUTS)
    ]
    if not {*required_parameters(model.forward)} <= {*samples, *_TEXT_INPUTS, *further_texts}:
        return None
    config = model.config
    examples, placeholders = dict(samples), []
    text_count = 2 if all(sample.dims for sample in samples.values()) else 1
    if _takes_text(model, parameters):
        placeholders = placeholder_tokens(
            model, {input_name: sample.tensor for input_name, sample in samples.items()}, text_count
        )
        tokens = token_example(config, sizes, placeholders)
        further = {"attention_mask": _mask_of(tokens), "mm_token_type_ids": _kinds_of(tokens, len(placeholders))}
        examples |= {"input_ids": tokens} | {
            input_name: example for input_name, example in further.items() if input_name in parameters
        }
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        examples["decoder_input_ids"] = decoder_example(config, sizes)
    examples |= {input_name: token_example(config, sizes) for input_name in further_texts}
    if text_count == 1:
        examples |= {
            input_name: _first_row(examples[input_name]) for input_name in examples if input_name not in samples
        }
    inputs = _inputs_of(
        {input_name: examples[input_name] for input_name in parameters if input_name in examples}, parameters
    )
    call = call_with_shapes(model, model, inputs.kwargs)
    if call.succeeded and "input_ids" in examples and not placeholders and len(kinds) == 1:
        inputs = _with_own_number(model, kinds[0], inputs, samples)
    return ModelExample(inputs, None if asks_for_data(call) else call.error)


def _first_row(example: ExampleTensor) -> ExampleTensor:
    return ExampleTensor(example.tensor[:1], {axis: dim for axis, dim in example.dims.items() if axis > 0})


def _kinds_of(tokens: ExampleTensor, placeholder_count: int) -> ExampleTensor:
    """1 for each token that stands for an image, and 0 for others."""
    kinds_bs = torch.zeros_like(tokens.tensor)
    kinds_bs[:, :placeholder_count] = 1
    return ExampleTensor(kinds_bs, tokens.dims)


def _with_own_number(model: Any, kind: str, inputs: Inputs, samples: _Examples) -> Inputs:
    """Let there be another number of images or sounds than of texts, if the model takes them, as CLIP does."""
    fewer = {
        input_name: tensor[:1] if input_name in samples and 0 in samples[input_name].dims else tensor
        for input_name, tensor in inputs.kwargs.items()
    }
    if not call_with_shapes(model, model, fewer).succeeded:
        return inputs
    dynamic_shapes = dict(inputs.dynamic_shapes)
    sample_count = Dim(_OWN_NUMBER[kind], min=1, max=LARGEST_BATCH)
    for input_name in samples:
        dynamic_shapes[input_name] = {axis: sample_count for axis in samples[input_name].dims}
    return replace(inputs, dynamic_shapes=dynamic_shapes)


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
