"""The document of an adapter, ``adapter.json``, as JSON with its own digest (SPEC A1 to A5)."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.chunks import File, chunk_count
from stagepack.format.manifest_codec import DocumentKind
from stagepack.format.rules import (
    DIGEST_PATTERN,
    is_tensor_name,
)

FORMAT: Final = "stagepack adapter"
DOCUMENT_NAME: Final = "adapter.json"
TENSORS_NAME: Final = "adapter.safetensors"
# Modules and weights that one adapter changes. A Llama of 126 layers has 882 linear layers.
MOST_CHANGES: Final = 2**16
# The dtypes of its tensors, as the header of a weight file names them.
FLOATS: Final = frozenset({"F16", "BF16", "F32", "F64"})
# Behind the path of a module in the name of a tensor.
A_SUFFIX, B_SUFFIX, BIAS_SUFFIX = ".lora_A", ".lora_B", ".lora_bias"


class LowRankChange(Struct, frozen=True, kw_only=True):
    """A module whose weight gets a low-rank change.

    Attributes:
        module: the path of the module in the model, such as ``layers.0.q_proj``. The tensors ``MODULE.lora_A`` [rank, in] and
            ``MODULE.lora_B`` [out, rank] are the pair, and ``MODULE.lora_bias`` [out], if there is one, is added behind them.
        weight: the first name of its weight in the bundle.
        scale: the factor of the change.
    """

    module: str
    weight: str
    scale: float


class AdapterDocument(Struct, frozen=True, kw_only=True):
    """What an adapter changes.

    Attributes:
        format: always ``stagepack adapter``.
        version: the format version, ``MAJOR.MINOR``.
        base: the digest of the bundle that the adapter belongs to.
        changes: the modules whose weights get a low-rank change.
        replaced: the first names of the weights that the adapter replaces; a tensor of the same name has the new values.
        file: the file with the tensors.
        sha256: the digest of the document itself, computed with 64 zeros in its place.
    """

    format: str
    version: str
    base: str
    changes: tuple[LowRankChange, ...]
    replaced: tuple[str, ...]
    file: File
    sha256: str


def _problems(document: AdapterDocument) -> Iterator[Problem]:
    """Yield the problems of a document beyond its types."""

    def problem(rule: str, message: str) -> Problem:
        return Problem(rule=rule, where=DOCUMENT_NAME, message=message)

    if not DIGEST_PATTERN.fullmatch(document.base):
        yield problem("A2", f"expected the digest of a bundle as base, found {document.base[:80]!r}")
    file = document.file
    is_named = file.name == TENSORS_NAME and file.size >= 0
    if not is_named or len(file.chunks) != (chunk_count(file.size) if chunk_count(file.size) > 1 else 0):
        yield problem("A3", f"expected the file {TENSORS_NAME} with a digest of each chunk, found {file.name[:80]!r}")
    change_count = len(document.changes) + len(document.replaced)
    if not 0 < change_count <= MOST_CHANGES:
        yield problem("L1", f"expected 1 to {MOST_CHANGES} changes and replaced weights, found {change_count}")
        return
    for kind, listed in (
        ("the module", [change.module for change in document.changes]),
        ("the replaced weight", document.replaced),
    ):
        for name, count in Counter(listed).items():
            if count > 1:
                yield problem("A4", f"lists {kind} {name[:80]!r} {count} times")
    for name in (*(name for change in document.changes for name in (change.module, change.weight)), *document.replaced):
        if not is_tensor_name(name):
            yield problem("A4", f"expected a name of 1 to {limits.NAME_CHARACTERS} characters, found {name[:80]!r}")
    for change in document.changes:
        if not math.isfinite(change.scale):
            yield problem("A4", f"{change.module[:80]}: expected a finite scale, found {change.scale}")


ADAPTER: Final = DocumentKind(FORMAT, AdapterDocument, _problems, DOCUMENT_NAME, "A1")
