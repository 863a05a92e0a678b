"""A bundle and other weights of its model, such as fine-tuned ones -> a bundle with these weights, without a capture.

The new bundle has the graphs, edges and plan of the old one. It records the answer of the new stages to the example.
"""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import torch

from stagepack.capture.checkpoint import CheckpointTensor, DataNeededError, DeferredTensors, read_checkpoint
from stagepack.capture.module_checkpoint import name_problems, shown, tensors_by_weight_name
from stagepack.capture.source import FORWARD
from stagepack.capture.transformers.model_folders import SETTINGS_FILE, is_model_folder, read_adapter
from stagepack.capture.transformers.pretrained_model import load_pretrained, model_files
from stagepack.errors import CaptureError, OptionError
from stagepack.format.graph import Graph, Weight
from stagepack.format.manifest_codec import BUNDLE_FORMAT, other_kind_error
from stagepack.format.own_folders import folder_format
from stagepack.format.reader import Bundle
from stagepack.format.rules import MODEL_CONFIG_NAME
from stagepack.format.writer import Pieces, TensorSource
from stagepack.linearize.captured_example import tensor_source
from stagepack.linearize.program_tensors import dtype_name
from stagepack.linearize.weight_table import is_all_zeros, tensor_bytes
from stagepack.opening import errors_name_bundle, opened
from stagepack.roads.bundle_builder import BundleBuilder
from stagepack.roads.checkpoint_delta import open_checkpoint_delta
from stagepack.roads.stored_bundle import StoredEntryPoint, begin_rewriting, read_entry_points

# Fields of a configuration that change no answer, or only by weights and buffers, which come from the new model.
_NOT_COMPUTING: Final = frozenset(
    (
        "_name_or_path",
        "architectures",
        "dtype",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "max_seq_length",
        "problem_type",
        "rope_theta",
        "transformers_version",
        "use_cache",
    )
)
_NOT_COMPUTING_SUFFIXES: Final = ("dropout", "dropout_prob", "layerdrop", "pdrop")
# Decoders of text take no notice of these; other models find padding or the last token by them.
_TOKENS: Final = frozenset(("bos_token_id", "eos_token_id", "pad_token_id"))
# Settings of a pipeline of sentence-transformers.
_COMPUTING_SETTINGS: Final = frozenset(("modules", "is_normalized"))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """Other weights: their tensors by name, the names that a graph must have, and files such as ``config.json``.

    changes_some: weights that it does not have keep their values.
    version: the name of the version, if it states one.
    """

    tensors: Mapping[str, CheckpointTensor]
    required_names: Collection[str]
    files: Mapping[str, bytes]
    changes_some: bool = False
    version: str = ""


