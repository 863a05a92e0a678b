"""A Hugging Face folder or hub name -> a captured model. transformers is imported when it is needed, not before."""

import importlib
import inspect
import itertools
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch.export import Dim
from torch.utils import _pytree as pytree

from stagepack.capture.module_calls import TracedCalls
from stagepack.capture.module_state import preserve_module
from stagepack.capture.programs import (
    Capture,
    Inputs,
    capture_module,
    format_torch_error,
    run_model,
    suppress_stderr,
)
from stagepack.errors import CaptureError
from stagepack.format.weights import ALIGNMENT

_PLAIN = "torch.export.export"
_PATCHED = "transformers.exporters.DynamoExporter"
_LONGEST = 4096  # of a sequence, where the configuration names no length


def capture_pretrained(source: str, inputs: Inputs) -> Capture:
    """Load a model by its folder or hub name and capture it.

    First by ``torch.export.export`` as it stands, if the program answers bit for bit as the model does; else by transformers' own
    exporter, which patches what plain export cannot trace. `Capture.method` says which. Without `inputs`, an example
    with dynamic batch and sequence is made up for the kind of model; where neither way keeps both dynamic, torch decides which
    sizes are.

    Raises:
        CaptureError: transformers is not installed, there is no such model, no example can be made up, or neither way works.
    """
    model = _load(source)
    if inputs.args or inputs.kwargs:
        examples = [inputs]
    else:
        made = example_inputs(model)
        examples = [made, replace(made, dynamic_shapes=_left_to_torch(made.dynamic_shapes))]
    reasons = []
    for example, method in itertools.product(examples, (_PLAIN, _PATCHED)):
        try:
            return _capture(model, example, method)
        except CaptureError as error:
            reasons.append(f"{method}: {error}")
    raise CaptureError(f"{source}: {'; '.join(dict.fromkeys(reasons))}")


def capture_transformers(model: torch.nn.Module, inputs: Inputs) -> Capture:
    """Capture a model of transformers: by ``torch.export.export`` as it stands, or where that fails by transformers' own exporter.

    Raises:
        CaptureError: neither way works; the message has both reasons.
    """
    try:
        return capture_module(model, inputs)
    except CaptureError as error:
        reason = error
    try:
        return _capture(model, inputs, _PATCHED)
    except CaptureError as error:
        raise CaptureError(f"{reason}; {_PATCHED}: {error}") from error


