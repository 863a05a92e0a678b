"""What the processors of a model of transformers make of images and sounds: the names and the shapes of the inputs of the model.

A processor is read from the folder of the model, or is the one of its family with the sizes that the model's configuration states. Only
its shapes and whole numbers are used: pixels depend on the library that scales images.
"""

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

import numpy as np
import torch

from stagepack.capture.example_tensors import ExampleSizes, ExampleTensor, configured, random_tensor
from stagepack.capture.torch_messages import suppress_warnings
from stagepack.capture.transformers_package import import_transformers, quiet_libraries

_FOLDER_FILES: Final = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
_AUTO_CLASSES: Final = {
    "image": "AutoImageProcessor",
    "video": "AutoVideoProcessor",
    "audio": "AutoFeatureExtractor",
}
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
# What a processor calls an input, and models that take it by another name.
_OTHER_NAMES: Final = {
    "pixel_values": ("hidden_states", "image_pixel_values", "pixel_values_images"),
    "image_grid_thw": ("grid_thw",),
    "attention_mask": ("input_features_mask", "padding_mask", "feature_attention_mask"),
}
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
    classes = _result_of(lambda: mapping[type(config)])
    if isinstance(classes, Mapping):
        classes = tuple(classes.values())
    for processor_class in classes if isinstance(classes, tuple | list) else (classes,):
        processor = _result_of(processor_class) if processor_class is not None else None
        if processor is not None:
            _fit(processor, config)
            return processor
    return None


def processed_examples(
    processor: Any, kind: str, model: Any, sizes: ExampleSizes, parameters: Mapping[str, Any]
) -> dict[str, ExampleTensor]:
    """Return what a processor makes of two samples; or of one, if it packs samples, such as the patches of all images, into one dimension.

    Args:
        processor: the processor, or None.
        kind: image, video or audio.
        model: the model.
        sizes: its dynamic sizes.
        parameters: the names of its inputs.

    Returns:
        The examples that the model takes, under its own names; nothing if the processor fails. Those of packed samples have no dynamic
        dimensions.
    """
    if processor is None:
        return {}
    of_one, of_two = (_result_of(partial(_processed, processor, kind, count)) or {} for count in (1, 2))
    values_of_name = {
        own: (of_one[processed_name], of_two[processed_name])
        for processed_name in of_two
        if (
            own := next(
                (own for own in (processed_name, *_OTHER_NAMES.get(processed_name, ())) if own in parameters), None
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


def _processed(processor: Any, kind: str, count: int) -> Any:
    random_numbers = np.random.default_rng(0)
    if kind == "audio":
        waves = [random_numbers.standard_normal(processor.sampling_rate).astype(np.float32) for _ in range(count)]
        with contextlib.suppress(TypeError):
            # Without padding where the processor has a choice, as a batch of equal sounds.
            return processor(waves, sampling_rate=processor.sampling_rate, return_tensors="pt")
        return processor(waves, return_tensors="pt")
    images = [random_numbers.integers(0, 256, _IMAGE_HWC, dtype=np.uint8) for _ in range(count)]
    if kind == "image":
        # Some processors take a list of images for one sample of several.
        nested = _result_of(lambda: processor(images=[[image] for image in images], return_tensors="pt"))
        return processor(images=images, return_tensors="pt") if nested is None else nested
    return processor(videos=[np.stack([image] * _FRAME_COUNT) for image in images], return_tensors="pt")


def _fit(processor: Any, config: Any) -> None:
    """Give a processor the sizes of a configuration."""
    for setting, field_names in _SETTINGS.items():
        value = configured(config, *field_names)
        if isinstance(value, int) and isinstance(getattr(processor, setting, None), int):
            setattr(processor, setting, value)
    size = configured(config, "image_size")
    if isinstance(size, int):
        for setting in ("size", "crop_size"):
            value = getattr(processor, setting, None)
            if value is not None and set(dict(value)) >= {"height", "width"}:
                setattr(processor, setting, {"height": size, "width": size})


def _result_of(make: Callable[[], Any]) -> Any:
    """What a function of transformers returns; None if it fails, such as for a package that is not installed."""
    with quiet_libraries(), suppress_warnings(), contextlib.suppress(Exception):
        return make()
    return None
