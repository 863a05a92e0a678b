"""The folder of an adapter of peft and a bundle -> the adapter as a document of the format, bound to the bundle."""

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from msgspec.structs import replace

from stagepack.adapter.document import (
    A_SUFFIX,
    B_SUFFIX,
    BIAS_SUFFIX,
    DOCUMENT_NAME,
    FORMAT,
    TENSORS_NAME,
    AdapterDocument,
    LowRankChange,
)
from stagepack.adapter.names import place_names, weights_by_name
from stagepack.adapter.opened import OpenAdapter, check_shapes, open_adapter
from stagepack.adapter.peft_folder import PeftAdapter, read_peft_folder
from stagepack.adapter.uses import MERGE_ADVICE, find_uses, unused_changes
from stagepack.errors import AdapterError, OutputExistsError, WriteError
from stagepack.format.chunks import file_entry
from stagepack.format.dtypes import TORCH_DTYPES
from stagepack.format.file_writing import FileRange, Piece, synchronize, write_pieces
from stagepack.format.graph import Weight
from stagepack.format.manifest import VERSION
from stagepack.format.manifest_codec import encode_manifest
from stagepack.format.output_file import TemporaryFolder, replace_folder
from stagepack.format.own_folders import check_outside_bundles
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor, TensorSpec, weight_file_header
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
    target = Path(os.path.abspath(out))
    _check_output(target, overwrite=overwrite)
    base = opened(bundle).with_graphs_kept()
    progress("read the adapter")
    source = read_peft_folder(Path(adapter))
    progress("find its weights in the bundle")
    document, tensors = _placed(base, source, os.fspath(adapter))
    progress("write")
    try:
        _write(target, document, source.path, tensors, overwrite=overwrite)
    except OSError as error:
        raise WriteError(f"{out}: could not be written: {error.strerror or error}") from error
    return open_adapter(target)


def _write(
    target: Path, document: AdapterDocument, source: Path, tensors: Mapping[str, StoredTensor], *, overwrite: bool
) -> None:
    """Write both files beside the output, and put the folder in place in one step."""
    specs = [
        TensorSpec(name=name, dtype=TORCH_DTYPES[tensor.dtype], shape=tensor.shape) for name, tensor in tensors.items()
    ]
    with TemporaryFolder(target) as temporary:
        entry = write_pieces(temporary.path / TENSORS_NAME, _pieces(source, specs, tensors))
        (temporary.path / DOCUMENT_NAME).write_bytes(encode_manifest(replace(document, file=entry)))
        for path in (temporary.path / TENSORS_NAME, temporary.path / DOCUMENT_NAME, temporary.path):
            synchronize(path)
        if overwrite and os.path.lexists(target):
            replace_folder(temporary.path, target, temporary.path.parent / "replaced")
        else:
            temporary.path.rename(target)
        synchronize(target.parent)


def _check_output(target: Path, *, overwrite: bool) -> None:
    if os.path.lexists(target):
        if not overwrite:
            raise OutputExistsError(f"{target}: already exists: choose another name, or overwrite it (--overwrite)")
        names = {entry.name for entry in os.scandir(target)} if target.is_dir() and not target.is_symlink() else set()
        if DOCUMENT_NAME not in names or names - {DOCUMENT_NAME, TENSORS_NAME}:
            raise OutputExistsError(f"{target}: exists and is not an adapter of stagepack alone: choose another name")
    check_outside_bundles(target)
    if not target.parent.is_dir():
        raise WriteError(f"{target}: expected the folder {target.parent} to exist")


def _placed(base: Bundle, source: PeftAdapter, name: str) -> tuple[AdapterDocument, dict[str, StoredTensor]]:
    """The document of an adapter, without its file, and its tensors by the names that they get."""
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
        format=FORMAT,
        version=VERSION,
        base=base.digest,
        changes=tuple(changes),
        replaced=tuple(dict.fromkeys(replaced)),
        file=file_entry(TENSORS_NAME, 0, [""]),
        sha256="",
    )
    _check_uses(base, document, tensors, name)
    return document, tensors


def _check_uses(base: Bundle, document: AdapterDocument, tensors: Mapping[str, StoredTensor], name: str) -> None:
    """Check that the graphs use each changed weight in its module, and that the tensors fit."""
    by_module = {change.module: change for change in document.changes}
    graphs = [graph for entry_point in base.entry_points for graph in base.select(entry_point.name).graphs()]
    for module, reason in unused_changes(graphs, by_module).items():
        raise AdapterError(
            f"{name}: {module[:120]}: expected a module that uses its weight, but {reason}: {MERGE_ADVICE}"
        )
    for graph in graphs:
        check_shapes(graph, find_uses(graph, by_module), document, tensors, name)


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


def _pieces(path: Path, specs: list[TensorSpec], tensors: Mapping[str, StoredTensor]) -> Iterator[Piece]:
    header, paddings = weight_file_header(specs)
    yield header
    for tensor, padding in zip(tensors.values(), paddings, strict=True):
        yield bytes(padding)
        yield FileRange(path=path, start=tensor.start, size=tensor.end - tensor.start)
