"""Decode and check the content of a graph file."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from stagepack.format.codec import decode_graph, deep_nesting_refused
from stagepack.format.folded import FoldedGraph
from stagepack.format.graph import Graph
from stagepack.format.manifest import File
from stagepack.format.unfold import unfold_graph
from stagepack.format.validate import StageGraph, check_folded, check_graph, raise_problems


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
