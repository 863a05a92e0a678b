"""Bundles for these tests, and the same pipeline in one process and in several."""

import contextlib
import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.distributed.membership import GroupOptions
from stagepack_loaders.distributed.pipeline import DistributedPipeline
from stagepack_loaders.options import LoadOptions, ProcessOptions
from stagepack_loaders.placement import place_stages
from tests.distributed.forked_processes import ForkedProcesses
from tests.zoo.case import Case, answers, assert_equal, other_size, stages_at_most
from tests.zoo.test_zoo import namespaces


class Layers(torch.nn.Module):
    """Three layers, of which the first fails on numbers beyond its table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(10, 16)
        self.first, self.second = torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.table(ids).relu()
        return self.second(self.first(hidden).relu()) + hidden


class Counting(torch.nn.Module):
    """Adds up its inputs, in two stages."""

    sums: torch.Tensor
    counts: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sums", torch.zeros(4))
        self.register_buffer("counts", torch.zeros(4))
        self.layer = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = self.sums + x
        self.sums.copy_(total)
        y = self.layer(total).tanh()
        count = self.counts + 1
        self.counts.copy_(count)
        return y * count, count


def export_layers(folder: Path) -> Bundle:
    """`Layers` in three stages, for any number of ids."""
    torch.manual_seed(0)
    shapes = {"ids": {0: torch.export.Dim("n", min=1, max=4096)}}
    return stagepack.export(
        Layers().eval(),
        (torch.arange(5),),
        out=folder / "layers.stagepack",
        split_at=["first", "second"],
        dynamic_shapes=shapes,
    )


def export_counting(folder: Path) -> Bundle:
    """`Counting` in two stages."""
    torch.manual_seed(0)
    return stagepack.export(Counting().eval(), (torch.ones(4),), out=folder / "counting.stagepack", split_at=["layer"])


@contextlib.contextmanager
def in_processes(
    bundle: Bundle,
    processes: int | None = None,
    *,
    launcher: type[ForkedProcesses] = ForkedProcesses,
    types: Sequence[type] = (),
    imports: Sequence[str] = (),
    max_restarts: int = 0,
    in_flight: int = 16,
    start_seconds: float = 60.0,
    stall_seconds: float | None = None,
    runtime: str = "torch",
) -> Iterator[DistributedPipeline]:
    """A bundle in forked processes, one for each stage by default."""
    ranks = range(1, 1 + (processes or len(bundle.stages)))
    process_options = ProcessOptions(
        imports=imports, max_restarts=max_restarts, in_flight=in_flight, start_seconds=start_seconds
    )
    options = GroupOptions(
        load=LoadOptions(allow_ops=tuple(namespaces(bundle)), runtime=runtime),
        processes=process_options,
        rank_of_stage=tuple(place_stages(bundle.entry_point, ranks)),
        stall_seconds=stall_seconds,
        is_local=True,
    )
    with DistributedPipeline(bundle, launcher(bundle, options), types, process_options) as pipeline:
        yield pipeline


def tree_environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}


def run_python(*arguments: str, seconds: float = 100.0) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env=tree_environment(),
    )


def process_ids(pipeline: DistributedPipeline) -> dict[int, int]:
    """The number of each process at the operating system, by rank."""
    return {facts.rank: facts.process_id for facts in pipeline.stage_facts}


def check_case(
    case: Case, folder: Path, processes: int, growths: Sequence[int | None], check: Callable[..., None]
) -> None:
    """Check calls of a model of the zoo, of sizes that have grown so; those of one size are the same calls."""
    capture = case.capture()
    bundle = export_capture(
        capture, out=folder / "m.stagepack", cut_options=CutOptions(stages=stages_at_most(processes, capture))
    )
    inputs = {
        growth: capture.inputs if growth is None else other_size(capture.program, capture.inputs, growth)
        for growth in growths
    }
    imports = [case.operators] if case.operators else []
    check(bundle, [inputs[growth] for growth in growths], types=case.classes(), imports=imports)


def check_in_turn(bundle: Bundle, calls: Sequence[Inputs], **options: Any) -> None:
    """Check that calls, one after the other, get the answers of one process, bit for bit. Equal calls have the same tensors."""
    one = stagepack.load(bundle, types=options.get("types", ()), allow_ops=namespaces(bundle))
    expected = answers(one, list(calls))
    with in_processes(bundle, **options) as pipeline:
        assert_equal(answers(pipeline, list(calls)), expected)


def check_in_flight(bundle: Bundle, calls: Sequence[Inputs], **options: Any) -> None:
    """Check that requests which are in flight at once get the answers of one process, which gets them one after the other."""
    calls = [copy.deepcopy(call) for call in calls]
    one = stagepack.load(bundle, types=options.get("types", ()), allow_ops=namespaces(bundle))
    expected = answers(one, calls)
    with in_processes(bundle, in_flight=len(calls), **options) as pipeline:
        futures = [pipeline.submit(*call.args, **call.kwargs) for call in calls]
        found = [
            pytree.tree_leaves((future.result(), tuple(call.args), dict(call.kwargs)))
            for future, call in zip(futures, calls, strict=True)
        ]
    assert_equal(found, expected)


def assert_gone(process_numbers: dict[int, int]) -> None:
    """Check that no process is left."""
    for number in process_numbers.values():
        with pytest.raises(ProcessLookupError):
            os.kill(number, 0)


def has_restarts(pipeline: DistributedPipeline, restart_count: int) -> bool:
    """Whether the processes were started again so often."""
    return pipeline.restart_count == restart_count
