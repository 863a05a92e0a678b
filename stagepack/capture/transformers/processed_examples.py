"""What the processors of a model of transformers make of images and sounds: the names and the shapes of the inputs of the model.

A processor is read from the folder of the model, or is the one of its family with the sizes that the model's configuration states. Only its
shapes and whole numbers are used: pixels depend on the library that scales images.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from stagepack.capture.imports import import_transformers, quiet_libraries
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.capture.transformers.example_tensors import ExampleSizes, ExampleTensor, configured, random_tensor

_FOLDER_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_AUTO_CLASSES: Final = {"image": "AutoImageProcessor", "video": "AutoVideoProcessor", "audio": "AutoFeatureExtractor"}
_FAMILIES: Final = {
    "image": ("image_processing_auto", "IMAGE_PROCESSOR_MAPPING"),
    "video": ("video_processing_auto", "VIDEO_PROCESSOR_MAPPING"),
    "audio": ("feature_extraction_auto", "FEATURE_EXTRACTOR_MAPPING"),
}
# Settings of a processor, and the fields of configurations that are the same.
_SETTINGS: Final = {
    "patch_size": ("patch_size",),
    "temporal_patch_size": ("temporal_patch_size",),
    "merge_size": ("spatial_merge_size",),
    "feature_size": ("num_mel_bins", "input_feat_per_channel", "feature_size"),
    "num_mel_bins": ("num_mel_bins",),
    "sampling_rate": ("sampling_rate",),
}
# What a processor calls an input, and the other names of models for it. Where a model has both, its attention mask belongs to its text.
_OTHER_NAMES: Final = {
    "pixel_values": ("hidden_states", "image_pixel_values", "pixel_values_images"),
    "image_grid_thw": ("grid_thw",),
    "image_position_ids": ("pixel_position_ids",),
    "input_features": ("audio_mel",),
    "input_features_mask": ("audio_mel_mask",),
    "attention_mask": ("input_features_mask", "padding_mask", "feature_attention_mask"),
}
# How a processor takes the images of samples: an image a sample, or a list of one image, or of a pair.
_IMAGE_FORMS: Final = (
    lambda images: [[image] for image in images],
    lambda images: images,
    lambda images: [[image, image] for image in images],
)
_IMAGE_HWC: Final = (48, 64, 3)
_FRAME_COUNT: Final = 8


def folder_processor(kind: str, folder: str | None) -> Any:
    """Return the processor that is in the folder of a model, for images, videos or audio; None if there is none."""
    if (
        kind not in _AUTO_CLASSES
        or folder is None
        or not any(os.path.isfile(os.path.join(folder, processed_name)) for processed_name in _FOLDER_FILES)
    ):
        return None
    auto_class = getattr(import_transformers(), _AUTO_CLASSES[kind])
    return _result_of(lambda: auto_class.from_pretrained(folder))


def family_processor(kind: str, config: Any) -> Any:
    """Return the processor of a family of models, with the sizes of a configuration; None if it has none, or it cannot be made here."""
    if kind not in _FAMILIES:
        return None
    module_name, mapping_name = _FAMILIES[kind]
    transformers = import_transformers()
    mapping = getattr(getattr(transformers.models.auto, module_name), mapping_name)
    for config_class in (type(config), *_owning_classes(type(config))):
        classes = _result_of(partial(mapping.__getitem__, config_class))
        if isinstance(classes, Mapping):
            classes = tuple(classes.values())
        for processor_class in classes if isinstance(classes, tuple | list) else (classes,):
            processor = _result_of(processor_class) if processor_class is not None else None
            if processor is not None:
                return _fitted(processor, config)
    return None


def _owning_classes(config_class: type) -> Iterator[type]:
    """Yield the configurations of the same family that have one of this class inside: an encoder has the processor of its family."""
    for value in vars(sys.modules[config_class.__module__]).values():
        if isinstance(value, type) and config_class in getattr(value, "sub_configs", {}).values():
            yield value


def processed_examples(
    processor: Any, kind: str, model: Any, sizes: ExampleSizes, parameters: Mapping[str, Any]
) -> dict[str, ExampleTensor]:
    """Return what a processor makes of two samples, under the names of the model's inputs; nothing if it fails.

    If it packs samples, such as the patches of all images, into one dimension, it gets one, and no dimension is dynamic.
    """
    if processor is None:
        return {}
    of_one, of_two = _processed_one_and_two(processor, kind)
    values_of_name = {
        own: (of_one[processed_name], of_two[processed_name])
        for processed_name in of_two
        if (
            own := next(
                (own for own in (*_OTHER_NAMES.get(processed_name, ()), processed_name) if own in parameters), None
            )
        )
        is not None
        and isinstance(of_one.get(processed_name), torch.Tensor)
        and isinstance(of_two[processed_name], torch.Tensor)
    }
    is_packed = any(of_one.shape[:1] != (1,) or of_two.shape[:1] != (2,) for of_one, of_two in values_of_name.values())
    examples: dict[str, ExampleTensor] = {}
    for own_name, values in values_of_name.items():
        value = values[0 if is_packed else 1]
        tensor = random_tensor(model.dtype, *value.shape) if value.is_floating_point() else value
        examples[own_name] = ExampleTensor(tensor, {} if is_packed else {0: sizes.batch})
    return examples


def _processed_one_and_two(processor: Any, kind: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """What a processor makes of one sample and of two; nothing if it fails, or makes something else than named inputs."""
    for image_form in _IMAGE_FORMS if kind == "image" else (None,):
        of_one, of_two = (_result_of(partial(_processed, processor, kind, count, image_form)) for count in (1, 2))
        if isinstance(of_one, Mapping) and isinstance(of_two, Mapping):
            return of_one, of_two
    return {}, {}


def _processed(processor: Any, kind: str, count: int, image_form: Callable[[Any], Any] | None = None) -> Any:
    random_numbers = np.random.default_rng(0)
    if kind == "audio":
        waves = [random_numbers.standard_normal(processor.sampling_rate).astype(np.float32) for _ in range(count)]
        # Some have a rate, and a mask that they return if asked. No padding where there is a choice, as a batch of equal sounds.
        for options in (
            {"sampling_rate": processor.sampling_rate, "return_attention_mask": True},
            {"sampling_rate": processor.sampling_rate},
        ):
            with contextlib.suppress(TypeError):
                return processor(waves, **options, return_tensors="pt")
        return processor(waves, return_tensors="pt")
    images = [random_numbers.integers(0, 256, _IMAGE_HWC, dtype=np.uint8) for _ in range(count)]
    if image_form is not None:
        return processor(images=image_form(images), return_tensors="pt")
    return processor(videos=[np.stack([image] * _FRAME_COUNT) for image in images], return_tensors="pt")


def _fitted(processor: Any, config: Any) -> Any:
    """A processor with the sizes of a configuration."""
    settings = {
        setting: value
        for setting, field_names in _SETTINGS.items()
        if isinstance(value := configured(config, *field_names), int)
        and isinstance(current := getattr(processor, setting, None), int)
        and value != current
    }
    if settings:
        # Made anew: filters of mel bins are computed when an extractor is made.
        processor_class: Callable[..., Any] = type(processor)
        processor = _result_of(partial(processor_class, **settings)) or processor
        for setting, value in settings.items():
            setattr(processor, setting, value)
    size = configured(config, "image_size")
    if isinstance(size, int):
        for setting in ("size", "crop_size"):
            value = getattr(processor, setting, None)
            if value is not None and set(dict(value)) >= {"height", "width"}:
                setattr(processor, setting, {"height": size, "width": size})
    return processor


def _result_of(make: Callable[[], Any]) -> Any:
    """What a function of transformers returns; None if it fails, such as for a package that is not installed."""
    with quiet_libraries(), suppress_warnings(), contextlib.suppress(Exception):
        return make()
    return None
