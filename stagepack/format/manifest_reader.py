"""Read and check the manifest of a bundle.

- Decode and check the content of a graph file.
"""

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from stagepack.errors import DigestError, LimitError, NotABundleError, Problem
from stagepack.format import limits
from stagepack.format.chunks import stated_and_actual_digest
from stagepack.format.codec import convert_manifest, decode_graph, deep_nesting_refused, parse_json
from stagepack.format.file_checks import NotPlainFileError, near_path_hint, read_limited
from stagepack.format.folded_graph import FoldedGraph, unfold_graph
from stagepack.format.graph import Graph
from stagepack.format.manifest import File, Manifest
from stagepack.format.upgrade import check_version
from stagepack.format.validate import (
    MANIFEST_NAME,
    MODEL_CONFIG_NAME,
    StageGraph,
    check_folded,
    check_graph,
    check_manifest,
    raise_problems,
)

# What opening a file fails with if there is none, or a link to itself or a socket.
_NO_PLAIN_FILE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENXIO})


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of the bundle in a folder."""
    path = folder / MANIFEST_NAME
    try:
        content = read_limited(path, limits.MANIFEST_BYTES)
    except OSError as error:
        if isinstance(error, NotPlainFileError) or error.errno in _NO_PLAIN_FILE:
            expected = f"{folder}: not a stagepack bundle: expected a folder with a file {MANIFEST_NAME}"
            raise NotABundleError(f"{expected}, found {_found_at(folder, path)} [M1]") from None
        raise NotABundleError(f"{path}: cannot be read: {error.strerror or error} [M1]") from None
    return parse_manifest(content, str(path))


def _found_at(folder: Path, manifest_path: Path) -> str:
    """What is at a path that is no bundle."""
    if not os.path.lexists(folder):
        if ":/" in str(folder):
            return "no such path: stagepack.open and stagepack.load take a URL"
        return f"no such path{near_path_hint(folder, f'*/{MANIFEST_NAME}')}"
    if manifest_path.is_symlink():
        return f"a link to {os.readlink(manifest_path)[:200]!r}, which is no file"
    if folder.is_symlink() and not folder.exists():
        return "a link that leads nowhere"
    if not folder.is_dir():
        return f"a file: give its folder {folder.parent}" if folder.name == MANIFEST_NAME else "a file"
    if os.path.lexists(manifest_path):
        return "something else of this name"
    is_model = any((folder / file_name).exists() for file_name in (MODEL_CONFIG_NAME, "modules.json"))
    return (
        "the folder of a Hugging Face model: write its bundle by stagepack export"
        if is_model
        else "a folder without it"
    )


def parse_manifest(content: bytes, location: str) -> Manifest:
    """Decode and check a manifest.

    content: the bytes of the file.
    """
    if len(content) > limits.MANIFEST_BYTES:
        message = f"expected at most {limits.MANIFEST_BYTES} bytes, found {len(content)}"
        raise LimitError([Problem(rule="L1", where=MANIFEST_NAME, message=message)])
    fields = parse_json(content, MANIFEST_NAME)
    if not isinstance(fields, dict) or fields.get("format") != "stagepack":
        raise NotABundleError(f'{location}: not a stagepack manifest: expected the field "format": "stagepack" [M1]')
    check_version(fields, MANIFEST_NAME)
    stated_digest, actual_digest = stated_and_actual_digest(content)
    if stated_digest != actual_digest:
        message = f"the manifest states the sha256 {stated_digest}, found {actual_digest}: the file was changed"
        raise DigestError([Problem(rule="D3", where=MANIFEST_NAME, message=message)])
    manifest = convert_manifest(fields, MANIFEST_NAME)
    raise_problems(check_manifest(manifest))
    return manifest


class GraphFile(NamedTuple):
    """The content of a graph file.

    Attributes:
        folded: the graph as the file stores it, with regions and region calls.
        graph: the same graph unfolded.
    """

    folded: FoldedGraph
    graph: Graph


def read_graph(content: bytes, file_name: str, *, newer: bool = False, module_calls: bool = True) -> GraphFile:
    """Decode the content of a graph file, check it and unfold it.

    content: the bytes of the file.
    """
    folded = decode_graph(content, file_name, newer=newer)
    with deep_nesting_refused(file_name):
        raise_problems(check_folded(folded, file_name))
        graph = unfold_graph(folded, file_name, module_calls=module_calls)
        raise_problems(check_graph(graph, file_name))
    return GraphFile(folded, graph)


@dataclass(frozen=True, slots=True)
class KeptGraphs:
    """What a bundle has read and checked; see `Bundle.with_graphs_kept`.

    Attributes:
        files: the graphs by the name of their file, and by whether they have module calls.
        contents: the same by the digest of the file: a writer gives each entry point files of its own.
        models: the entry points whose stages were checked together, by what is checked.
    """

    files: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = field(default_factory=dict)
    contents: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = field(default_factory=dict)
    models: set[bytes] = field(default_factory=set)

    def read(
        self, entry: File, read_content: Callable[[], bytes], *, newer: bool, module_calls: bool
    ) -> tuple[GraphFile, StageGraph]:
        """Return the graph of a file, whose content is read if it was not before, and what follows from it; see `read_graph`."""
        key, content_key = (entry.name, module_calls), (entry.blake3, module_calls)
        if key not in self.files:
            content = read_content()  # compared with its digest, also if another file has the same
            if content_key not in self.contents:
                graph_file = read_graph(content, entry.name, newer=newer, module_calls=module_calls)
                self.contents[content_key] = graph_file, StageGraph.of(graph_file.graph)
            self.files[key] = self.contents[content_key]
        return self.files[key]
