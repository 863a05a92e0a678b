"""The document of an adapter: ``manifest.json`` in its folder, with the format ``stagepack adapter`` (SPEC section 14)."""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.chunks import File
from stagepack.format.manifest_codec import DocumentKind
from stagepack.format.rules import DIGEST_PATTERN, MANIFEST_NAME, BrokenRule, format_names, is_tensor_name
from stagepack.format.validate.manifest_rules import check_files

ADAPTER_FORMAT: Final = "stagepack adapter"
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


class AdapterDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What an adapter changes.

    Attributes:
        format: always ``stagepack adapter``.
        version: the format version, ``MAJOR.MINOR``.
        base: the digest of the bundle that the adapter belongs to.
        changes: the modules whose weights get a low-rank change.
        replaced: the first names of the weights that the adapter replaces; a tensor of the same name has the new values.
        files: all files of the adapter but this document and the signature over it: the one with the tensors.
        features: named additions to the format that a reader must know to read the adapter.
        sha256: the digest of the document itself, as that of a manifest.
    """

    format: str
    version: str
    base: str
    changes: tuple[LowRankChange, ...] = ()
    replaced: tuple[str, ...] = ()
    files: tuple[File, ...]
    features: tuple[str, ...] = ()
    sha256: str


def _problems(document: AdapterDocument) -> Iterator[Problem]:
    """Yield the problems of the document of an adapter by itself."""
    for rule, location, message in _check(document):
        yield Problem(rule=rule, where=f"{MANIFEST_NAME}: {location}", message=message)


def _check(document: AdapterDocument) -> Iterator[BrokenRule]:
    if not DIGEST_PATTERN.fullmatch(document.base):
        yield "A2", "base", f"expected the digest of a bundle, found {document.base[:80]!r}"
    yield from check_files(document.files)
    if [file.name for file in document.files] != [TENSORS_NAME]:
        yield (
            "A3",
            "files",
            f"expected {TENSORS_NAME} alone, found {format_names([file.name for file in document.files])}",
        )
    change_count = len(document.changes) + len(document.replaced)
    if not 0 < change_count <= MOST_CHANGES:
        yield "L1", "changes, replaced", f"expected 1 to {MOST_CHANGES}, found {change_count}"
        return
    modules = [change.module for change in document.changes]
    for field, listed in (("changes", modules), ("replaced", document.replaced)):
        for name, count in Counter(listed).items():
            if count > 1:
                yield "A4", field, f"lists {name[:80]!r} {count} times"
    pair_names = {module + suffix for module in modules for suffix in (A_SUFFIX, B_SUFFIX, BIAS_SUFFIX)}
    if shared := sorted(pair_names & set(document.replaced)):
        yield "A4", "replaced", f"has the names of tensors of changes: {format_names(shared)}"
    for name in (*modules, *(change.weight for change in document.changes), *document.replaced):
        if not is_tensor_name(name):
            yield (
                "A4",
                "changes, replaced",
                f"{name[:80]!r} is no name of a tensor, of 1 to {limits.NAME_CHARACTERS} characters",
            )
    for change in document.changes:
        if not math.isfinite(change.scale):
            yield "A4", f"{change.module[:80]}: scale", f"expected a finite number, found {change.scale}"


ADAPTER: Final = DocumentKind(ADAPTER_FORMAT, AdapterDocument, _problems, rule="A1")