def is_of_transformers(model: object) -> bool:
    """Whether a module is a model of transformers, which is not imported to find out."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def model_files(model: Any) -> dict[str, bytes]:
    """The configuration files with which stock ``from_pretrained`` opens a bundle; none for a model that is not of transformers."""
    if not is_of_transformers(model):
        return {}
    fields = {
        **model.config.to_diff_dict(),
        "architectures": [type(model).__name__],
        "model_type": model.config.model_type,
    }
    fields["dtype"] = str(model.dtype).removeprefix("torch.")
    files = {"config.json": _json(fields)}
    if model.can_generate():
        files["generation_config.json"] = _json(model.generation_config.to_diff_dict())
    return files


def example_inputs(model: Any) -> Inputs:
    """An example for the kind of model: what it takes, and which sizes may change.

    Raises:
        CaptureError: the kind is not known.
    """
    config, name = model.config, model.main_input_name
    batch, sequence = Dim("batch", min=1, max=1024), Dim("sequence", min=2, max=_longest(config))
    tokens = {0: batch, 1: sequence}
    takes = inspect.signature(model.forward).parameters
    plain = {"use_cache": False} if "use_cache" in takes else {}
    if name == "input_ids" and not config.is_encoder_decoder:
        given = {"input_ids": _ids(config, 2, 8)}
        if "attention_mask" in takes:
            given["attention_mask"] = torch.ones_like(given["input_ids"])
        return Inputs(kwargs={**given, **plain}, dynamic_shapes=dict.fromkeys(given, tokens))
    if config.is_encoder_decoder and "decoder_input_ids" in takes:
        decoded = {0: batch, 1: Dim("decoded", min=2, max=_longest(config))}
        first, dims = (_ids(config, 2, 8), tokens) if name == "input_ids" else (_features(model), {0: batch})
        return Inputs(
            kwargs={name: first, "decoder_input_ids": _ids(config, 2, 6), **plain},
            dynamic_shapes={name: dims, "decoder_input_ids": decoded},
        )
    if name == "pixel_values":
        size = getattr(config, "image_size", 224) or 224
        height, width = (size, size) if isinstance(size, int) else size
        pixels = torch.rand(2, getattr(config, "num_channels", 3), height, width)
        return Inputs(kwargs={name: pixels, **plain}, dynamic_shapes={name: {0: batch}})
    raise CaptureError(
        f"{type(model).__name__} takes {name!r}, for which no example is known: pass --inputs FILE.py:FUNCTION"
    )


def _load(source: str) -> Any:
    """The model of a folder or a hub name, in evaluation mode, by the class that its configuration names."""
    transformers = _transformers()
    if os.path.isdir(source) and not os.path.isfile(os.path.join(source, "config.json")):
        raise CaptureError(f"{source}: expected a Hugging Face folder with a config.json")
    if not os.path.isdir(source) and (
        os.path.sep * 2 in source or source.startswith((".", "/")) or source.count("/") > 1
    ):
        raise CaptureError(f"{source}: no such folder; expected a folder, a hub name, a .pt2 file or file.py:factory")
    bars = transformers.utils.logging.is_progress_bar_enabled()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(source)
        names = getattr(config, "architectures", None) or []
        cls = getattr(transformers, names[0], transformers.AutoModel) if names else transformers.AutoModel
        model = cls.from_pretrained(source).eval()
    except (OSError, ValueError, KeyError) as error:
        raise CaptureError(f"{source}: transformers cannot load it: {format_torch_error(error)}") from error
    finally:
        if bars:
            transformers.utils.logging.enable_progress_bar()
    _align(model)
    return model


def _align(model: torch.nn.Module) -> None:
    """Move weights that do not begin on a multiple of 64 bytes, as in a mapped file, to memory that does.

    Some kernels add in another order on such memory (seen: a matrix times one row on the CPU), so the model would differ from
    every loaded bundle in the last bit.
    """
    moved: dict[int, torch.Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.data_ptr() % ALIGNMENT:
            tensor.data = moved.setdefault(tensor.data_ptr(), tensor.data.clone())


def _transformers() -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise CaptureError("a Hugging Face model needs transformers: pip install 'stagepack[hf]'") from None


def _capture(model: Any, inputs: Inputs, method: str) -> Capture:
    capture = capture_module(model, inputs) if method == _PLAIN else _capture_patched(model, inputs)
    if not _answers_alike(capture):
        raise CaptureError("the program's answer differs from the model's")
    return replace(capture, method=method)


def _capture_patched(model: Any, inputs: Inputs) -> Capture:
    """Capture by transformers' exporter. Constants are gone from its call, so they are no inputs of the program."""
    exporters = importlib.import_module("transformers.exporters.exporter_dynamo")
    kwargs = {**inspect.signature(model.forward).bind_partial(*inputs.args).arguments, **inputs.kwargs}
    kept = {name: given for name, given in kwargs.items() if not isinstance(given, bool | int | float | str | None)}
    shapes = inputs.dynamic_shapes
    if isinstance(shapes, Mapping):
        shapes = {name: shapes.get(name) for name in kept}
    calls = TracedCalls()
    config = exporters.DynamoConfig(dynamic=shapes is not None, dynamic_shapes=shapes)
    try:
        with preserve_module(model), suppress_stderr(), calls.recorded():
            program = exporters.DynamoExporter().export_program(model, dict(kwargs), config)[0]
    except Exception as error:
        raise CaptureError(format_torch_error(error)) from error
    return Capture(program=program, inputs=Inputs(kwargs=kept, dynamic_shapes=shapes), model=model, calls=calls)


def _left_to_torch(shapes: Any) -> Any:
    """Dynamic shapes with ``Dim.AUTO`` in the place of named dimensions."""
    return {name: dict.fromkeys(dims, Dim.AUTO) for name, dims in shapes.items()}


def _answers_alike(capture: Capture) -> bool:
    """Whether the program gives on the example what the model gives, bit for bit."""
    assert capture.model is not None
    answers = [
        pytree.tree_leaves(run_model(run, capture.inputs, seed=0)) for run in (capture.model, capture.program.module())
    ]
    return len(answers[0]) == len(answers[1]) and all(map(_same, *answers))


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)
        )
    return type(one) is type(other) and bool(one == other)


def _longest(config: Any) -> int:
    """The longest sequence that the configuration allows."""
    text = config.get_text_config()
    for name in ("max_position_embeddings", "n_positions", "max_target_positions"):
        length = getattr(text, name, None)
        if isinstance(length, int) and length > 2:
            return length
    return _LONGEST


def _ids(config: Any, *shape: int) -> torch.Tensor:
    words: int = getattr(config.get_text_config(), "vocab_size", 128)
    return (torch.arange(math.prod(shape)) * 7 + 5).reshape(shape) % words


def _features(model: Any) -> torch.Tensor:
    """Audio features of the length that the encoder of a Whisper takes: ``[2, mel bins, frames]``."""
    config = model.config
    if not hasattr(config, "num_mel_bins") or not hasattr(config, "max_source_positions"):
        raise CaptureError(f"{type(model).__name__}: no example is known: pass --inputs FILE.py:FUNCTION")
    return torch.rand(2, config.num_mel_bins, config.max_source_positions * 2)


def _json(fields: Mapping[str, Any]) -> bytes:
    kept = {name: value for name, value in fields.items() if name != "_name_or_path"}
    return json.dumps(kept, indent=2, sort_keys=True, default=str, ensure_ascii=False).encode() + b"\n"
