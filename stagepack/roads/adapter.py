"""The folder of an adapter of peft and a bundle -> the adapter as a document of the format, bound to the bundle."""

import os
from collections.abc import Callable
from pathlib import Path

from stagepack.adapter.document import (
    A_SUFFIX,
    ADAPTER,
    ADAPTER_FORMAT,
    B_SUFFIX,
    BIAS_SUFFIX,
    TENSORS_NAME,
    AdapterDocument,
    LowRankChange,
)
from stagepack.adapter.names import place_names, weights_by_name
from stagepack.adapter.opened import OpenAdapter, check_fits
from stagepack.adapter.peft_folder import PeftAdapter, read_peft_folder
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_checks import checked_path
from stagepack.format.file_writing import FileRange
from stagepack.format.graph import Weight
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest import VERSION
from stagepack.format.manifest_codec import ZERO_DIGEST
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor, TensorSpec
from stagepack.format.writer import BundleWriter
from stagepack.opening import BundleSource, errors_name_bundle, opened


@errors_name_bundle
def write_adapter(
    bundle: BundleSource,
    adapter: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    overwrite: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> OpenAdapter:
    """Write an adapter of peft as an adapter of a bundle. Nothing is captured, and no torch is needed.

    LoRA of linear layers, Conv1D and embeddings is taken as peft saves it, with its scales, biases and replaced modules. Each of its
    tensors must have its place in the bundle. The adapter is bound to this bundle by its digest: `stagepack.load` runs it over any
    placement of the stages.

    Args:
        bundle: the bundle of the model that the adapter was trained on: its folder, its URL, or the opened bundle.
        adapter: the folder that ``save_pretrained`` of peft wrote, with ``adapter_config.json`` and ``adapter_model.safetensors``.
        out: the folder to write.
        overwrite: replace the folder if it is an adapter that stagepack wrote.
        progress: called with the name of each step.

    Returns:
        The adapter that was written.

    Raises:
        AdapterError: the adapter does not fit the bundle, or is no plain LoRA; the message says which tensor, and what to do.
        OptionError: there is no adapter in the folder.
        OutputExistsError, WriteError: the output exists, or cannot be written.
        NotABundleError, FormatError: the bundle is not in order.

    Examples:
        >>> stagepack.write_adapter("llama.stagepack", "./lora-pirate", out="pirate")
        >>> pipe = stagepack.load("llama.stagepack", adapters=["pirate"])
        >>> pipe(input_ids, adapter="pirate")
    """
    with BundleWriter(out, overwrite=overwrite, kind=ADAPTER) as writer:
        base = opened(bundle).with_graphs_kept()
        progress("read the adapter")
        source = read_peft_folder(
            adapter.path if isinstance(adapter, ListedFiles) else checked_path(adapter, "adapter")
        )
        progress("find its weights in the bundle")
        document, tensors = _placed(base, source)
        progress("write")
        specs = [
            TensorSpec(name=name, dtype=TORCH_DTYPES[tensor.dtype], shape=tensor.shape)
            for name, tensor in tensors.items()
        ]
        writer.write_tensors(TENSORS_NAME, specs, lambda name: [_range(source.path, tensors[name])])
        writer.finish(document)
    return OpenAdapter(out)


def _placed(base: Bundle, source: PeftAdapter) -> tuple[AdapterDocument, dict[str, StoredTensor]]:
    """The document of an adapter, without its list of files, and its tensors by the names that they get."""
    name = str(source.path.parent)
    weights = weights_by_name(base)
    weight_of_module = {module: f"{module}.weight" for module in source.changes}
    places = place_names([*weight_of_module.values(), *source.replaced], weights, name)
    changes: list[LowRankChange] = []
    tensors: dict[str, StoredTensor] = {}
    for module, change in source.changes.items():
        placed_name = places[weight_of_module[module]]
        placed_module = placed_name.removesuffix(".weight")
        changes.append(LowRankChange(module=placed_module, weight=weights[placed_name].names[0], scale=change.scale))
        tensors |= {placed_module + A_SUFFIX: change.a, placed_module + B_SUFFIX: change.b}
        if change.bias is not None:
            tensors[placed_module + BIAS_SUFFIX] = change.bias
    replaced = []
    for weight_name, tensor in source.replaced.items():
        weight = weights[places[weight_name]]
        if not _is_equal(base, weight, source.path, tensor):
            replaced.append(weight.names[0])
            tensors[weight.names[0]] = tensor
    document = AdapterDocument(
        format=ADAPTER_FORMAT,
        version=VERSION,
        base=base.digest,
        changes=tuple(changes),
        replaced=tuple(dict.fromkeys(replaced)),
        files=(),
        sha256=ZERO_DIGEST,
    )
    graphs = [graph for entry_point in base.entry_points for graph in base.select(entry_point.name).graphs()]
    check_fits(graphs, document, tensors, name)
    return document, tensors


def _is_equal(base: Bundle, weight: Weight, path: Path, tensor: StoredTensor) -> bool:
    """Whether a tensor has the bytes that a weight has in the bundle: peft saves modules whole that it has not changed."""
    if weight.zeros or weight.base is not None or weight.strides is not None:
        return False
    for entry_point in base.entry_points:
        selected = base.select(entry_point.name)
        for stage_number, graph in enumerate(selected.graphs()):
            if weight not in graph.weights:
                continue
            stored_path, stored = selected.tensors(stage_number, graph)[weight.stored]
            if (stored.dtype, stored.shape) != (tensor.dtype, tensor.shape):
                return False
            base.fetch([stored_path.name])
            return _bytes_of(stored_path, stored) == _bytes_of(path, tensor)
    return False


def _bytes_of(path: Path, tensor: StoredTensor) -> bytes:
    with path.open("rb") as file:
        file.seek(tensor.start)
        return file.read(tensor.end - tensor.start)


def _range(path: Path, tensor: StoredTensor) -> FileRange:
    return FileRange(path=path, start=tensor.start, size=tensor.end - tensor.start)
