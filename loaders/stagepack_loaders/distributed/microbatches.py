"""Large batches cut into smaller ones, which go through the stages one behind the other, and their results joined."""

import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import torch

from stagepack.errors import OptionError
from stagepack.format.tree import value_names
from stagepack.graph.rows.batch_dimension import batch_dimension, end_edges
from stagepack_loaders.batching import batch_limit
from stagepack_loaders.distributed.process_executor import SubmitValues
from stagepack_loaders.pipeline import CallablePipeline


class Microbatches:
    """Cuts batches of more than some rows, for a model whose rows do not depend on each other."""

    def __init__(self, pipeline: CallablePipeline, size: int) -> None:
        bundle = pipeline.bundle
        edges = end_edges(bundle)
        symbol = batch_dimension(bundle, edges)
        if isinstance(symbol, str):
            raise OptionError(f"microbatch_size: batches of the model cannot be cut: {symbol}")
        if reason := batch_limit(bundle, edges, 2, pipeline).reason:
            raise OptionError(f"microbatch_size: batches of the model cannot be cut: {reason}")
        least = max(1, symbol.min or 0)
        if size < 2 * least - 1:
            raise OptionError(
                f"microbatch_size: expected at least {2 * least - 1}, so that each part has {least} rows, found {size}"
            )
        self._size = size
        self._symbol = symbol.name
        self._inputs = tuple(edge.name for edge in edges if edge.producer is None)
        results = set(value_names(bundle.entry_point.signature.result))
        self._results = tuple(edge.name for edge in edges if edge.name in results)

    def submit(
        self, values: Mapping[str, Any], sizes: Mapping[str, int], submit: SubmitValues
    ) -> "Future[dict[str, Any]]":
        """Send a batch on its way, in parts of as equal size as possible."""
        row_count = sizes[self._symbol]
        part_count = max(1, -(-row_count // self._size))
        if part_count == 1:
            return submit(values, sizes)
        bounds = [row_count * number // part_count for number in range(part_count + 1)]
        answers = [
            submit(
                dict(values) | {name: values[name][start:end] for name in self._inputs},
                dict(sizes) | {self._symbol: end - start},
            )
            for start, end in itertools.pairwise(bounds)
        ]
        return _joined(answers, lambda parts: dict(values) | self._join(parts))

    def _join(self, parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        return {
            name: torch.cat([torch.as_tensor(part[name]) for part in parts])
            for name in self._results
            if name not in self._inputs
        }


def _joined(
    answers: "Sequence[Future[dict[str, Any]]]", join: Callable[[list[dict[str, Any]]], dict[str, Any]]
) -> "Future[dict[str, Any]]":
    """The answer of all parts together."""
    joined_answer: Future[dict[str, Any]] = Future()
    lock = threading.Lock()
    remaining = len(answers)

    def finish(_: "Future[dict[str, Any]]") -> None:
        nonlocal remaining
        with lock:
            remaining -= 1
            if remaining:
                return
        try:
            joined_answer.set_result(join([answer.result() for answer in answers]))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            joined_answer.set_exception(error)

    for answer in answers:
        answer.add_done_callback(finish)
    return joined_answer
