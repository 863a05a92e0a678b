"""Encode, decode, check and unfold graphs as msgpack (SPEC E1 to E3).

Law: ``encode_graph(decode_graph(b, name)) == b`` for every `b` of this minor version that is not refused.
"""

from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stagepack.format.chunks import File
from stagepack.format.folded_graph import unfold_graph
from stagepack.format.graph import FoldedGraph, Graph
from stagepack.format.rules import deep_nesting_refused, raise_problems, refuse_encoding, typed_errors
from stagepack.format.validate.folded import check_folded
from stagepack.format.validate.graph_rules import check_graph
from stagepack.format.validate.stage_rules import StageGraph

_graph_encoder = msgspec.msgpack.Encoder()
_graph_decoder = msgspec.msgpack.Decoder(FoldedGraph)


def encode_graph(graph: FoldedGraph) -> bytes:
    """Return a graph as msgpack, the content of a graph file. Equal graphs give equal bytes."""
    return _graph_encoder.encode(graph)


def decode_graph(content: bytes, file_name: str, *, newer: bool = False) -> FoldedGraph:
    """Decode the content of a graph file. Of the rules, only E1 to E3 are checked.

    A graph has one encoding. The decoded graph is encoded again and must give the same bytes; this finds duplicate keys, defaults that
    are written out, and unknown fields.
    """
    with typed_errors(file_name, "msgpack"):
        graph = _graph_decoder.decode(content)
        encoded_again = _graph_encoder.encode(msgspec.msgpack.decode(content) if newer else graph)
        if encoded_again != content:
            refuse_encoding(file_name, msgspec.msgpack.decode(content), msgspec.msgpack.decode(encoded_again))
    return graph


class GraphFile(NamedTuple):
    """The content of a graph file: the graph as the file stores it, with regions and region calls, and unfolded."""

    folded: FoldedGraph
    graph: Graph


def read_graph(content: bytes, file_name: str, *, newer: bool = False, module_calls: bool = True) -> GraphFile:
    """Decode the content of a graph file, check it and unfold it."""
    folded = decode_graph(content, file_name, newer=newer)
    with deep_nesting_refused(file_name):
        raise_problems(check_folded(folded, file_name))
        graph = unfold_graph(folded, file_name, module_calls=module_calls)
        raise_problems(check_graph(graph, file_name))
    return GraphFile(folded, graph)


class KeptGraphs:
    """The graphs that a bundle has read and checked, with what follows from them; see `Bundle.with_graphs_kept`."""

    def __init__(self) -> None:
        # By the name of the file, and by its digest, since a writer gives each entry point files of its own; and by module calls or none.
        self._files: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = {}
        self._contents: dict[tuple[str, bool], tuple[GraphFile, StageGraph]] = {}
        # The entry points whose stages were checked together, by what is checked.
        self.models: set[bytes] = set()

    def read(
        self, entry: File, read_content: Callable[[], bytes], *, newer: bool, module_calls: bool
    ) -> tuple[GraphFile, StageGraph]:
        """Return the graph of a file, whose content is read if it was not before, and what follows from it; see `read_graph`."""
        key, content_key = (entry.name, module_calls), (entry.blake3, module_calls)
        if key not in self._files:
            content = read_content()  # compared with its digest, also if another file has the same
            if content_key not in self._contents:
                graph_file = read_graph(content, entry.name, newer=newer, module_calls=module_calls)
                self._contents[content_key] = graph_file, StageGraph.of(graph_file.graph)
            self._files[key] = self._contents[content_key]
        return self._files[key]