@errors_name_bundle
def replace_weights(
    bundle: str | os.PathLike[str] | Bundle,
    source: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    allow_ops: Collection[str] = (),
    overwrite: bool = False,
    needed_names: Collection[str] | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Bundle:
    """Write a bundle with the graphs of another one and other weights of the same model.

    Names, shapes and dtypes of the weights are compared. Buffers that a checkpoint does not have, and constants, keep the values of
    the bundle. ONNX files belong to the old weights and are left out. The weights are never in memory together.

    needed_names: the weights that the source must have; others may keep the values of the bundle. None for all parameters and buffers.
    """
    old_bundle = opened(bundle)
    progress("check the bundle")
    builder, versions = begin_rewriting(old_bundle, out, overwrite=overwrite)
    progress("read the checkpoint")
    found = find_replacements(old_bundle, source, needed_names)
    builder.files = {**builder.files, **found.files}
    return write_replaced(builder, read_entry_points(old_bundle, versions), found.replacements, allow_ops, progress)


def write_replaced(
    builder: BundleBuilder,
    entry_points: Iterable[StoredEntryPoint],
    replacements: Mapping[str, CheckpointTensor],
    allow_ops: Collection[str],
    progress: Callable[[str], None],
) -> Bundle:
    """Write a bundle with the graphs of another one, and other tensors in the place of some, by their stored names."""
    progress("write")

    def record_example(stored: StoredEntryPoint, draft: Bundle) -> TensorSource:
        progress("run the example")
        return _example_with_new_answer(stored, draft, allow_ops)

    for stored in entry_points:
        graphs = tuple(_with_new_zeros(graph, replacements) for graph in stored.graphs)
        content = replace(replace(stored, graphs=graphs).content, record_example=partial(record_example, stored))
        builder.add(content, _with_replacements(stored.weights, replacements))
    return builder.write()


@dataclass(frozen=True, slots=True, kw_only=True)
class Replacements:
    """New weights of a bundle.

    Attributes:
        source_name: where they come from, for messages.
        weights: the weights of all graphs, by their first names.
        replacements: the new tensor of each stored tensor that is replaced, by stored name.
        files: new files such as ``config.json``.
        version: the name of the new version, if the source states one.
    """

    source_name: str
    weights: Mapping[str, Weight]
    replacements: Mapping[str, CheckpointTensor]
    files: Mapping[str, bytes]
    version: str


def find_replacements(
    bundle: Bundle,
    source: str | os.PathLike[str] | Mapping[str, torch.Tensor],
    needed_names: Collection[str] | None = None,
) -> Replacements:
    """Find the new tensor of each weight of a bundle, in memory or in a checkpoint; no data is read. See `replace_weights`."""
    if not isinstance(source, Mapping | str | os.PathLike):
        found = type(source).__name__
        raise OptionError(
            f"expected tensors by name, such as model.state_dict(), or the path of a checkpoint, found {found}"
        )
    source_name = "the given tensors" if isinstance(source, Mapping) else os.fspath(source)
    weights = _weights_by_name(bundle)
    new_weights = _open_source(bundle, source, weights)
    _check_settings(bundle, new_weights.files, source_name)
    replacements = _replacements(bundle, weights, new_weights, source_name, needed_names)
    return Replacements(
        source_name=source_name,
        weights=weights,
        replacements=replacements,
        files=new_weights.files,
        version=new_weights.version,
    )


def _with_replacements(old_tensors: TensorSource, replacements: Mapping[str, CheckpointTensor]) -> TensorSource:
    def read(stored_name: str) -> Pieces:
        return _pieces(replacements[stored_name]) if stored_name in replacements else old_tensors.read(stored_name)

    return TensorSource(specs=old_tensors.specs, read=read)


def _weights_by_name(bundle: Bundle) -> dict[str, Weight]:
    """The weights of all graphs, by their first names."""
    return {
        weight.names[0]: weight
        for entry_point in bundle.entry_points
        for stage_number in range(len(entry_point.stages))
        for weight in bundle.select(entry_point.name).graph(stage_number).weights
    }


def _open_source(
    bundle: Bundle, source: str | os.PathLike[str] | Mapping[str, torch.Tensor], weights: Mapping[str, Weight]
) -> _Source:
    stated_weights = [weight.names for weight in weights.values() if weight.kind in ("parameter", "buffer")]
    if isinstance(source, Mapping):
        given = {name: _in_memory(name, tensor) for name, tensor in source.items()}
        tensors = tensors_by_weight_name(given, stated_weights, "the given tensors")
        return _Source(tensors=tensors, required_names=tensors.keys(), files={})
    path = Path(source)
    if (found_format := folder_format(path)) not in (None, BUNDLE_FORMAT):  # a bundle is a checkpoint, too
        raise other_kind_error(os.fspath(source), "a checkpoint", found_format)
    if (changes := open_checkpoint_delta(path)) is not None:
        tensors = changes.new_weights(bundle)
        return _Source(
            tensors=tensors,
            required_names=tensors.keys(),
            files={},
            changes_some=True,
            version=str(changes.metadata.version),
        )
    is_pretrained = is_model_folder(path) or read_adapter(os.fspath(source)) is not None
    if path.is_file() or (path.is_dir() and not is_pretrained):
        tensors = tensors_by_weight_name(read_checkpoint(path), stated_weights, os.fspath(source))
        return _Source(tensors=tensors, required_names=tensors.keys(), files={})
    deferred = DeferredTensors()
    try:
        model = load_pretrained(os.fspath(source), deferred)
    except DataNeededError:
        model = load_pretrained(os.fspath(source))
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    model_names = {weight_name: weight_name for weight_name in named}
    # Earlier bundles that generate have `model.` before all names.
    prefixed_names = tensors_by_weight_name(model_names, stated_weights, os.fspath(source))
    if len(prefixed_names) == len(model_names):
        model_names = dict(prefixed_names)
    stored_names = model.state_dict().keys()
    tensors = {
        weight_name: CheckpointTensor(
            dtype=tensor.dtype,
            shape=tuple(tensor.shape),
            read=partial(deferred.real, tensor),
            location=deferred.location(tensor) if tensor.is_contiguous() else None,
        )
        for weight_name, tensor in ((graph_name, named[model_name]) for graph_name, model_name in model_names.items())
    }
    required_names = [graph_name for graph_name, model_name in model_names.items() if model_name in stored_names]
    return _Source(tensors=tensors, required_names=required_names, files=model_files(model))


def _in_memory(name: str, tensor: Any) -> CheckpointTensor:
    """A tensor in memory as one of a checkpoint."""
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout != torch.strided or tensor.is_meta:
        raise CaptureError(
            f"{name}: expected a dense tensor with data, found {type(tensor).__name__}: gather what processes have in parts, as by "
            "full_tensor() of a DTensor"
        )
    return CheckpointTensor(dtype=tensor.dtype, shape=tuple(tensor.shape), read=lambda: tensor.detach().cpu())


def _check_settings(bundle: Bundle, files: Mapping[str, bytes], source_name: str) -> None:
    """Refuse a model that computes otherwise than the graphs, by what the configurations of both state."""
    problems = []
    for file_name in sorted(files.keys() & bundle.files.keys() & {MODEL_CONFIG_NAME, SETTINGS_FILE}):
        settings, graph_settings = (
            dict(_flat_settings(json.loads(content))) for content in (files[file_name], bundle.read(file_name))
        )
        is_pipeline = file_name == SETTINGS_FILE
        if is_pipeline and not any(path[0] == "modules" for path in graph_settings):
            continue  # of an earlier version, which did not state them
        class_names = [value for path, value in settings.items() if path[0] == "architectures"]
        is_decoder = bool(class_names) and all(str(name).endswith("ForCausalLM") for name in class_names)
        harmless = _NOT_COMPUTING | (_TOKENS if is_decoder else frozenset())
        problems += [
            f"{'.'.join(path)} is {json.dumps(settings.get(path))} in its {file_name}, in the bundle {json.dumps(graph_settings.get(path))}"
            for path in sorted(settings.keys() | graph_settings.keys())
            if settings.get(path) != graph_settings.get(path)
            and not (harmless.intersection(path) or path[-1].endswith(_NOT_COMPUTING_SUFFIXES))
            and (not is_pipeline or path[0] in _COMPUTING_SETTINGS)
        ]
    if problems:
        raise CaptureError(
            f"{source_name}: computes otherwise than the graphs of {bundle.path}: {shown(problems, '; ')}: export it by a capture"
        )


def _flat_settings(settings: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The values of nested settings with their paths."""
    if isinstance(settings, dict | list):
        for key, part in settings.items() if isinstance(settings, dict) else enumerate(settings):
            yield from _flat_settings(part, (*path, str(key)))
    else:
        yield path, settings


def _replacements(
    bundle: Bundle,
    weights: Mapping[str, Weight],
    source: _Source,
    source_name: str,
    needed_names: Collection[str] | None,
) -> dict[str, CheckpointTensor]:
    """The new tensor of each stored tensor that is replaced, by stored name."""
    known_names = {weight_name for weight in weights.values() for weight_name in weight.names}
    # Entry points that are functions of a model do not have the weights that no function uses.
    is_whole = any(entry_point.name == FORWARD for entry_point in bundle.entry_points)
    required_names = source.required_names if is_whole else ()
    unknown = [weight_name for weight_name in required_names if weight_name not in known_names]
    missing: list[str] = []
    differences: list[str] = []
    replacements: dict[str, CheckpointTensor] = {}
    for weight in weights.values():
        candidates = [weight_name for weight_name in weight.names if weight_name in source.tensors]
        if not candidates:
            is_needed = needed_names is None or not set(weight.names).isdisjoint(needed_names)
            if is_needed and not source.changes_some and weight.kind in ("parameter", "buffer"):
                missing.append(weight.names[0])
            continue
        tensor = source.tensors[candidates[0]]
        found, expected = (dtype_name(tensor.dtype), tensor.shape), (weight.dtype, weight.shape)
        if found != expected:
            differences.append(f"{candidates[0]} is {_described(*found)}, in the graph {_described(*expected)}")
        elif any(not _is_equal(tensor, source.tensors[tied_name]) for tied_name in candidates[1:]):
            differences.append(f"{' and '.join(candidates)} are one weight in the graph, and differ")
        elif weight.base is not None or (weight.kind == "constant"):
            differences.append(f"{candidates[0]} shares memory with other weights in the graph")
        else:
            replacements[weight.stored] = tensor
    problems = name_problems(missing, unknown, "the graph") + ([shown(differences, "; ")] if differences else [])
    if problems:
        raise CaptureError(
            f"{source_name}: does not fit the graph of {bundle.path}: {'; '.join(problems)}: export it by a capture"
        )
    return replacements


def _described(dtype: str, shape: Sequence[int]) -> str:
    return f"{dtype}[{', '.join(map(str, shape))}]"


def _is_equal(tensor: CheckpointTensor, other: CheckpointTensor) -> bool:
    if tensor.location is not None and tensor.location == other.location:
        return True
    if (tensor.dtype, tensor.shape) != (other.dtype, other.shape):
        return False
    return bytes(octets(tensor)) == bytes(octets(other))


def octets(tensor: CheckpointTensor) -> memoryview:
    """Read the bytes of a tensor, in the order of its dimensions."""
    return tensor_bytes(tensor.read().contiguous())


def _pieces(tensor: CheckpointTensor) -> Pieces:
    return [octets(tensor)] if tensor.location is None else [tensor.location]


def _with_new_zeros(graph: Graph, replacements: Mapping[str, CheckpointTensor]) -> Graph:
    """The graph, whose buffers of zeros are stored if they are no zeros any more."""

    def is_zero(weight: Weight) -> bool:
        tensor = replacements.get(weight.stored)
        return weight.zeros and (tensor is None or is_all_zeros(tensor.read().contiguous()))

    return msgspec.structs.replace(
        graph, weights=tuple(msgspec.structs.replace(weight, zeros=is_zero(weight)) for weight in graph.weights)
    )


def _example_with_new_answer(stored: StoredEntryPoint, draft: Bundle, allow_ops: Collection[str]) -> TensorSource:
    """The example of a bundle with the answer of the stages with the new weights, whose sizes may depend on these."""
    from stagepack_loaders.example import read_example, run_on_inputs  # noqa: PLC0415 - only this step runs stages
    from stagepack_loaders.load import load  # noqa: PLC0415 - the same

    example = stored.example
    if not example.specs:
        return example
    pipeline = load(draft, allow_ops=allow_ops, verify="manifest")
    inputs, _ = read_example(pipeline, stored.bundle)
    answer = tensor_source(run_on_inputs(pipeline, inputs))
    return TensorSource(
        specs={**example.specs, **answer.specs},
        read=lambda stored_name: (answer if stored_name in answer.specs else example).read(stored_name),
    )
