"""An open adapter: its document, and where its tensors are, checked against each other and against a bundle."""

import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from stagepack.adapter.document import (
    A_SUFFIX,
    ADAPTER,
    B_SUFFIX,
    BIAS_SUFFIX,
    FLOATS,
    TENSORS_NAME,
    AdapterDocument,
    LowRankChange,
)
from stagepack.errors import AdapterError
from stagepack.format.bundle_files import read_document
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import File
from stagepack.format.file_source import FileSource
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest_codec import parse_document
from stagepack.format.reader import Bundle
from stagepack.format.rules import MANIFEST_NAME, raise_problems, rule_error
from stagepack.format.weights import StoredTensor

if TYPE_CHECKING:
    from stagepack.adapter.rewrite import Pair
    from stagepack.adapter.uses import Use
    from stagepack.format.graph import Graph


class OpenAdapter(ListedFiles):
    """An open adapter: what changes weights of one bundle, its base.

    ``stagepack.open_adapter`` returns it. It imports no torch and needs no `close`. Only the document is read when it is opened.

    Attributes:
        document: the checked document.

    Raises:
        NotABundleError: there is no adapter at the path.
        VersionError: the adapter is of a newer major version or needs an unknown feature.
        DigestError: the document was changed after it was written.
        LimitError, FormatError: the document breaks a rule.

    Examples:
        >>> adapter = stagepack.open_adapter("pirate")
        >>> adapter.base, sorted(adapter.changes)
    """

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        super().__init__(path, source=source)
        content = read_document(self.path, "adapter")
        self.document = parse_document(content, str(self.path / MANIFEST_NAME), ADAPTER)

    def __repr__(self) -> str:
        """The folder or URL, and the base."""
        return f"<Adapter {self.location!r} of {self.base[:12]}>"

    @property
    def document_format(self) -> str:
        """See `ListedFiles`."""
        return self.document.format

    @property
    def listed(self) -> Sequence[File]:
        """See `ListedFiles`."""
        return self.document.files

    @property
    def digest(self) -> str:
        """The SHA-256 of the document in hexadecimal. It identifies the adapter."""
        return self.document.sha256

    @property
    def base(self) -> str:
        """The digest of the bundle that the adapter was made for."""
        return self.document.base

    @cached_property
    def changes(self) -> dict[str, LowRankChange]:
        """The low-rank changes, by the path of the module."""
        return {change.module: change for change in self.document.changes}

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """The positions of its tensors in its file, by name.

        Raises:
            DigestError, FormatError, RemoteError: the file is missing or has another size, or its header breaks a rule.
        """
        [(_, tensors)] = self.read_headers([TENSORS_NAME])
        check_tensors(self.document, tensors)
        return tensors

    @cached_property
    def pairs(self) -> "dict[str, Pair]":
        """What the tensors of each change are like."""
        from stagepack.adapter.rewrite import Pair  # noqa: PLC0415 - what changes graphs, which opening an adapter does not need

        return {
            module: Pair(self.tensors[module + A_SUFFIX].shape[0], module + BIAS_SUFFIX in self.tensors)
            for module in self.changes
        }

    def verify(self, progress: ByteProgress | None = None, *, strict: bool = False) -> None:
        """Check the digest of every file and every rule that needs no base. Reads the whole adapter.

        Args:
            progress: called by several threads with the number of bytes that were compared.
            strict: refuse files that the document does not list.

        Raises:
            DigestError: files are missing or changed, or not listed if `strict`.
            FormatError: a rule is broken.
        """
        raise_problems([*self.digest_problems(self.listed, progress), *(self.unlisted_problems() if strict else ())])
        _ = self.tensors

    def check_base(self, bundle: Bundle) -> None:
        """Refuse a bundle that the adapter was not made for."""
        if self.base != bundle.digest:
            raise AdapterError(
                f"{self.location}: is an adapter of the bundle {self.base[:12]}, found {bundle.digest[:12]}: make it for this bundle "
                "(stagepack adapter)"
            )


def check_tensors(document: AdapterDocument, tensors: Mapping[str, StoredTensor]) -> None:
    """Compare the tensors of an adapter with its document (A3, A5)."""
    where = TENSORS_NAME
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


def all_graphs(bundle: Bundle) -> "list[Graph]":
    """Return the graphs of all stages of all entry points of a bundle."""
    kept = bundle.with_graphs_kept()
    return [
        kept.select(entry_point.name).graph_file(stage_number, module_calls=False).graph
        for entry_point in bundle.entry_points
        for stage_number in range(len(entry_point.stages))
    ]


def check_fits(
    graphs: "Sequence[Graph]", document: AdapterDocument, tensors: Mapping[str, StoredTensor], name: str
) -> None:
    """Check that the graphs of a bundle use each changed weight in its module, and that the tensors of an adapter fit."""
    from stagepack.adapter.uses import MERGE_ADVICE, find_uses, unused_changes  # noqa: PLC0415 - as above

    by_module = {change.module: change for change in document.changes}
    known = {weight.names[0] for graph in graphs for weight in graph.weights}
    changed = [*(change.weight for change in document.changes), *document.replaced]
    if unknown := [weight_name for weight_name in changed if weight_name not in known]:
        raise AdapterError(f"{name}: changes {unknown[0][:120]}, which the bundle does not have")
    uses = [find_uses(graph, by_module) for graph in graphs]
    applied = {use.change.module for found in uses for use in found}
    for change in document.changes:
        if change.module not in applied:
            [reason] = unused_changes(graphs, {change.module: change}).values()
            raise AdapterError(
                f"{name}: {change.module[:120]}: expected a module that uses its weight, but {reason}: {MERGE_ADVICE}"
            )
    for graph, found in zip(graphs, uses, strict=True):
        check_shapes(graph, found, document, tensors, name)


def check_shapes(
    graph: "Graph", uses: "Iterable[Use]", document: AdapterDocument, tensors: Mapping[str, StoredTensor], name: str
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
    replaced = set(document.replaced)
    for weight in graph.weights:
        tensor = tensors.get(weight.names[0]) if weight.names[0] in replaced else None
        if tensor is not None and (tensor.shape != weight.shape or weight.base is not None):
            raise AdapterError(
                f"{name}: {weight.names[0][:120]}: expected the shape {list(weight.shape)}, found {list(tensor.shape)}"
            )
