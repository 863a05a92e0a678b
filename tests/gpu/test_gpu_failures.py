"""A GPU that fails, and what the process can do afterwards; calls that do not wait for the GPU."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch.export.passes import move_to_device_pass

import stagepack
from stagepack.errors import DeviceError, StageFailedError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.gpu.answers import assert_close, has_autocast, inputs_on
from tests.zoo.case import Case
from tests.zoo.cases import named
from tests.zoo.test_zoo import name_of, namespaces

pytestmark = pytest.mark.gpu

# Prints the classes of the errors of three calls: with a good index, one out of range, and a good one again. A trace waits for each stage.
OUT_OF_RANGE = """
import json, sys, torch, stagepack
pipeline = stagepack.load(sys.argv[1], [sys.argv[2]])
outcomes = []
for index in (3, 99, 3):
    try:
        with torch.no_grad(), pipeline.trace():
            pipeline(torch.tensor([index]))
        outcomes.append("answer")
    except stagepack.errors.StagepackError as error:
        outcomes.append(type(error).__name__)
print(json.dumps(outcomes))
"""


class Lookup(torch.nn.Module):
    """A table and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = torch.nn.Embedding(10, 8), torch.nn.Linear(8, 8)

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.last(self.table(index))


def test_an_index_out_of_range_is_a_typed_error(device: torch.device, tmp_path: Path) -> None:
    """On the CPU the call fails. On a GPU the process has lost the device: every later call says so, until it is started again."""
    bundle = stagepack.export(Lookup(), (torch.tensor([1]),), out=tmp_path / "m", split_at=["last"])
    command = [sys.executable, "-c", OUT_OF_RANGE, str(bundle.path), str(device)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout, done.stderr[-2000:]
    on_cuda, on_cpu = ["answer", "StageLostError", "StageLostError"], ["answer", "InputError", "answer"]
    assert json.loads(done.stdout.splitlines()[-1]) == (on_cuda if device.type == "cuda" else on_cpu)


@torch.no_grad()
def test_a_call_without_memory_fails_and_later_ones_do_not(device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)).eval()
    rows = {0: torch.export.Dim("rows", min=1)}
    bundle = stagepack.export(model, (torch.randn(2, 16),), out=tmp_path / "m", stages=2, dynamic_shapes=(rows,))
    pipeline = stagepack.load(bundle, [str(device)])
    x = torch.randn(2, 16, device=device)
    expected = pipeline(x)
    is_cuda = device.type == "cuda"
    used = torch.cuda.memory_allocated(device) if is_cuda else 0
    row_count = torch.cuda.get_device_properties(device).total_memory // 32 if is_cuda else 2**45
    with pytest.raises(StageFailedError, match=r"^stage 0 failed: (OutOfMemoryError|RuntimeError): "):
        pipeline(x[:1].expand(row_count, 16))
    assert torch.equal(pipeline(x), expected)
    assert not is_cuda or torch.cuda.memory_allocated(device) - used < 2**20


@torch.no_grad()
def test_weights_that_do_not_fit_are_a_device_error(cuda: torch.device, tmp_path: Path) -> None:
    bundle = stagepack.export(torch.nn.Linear(4096, 4096), (torch.randn(2, 4096),), out=tmp_path / "m", stages=1)
    torch.cuda.empty_cache()
    limit = torch.cuda.memory_reserved(cuda) + 2**24
    torch.cuda.set_per_process_memory_fraction(limit / torch.cuda.get_device_properties(cuda).total_memory, cuda)
    try:
        with pytest.raises(DeviceError, match="do not fit into the memory of a device: CUDA out of memory"):
            stagepack.load(bundle, [str(cuda)])
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, cuda)
    x = torch.randn(2, 4096)
    assert_close(stagepack.load(bundle, [str(cuda)])(x), stagepack.load(bundle)(x))


@contextlib.contextmanager
def no_waiting(device: torch.device) -> Iterator[None]:
    """Raise an error where the host waits for the GPU; on a CPU it never does."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    named(
        "aliasing-activation-written-after-it-crossed",
        "operators-custom-operators",
        "operators-dropout-that-draws",
        "regions-all-in-nested-regions",
        "shapes-attention-by-hand",
        "state-caches-of-several-layers",
        "state-counter-in-the-middle",
        "values-dense-connections",
        "values-strided-values-cross",
        "weights-tied-at-both-ends",
        "decoders-glm",
    ),
    ids=name_of,
)
def test_stages_do_not_wait_for_the_device(case: Case, device: torch.device, tmp_path: Path) -> None:
    """Also not where inputs are in the memory of the host."""
    capture = case.capture()
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3))
    pipeline = stagepack.load(bundle, [str(device)], types=case.classes(), allow_ops=namespaces(bundle))
    on_device = inputs_on(capture.inputs, device)
    runs: list[Callable[..., object]] = [pipeline]
    if not has_autocast(bundle):
        move_to_device_pass(capture.program, str(device))
        runs.insert(0, capture.program.module())  # if this one waits, the model itself does
    for run in runs:
        run(*on_device.args, **dict(on_device.kwargs))
    with no_waiting(device):
        for run in runs:
            run(*on_device.args, **dict(on_device.kwargs))
        pipeline(*capture.inputs.args, **dict(capture.inputs.kwargs))


@torch.no_grad()
def test_stages_are_recorded_in_a_cuda_graph(cuda: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4))).eval()
    bundle = stagepack.export(model, (torch.randn(2, 64),), out=tmp_path / "m", stages=4)
    pipeline = stagepack.load(bundle, [str(cuda)])
    x = torch.randn(2, 64, device=cuda)
    side = torch.cuda.Stream(cuda)
    with torch.cuda.stream(side):
        pipeline(x)
    torch.cuda.current_stream(cuda).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = pipeline(x)
    for _ in range(3):
        x.copy_(torch.randn(2, 64))
        graph.replay()
        assert torch.equal(y, pipeline(x))


@torch.no_grad()
def test_stages_work_on_streams_of_their_own(device: torch.device, tmp_path: Path) -> None:
    """What one stream makes, another takes after an event, as with any module of torch."""
    model = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4))).eval()
    bundle = stagepack.export(model, (torch.randn(8, 512),), out=tmp_path / "m", stages=2)
    stages = [stagepack.load_stage(bundle, number, device=device) for number in range(2)]
    batches = [torch.randn(8, 512, device=device) for _ in range(8)]
    expected = [stages[1](*stages[0](x))[0] for x in batches]
    if device.type != "cuda":
        assert len(expected) == len(batches)
        return
    streams = [torch.cuda.Stream(device) for _ in range(2)]
    torch.cuda.synchronize(device)
    found = []
    for x in batches:
        with torch.cuda.stream(streams[0]):
            (hidden,) = stages[0](x)
        streams[1].wait_stream(streams[0])
        with torch.cuda.stream(streams[1]):
            hidden.record_stream(streams[1])
            found.append(stages[1](hidden)[0])
    torch.cuda.synchronize(device)
    assert all(map(torch.equal, found, expected))
