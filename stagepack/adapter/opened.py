"""An adapter that is opened: its document and where its tensors are, checked against each other and against a bundle."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stagepack.adapter.document import (
    A_SUFFIX,
    ADAPTER,
    B_SUFFIX,
    BIAS_SUFFIX,
    DOCUMENT_NAME,
    FLOATS,
    AdapterDocument,
    LowRankChange,
)
from stagepack.adapter.rewrite import Pair
from stagepack.adapter.uses import Use
from stagepack.errors import AdapterError, NotABundleError
from stagepack.format import limits
from stagepack.format.file_checks import check_digests, near_path_hint, open_plain_file, read_limited
from stagepack.format.graph import Graph
from stagepack.format.manifest_codec import parse_document
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems, rule_error
from stagepack.format.weights import StoredTensor, parse_header_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAdapter:
    """An adapter of a bundle.

    Attributes:
        path: its folder.
        document: what it changes.
        tensors: the positions of its tensors in its file, by name.
    """

    path: Path
    document: AdapterDocument
    tensors: Mapping[str, StoredTensor]

    @property
    def changes(self) -> dict[str, LowRankChange]:
        """The low-rank changes, by the path of the module."""
        return {change.module: change for change in self.document.changes}

    @property
    def pairs(self) -> dict[str, Pair]:
        """What the tensors of each change are like."""
        return {
            module: Pair(self.tensors[module + A_SUFFIX].shape[0], module + BIAS_SUFFIX in self.tensors)
            for module in self.changes
        }

    def verify(self) -> None:
        """Compare the file of the tensors with its digest."""
        raise_problems(check_digests(self.path, [self.document.file]))

    def check_base(self, bundle: Bundle) -> None:
        """Refuse a bundle that the adapter was not made for."""
        if self.document.base != bundle.digest:
            raise AdapterError(
                f"{self.path}: is an adapter of the bundle {self.document.base[:12]}, found {bundle.digest[:12]}: make it for this bundle "
                "(stagepack adapter)"
            )


def open_adapter(path: str | os.PathLike[str]) -> OpenAdapter:
    """Open an adapter that `write_adapter` wrote. Its document and the header of its tensors are read and checked."""
    folder = Path(path)
    try:
        content = read_limited(folder / DOCUMENT_NAME, limits.MANIFEST_BYTES)
    except OSError as error:
        hint = near_path_hint(folder, f"*/{DOCUMENT_NAME}")
        is_peft = (folder / "adapter_config.json").exists()
        advice = ": write it by stagepack adapter, which takes this folder of peft" if is_peft else hint
        raise NotABundleError(
            f"{folder}: not an adapter of stagepack: expected a folder with a file {DOCUMENT_NAME}: {error.strerror}{advice} [A1]"
        ) from None
    document = parse_document(content, str(folder / DOCUMENT_NAME), ADAPTER)
    with open_plain_file(folder, document.file) as file:
        tensors = parse_header_bytes(file.read, document.file.size, document.file.name)
    _check_tensors(document, tensors)
    return OpenAdapter(path=folder, document=document, tensors=tensors)


def _check_tensors(document: AdapterDocument, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the tensors of an adapter with its document (A3, A5)."""
    where = document.file.name
    optional = {change.module + BIAS_SUFFIX for change in document.changes}
    needed = {change.module + suffix for change in document.changes for suffix in (A_SUFFIX, B_SUFFIX)}
    needed |= set(document.replaced)
    if missing := sorted(needed - tensors.keys()):
        raise rule_error("A3", where, f"lacks the tensors {', '.join(name[:80] for name in missing[:5])}")
    if unknown := sorted(tensors.keys() - needed - optional):
        raise rule_error("A3", where, f"has tensors of no change: {', '.join(name[:80] for name in unknown[:5])}")
    for name, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise rule_error("A5", where, f"{name[:80]}: expected floats, found {tensor.dtype}")
    for change in document.changes:
        a, b = (tensors[change.module + suffix].shape for suffix in (A_SUFFIX, B_SUFFIX))
        bias = tensors.get(change.module + BIAS_SUFFIX)
        is_pair = len(a) == len(b) == 2 and a[0] == b[1] >= 1
        if not is_pair or (bias is not None and bias.shape != (b[0],)):
            raise rule_error(
                "A5",
                where,
                f"{change.module[:80]}: expected lora_A [rank, in] and lora_B [out, rank], found {a} and {b}",
            )


def check_shapes(
    graph: Graph, uses: Iterable[Use], document: AdapterDocument, tensors: Mapping[str, StoredTensor], name: str
) -> None:
    """Compare the tensors of an adapter with the weights of a graph that they change; `uses` are those of its changes."""
    for use in uses:
        module = use.change.module
        a, b = (tensors[module + suffix].shape for suffix in (A_SUFFIX, B_SUFFIX))
        if (a[1], b[0]) != use.sizes:
            size_in, size_out = use.sizes
            raise AdapterError(
                f"{name}: {module[:120]}: expected lora_A [rank, {size_in}] and lora_B [{size_out}, rank], found {list(a)} and {list(b)}"
            )
        bias = tensors.get(module + BIAS_SUFFIX)
        if bias is not None and (use.kind == "embedding" or bias.shape != (use.sizes[1],)):
            raise AdapterError(
                f"{name}: {module[:120]}: expected a bias of {use.sizes[1]} numbers, found {list(bias.shape)}"
            )
    for weight in graph.weights:
        tensor = tensors.get(weight.names[0]) if weight.names[0] in document.replaced else None
        if tensor is not None and (tensor.shape != weight.shape or weight.base is not None):
            raise AdapterError(
                f"{name}: {weight.names[0][:120]}: expected the shape {list(weight.shape)}, found {list(tensor.shape)}"
            )
