"""The weights of a stage: its session has its own copy, so they are read from the weight files when somebody asks for them."""

from collections.abc import Collection, Iterator, Mapping
from functools import cached_property

import numpy

from stagepack.format.graph import Weight
from stagepack.format.graph_reader import read_graph
from stagepack.format.reader import Bundle
from stagepack.format.upgrade import is_newer_minor
from stagepack_loaders.elements import Array
from stagepack_loaders.numpy_weights import map_stored_tensors, read_weight
from stagepack_loaders.weight_files import WeightFile


class StageWeights:
    """The weights of a stage as read-only arrays. They stay valid when the bundle is replaced or removed."""

    def __init__(self, bundle: Bundle, stage_number: int, graph_content: bytes) -> None:
        """Map the weight files.

        Args:
            bundle: the bundle of the stage.
            stage_number: the stage.
            graph_content: the content of its graph file, whose table of weights is read when it is needed.
        """
        self._graph_name = bundle.stages[stage_number].graph
        self._graph_content = graph_content
        self._newer = is_newer_minor(bundle.manifest.version)
        self._stored = map_stored_tensors(bundle, stage_number)

    def keep(self, weight_names: Collection[str], weight_files: Mapping[str, WeightFile]) -> None:
        """Keep some weights in memory of their own, where the weight files may be cut short.

        Args:
            weight_names: the names of the weights.
            weight_files: copies of the weight files, by name.
        """
        if not weight_names:
            return
        kept_tensors = {
            weight.stored
            for weight in self._table
            if not weight.zeros and not set(weight_names).isdisjoint(weight.names)
        }
        for weight_file in weight_files.values():
            for stored_name in kept_tensors & weight_file.tensors.keys():
                stored = weight_file.tensors[stored_name]
                self._stored[stored_name] = numpy.frombuffer(
                    weight_file.content[stored.start : stored.end], numpy.uint8
                )

    def __iter__(self) -> Iterator[tuple[Weight, Array]]:
        """Yield each weight of the graph with its content."""
        return ((weight, read_weight(weight, self._stored)) for weight in self._table)

    @cached_property
    def _table(self) -> tuple[Weight, ...]:
        return read_graph(self._graph_content, self._graph_name, newer=self._newer, module_calls=False).graph.weights
