"""A folder that stagepack has written, opened by the kind of its document: a bundle, a delta or an adapter."""

import os
from pathlib import Path
from typing import Any, Final, TypeAlias, TypeVar

from stagepack.adapter.document import ADAPTER, ADAPTER_FORMAT, AdapterDocument
from stagepack.adapter.opened import OpenAdapter
from stagepack.deltas.delta import DELTA, Delta
from stagepack.deltas.document import DELTA_FORMAT, DeltaDocument
from stagepack.format.file_source import FileSource
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import (
    BUNDLE,
    BUNDLE_FORMAT,
    DocumentKind,
    kind_name,
    other_kind_error,
    parse_document,
)
from stagepack.format.own_folders import document_format, folder_format
from stagepack.format.reader import Bundle

Listed: TypeAlias = Bundle | Delta | OpenAdapter
Kind = TypeVar("Kind", Bundle, Delta, OpenAdapter)

_CLASSES: Final[dict[str, type[Bundle] | type[Delta] | type[OpenAdapter]]] = {
    BUNDLE_FORMAT: Bundle,
    DELTA_FORMAT: Delta,
    ADAPTER_FORMAT: OpenAdapter,
}
_KINDS: Final[dict[str, DocumentKind[Any]]] = {BUNDLE_FORMAT: BUNDLE, DELTA_FORMAT: DELTA, ADAPTER_FORMAT: ADAPTER}


def open_listed(
    path: str | os.PathLike[str],
    *,
    source: FileSource | None = None,
    expected: type[Bundle] | type[Delta] | type[OpenAdapter] = Bundle,
) -> Listed:
    """Open what a folder has; a folder of no kind is opened as the expected one, whose error says what is there."""
    return _CLASSES.get(folder_format(Path(path)) or "", expected)(path, source=source)


def parse_listed(content: bytes, location: str) -> Manifest | DeltaDocument | AdapterDocument:
    """Decode and check a document of any kind."""
    document: Manifest | DeltaDocument | AdapterDocument = parse_document(
        content, location, _KINDS.get(document_format(content) or "", BUNDLE)
    )
    return document


def of_kind(listed: Listed, kind: type[Kind]) -> Kind:
    """Return what was opened if it is of a kind; otherwise say what it is, and what to do with it."""
    if not isinstance(listed, kind):
        [expected] = (found_format for found_format, found_class in _CLASSES.items() if found_class is kind)
        raise other_kind_error(listed.location, kind_name(expected), listed.document_format)
    return listed
