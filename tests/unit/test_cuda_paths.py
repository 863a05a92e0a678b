"""What runs on CUDA, as far as it goes without: fake tensors on a GPU, and a device that is simulated in memory of the CPU."""

import itertools
import pkgutil
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_program
from stagepack.errors import DeviceError, DigestError, StageFailedError, StageLostError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import DeviceArg
from stagepack.format.reader import Bundle
from stagepack.format.shapes import evaluate_dim, example_sizes
from stagepack.format.traversal import leaf_arguments, node_arguments
from stagepack.linearize.program import linearize_program
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack_loaders.base import Loading
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.stage_errors import typed_stage_errors
from stagepack_loaders.torch import weight_transfer
from stagepack_loaders.torch.compilation import CompileTarget
from stagepack_loaders.torch.prepare import build_code, read_parts
from stagepack_loaders.torch.stage import move_input, output_contract
from stagepack_loaders.torch.torch_attributes import torch_attribute
from stagepack_train import torch_meeting
from tests.bundle_editor import BundleEditor
from tests.unit.simulated_cuda import DEVICE, USED_NAMES, SimulatedCuda
from tests.zoo.case import Case, stages_at_most
from tests.zoo.cases import named

ROOT = Path(__file__).parents[2]

CASES = named(
    "aliasing-activation-written-after-it-crossed", "operators-custom-operator-of-lists",
    "operators-dropout-that-draws", "operators-factories-with-a-device", "regions-all-in-nested-regions",
    "regions-grad-enabled-inside-no-grad", "shapes-an-integer-input", "state-counter-in-the-middle",
    "values-dense-connections", "weights-half-precision-layers", "weights-tied-at-both-ends",
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fake_tensors_pass_through_stages_on_a_gpu(case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake tensor has a device and no data: an operator whose tensors are on two devices raises."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda: True)
    capture = case.capture()
    cut_options = CutOptions(stages=stages_at_most(3, capture))
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=cut_options)
    for types in (["cuda:0"], ["cuda:0", "cpu"], ["cpu", "cuda:0"]):
        placement = [torch.device(types[number % len(types)]) for number in range(len(bundle.stages))]
        with FakeTensorMode(), torch.no_grad():
            _run_fake(bundle, placement)


def _run_fake(bundle: Bundle, placement: list[torch.device]) -> None:
    allow_ops = {namespace for stage in bundle.stages for namespace in stage.namespaces}
    loading = Loading(options=LoadOptions(allow_ops=allow_ops))
    sizes = example_sizes(bundle.entry_point.symbols)
    edges = {edge.name: edge for edge in bundle.edges}
    values = {edge.name: _fake_value(edge, sizes, placement[0]) for edge in bundle.entry_point.inputs}
    for number, device in enumerate(placement):
        code = build_code(bundle, number, read_parts(bundle, number, loading), device, loading)
        entry = bundle.stages[number]
        weights = []
        for weight in code.graph.weights:
            strides = torch.empty(weight.shape, device="meta").stride() if weight.strides is None else weight.strides
            dtype = torch_attribute(weight.dtype, torch.dtype)
            weights.append(torch.empty_strided(weight.shape, strides, dtype=dtype, device=device))
        inputs = [move_input(values[edge_name], device) for edge_name in entry.inputs]
        outputs = code.graph_module(*inputs, *weights)
        output_contract(code.graph).check(inputs, outputs)
        assert {output.device for output in outputs if isinstance(output, torch.Tensor)} <= {device}
        values |= zip(entry.outputs, outputs, strict=True)
    assert values.keys() >= edges.keys() - {edge.name for edge in bundle.edges if edge.producer is not None}


def _fake_value(value: Any, sizes: dict[str, int], device: torch.device) -> Any:
    if value.dtype in SCALAR_DTYPES:
        return evaluate_dim(value.expr, sizes)
    shape = [evaluate_dim(dim, sizes) for dim in value.shape]
    return torch.empty(shape, dtype=torch_attribute(value.dtype, torch.dtype), device=device)


def test_a_program_of_a_gpu_keeps_the_devices_that_it_names() -> None:
    """Captured on a GPU, its own device becomes that of the stage, and ``cpu`` stays."""

    class Moves(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            # Without a gradient: autograd of a torch without CUDA ends the process on a fake tensor of a GPU.
            self.weight = torch.nn.Parameter(torch.empty(4, 4), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            on_host = (x @ self.weight).to("cpu") + torch.ones(4, device="cpu")
            return on_host.to(x.device) + torch.zeros(4, device=x.device)

    with FakeTensorMode(), torch.device("cuda:0"):
        program = torch.export.export(Moves(), (torch.empty(2, 4),))
    linearized = linearize_program(capture_program(program, Inputs()))
    devices = {
        leaf.name
        for node in linearized.graph.nodes
        for argument in node_arguments(node)
        for leaf in leaf_arguments(argument)
        if isinstance(leaf, DeviceArg)
    }
    assert linearized.device == "cuda"
    assert devices == {"cpu", None}


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> SimulatedCuda:
    return SimulatedCuda().install(monkeypatch)


class Tower(torch.nn.Module):
    """More than one piece of weights, a tied weight, and a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4))
        self.layers[3].weight = self.layers[0].weight
        self.register_buffer("count", torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x + self.count


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, torch.Tensor, list[torch.Tensor]]:
    """A bundle in two stages, an input, and the answers to three calls."""
    torch.manual_seed(0)
    bundle = stagepack.export(Tower(), (torch.randn(2, 1024),), out=tmp_path_factory.mktemp("m") / "m", stages=2)
    x = torch.randn(2, 1024)
    pipeline = stagepack.load(bundle)
    with torch.no_grad():
        return bundle, x, [pipeline(x) for _ in range(3)]


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"stream": True}, {"verify": "manifest"}, {"device_memory": "12MB"}])
def test_weights_arrive_by_page_locked_pieces(
    tower: tuple[Bundle, torch.Tensor, list[torch.Tensor]],
    simulated: SimulatedCuda,
    options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weight_transfer, "usable_cpu_count", lambda: 2)
    bundle, x, expected = tower
    pipeline: Any = stagepack.load(bundle, [str(DEVICE)], **options)
    # A block for each thread, two for the device, and what else is sent.
    assert simulated.page_locked_bytes <= 4 * 2**22 + 2**20
    assert [bool(torch.equal(pipeline(x), answer)) for answer in expected] == [True] * 3
    pipeline.reset_state()
    assert torch.equal(pipeline(x), expected[0])
    assert simulated.page_locked_bytes >= 2**23
    assert simulated.recorded >= 1
    if "device_memory" in options:
        assert sum(stage.residency.streamed_bytes for stage in pipeline.stages) > 0


def test_bytes_that_arrive_are_compared(
    tower: tuple[Bundle, torch.Tensor, list[torch.Tensor]], simulated: SimulatedCuda, tmp_path: Path
) -> None:
    editor = BundleEditor.copy(tower[0].path, tmp_path / "changed")
    editor.flip_bit("stage-1.safetensors", tower[0].files["stage-1.safetensors"].size - 5)
    with pytest.raises(DigestError, match=r"stage-1\.safetensors: .*expected blake3"):
        stagepack.load(editor.path, [str(DEVICE)])


@torch.no_grad()
def test_inputs_do_not_wait_for_the_device(
    tower: tuple[Bundle, torch.Tensor, list[torch.Tensor]], simulated: SimulatedCuda
) -> None:
    bundle, x, _ = tower
    stage = stagepack.load_stage(bundle, 0, device=str(DEVICE))
    page_locked, waits = simulated.page_locked_bytes, simulated.waits
    for value in (x, x.t().contiguous().t(), x[:, :1].expand(2, 1024), x.reshape(2, 1024)[:, ::1]):
        stage(value)
    assert simulated.page_locked_bytes - page_locked == 4 * x.nbytes
    assert simulated.waits == waits
    moved = move_input(x.t().contiguous().t(), DEVICE)
    assert moved.stride() == (1, 2)
    assert move_input(x[:, ::2], DEVICE).stride() == (512, 1)
    assert move_input(3, DEVICE) == 3
    assert torch.equal(move_input(x.clone().requires_grad_(), DEVICE), x)
    assert simulated.waits == waits + 1  # by `to`, which autograd records


def test_weights_that_do_not_fit_are_a_device_error(
    tower: tuple[Bundle, torch.Tensor, list[torch.Tensor]], simulated: SimulatedCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def allocate(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has 1.00 GiB free.\nmore")

    monkeypatch.setattr(weight_transfer, "empty_bytes", allocate)
    with pytest.raises(DeviceError, match=r"do not fit into the memory of a device: .* 1\.00 GiB free\.: choose"):
        stagepack.load(tower[0], [str(DEVICE)])
    with pytest.raises(StageFailedError, match="stage 1 failed: OutOfMemoryError: CUDA"), typed_stage_errors(1):
        allocate()


def test_code_is_compiled_for_the_architecture_of_a_gpu(simulated: SimulatedCuda) -> None:
    assert (CompileTarget.of(DEVICE).device, CompileTarget.of(DEVICE).arch) == ("cuda", "sm_90")


@pytest.mark.parametrize(
    "message",
    [
        "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported",
        "CUDA error: an illegal memory access was encountered",
        "CUDA failure 710: device-side assert triggered ; GPU=0 ; hostname=h",
    ],
)
def test_a_device_that_is_lost_ends_the_server(
    tower: tuple[Bundle, torch.Tensor, list[torch.Tensor]], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA reports an index out of range when somebody waits for the device."""
    bundle, x, _ = tower
    pipeline = stagepack.load(bundle)
    executor = pipeline.executor.overlapping(lambda number, seconds: None)
    executor.submit({"x": x}, {}).result()
    assert not executor.has_ended

    waits = itertools.count()

    def wait(*_: object) -> None:
        if next(waits):  # of stage 1
            raise RuntimeError(message)

    monkeypatch.setattr(type(pipeline.runtimes[0]), "wait", wait)
    with pytest.raises(StageLostError, match=r"stage 1, or one before it, .*: start the process again") as caught:
        executor.submit({"x": x}, {})
    assert caught.value.stages == (1,)
    assert executor.has_ended
    assert str(executor.lost) == str(caught.value)


def test_training_exchanges_tensors_of_the_host_and_of_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch_meeting._backends() == "cpu:gloo"
    monkeypatch.setattr("torch.accelerator.current_accelerator", lambda check_available=False: torch.device("cuda"))
    assert torch_meeting._backends() == "cpu:gloo,cuda:nccl"


def test_the_names_of_torch_that_only_a_gpu_runs_are_known() -> None:
    """A name that is new in the code is tried in `tests/gpu`, and simulated here; one that torch loses is noticed."""
    sources = [path.read_text() for folder in ("stagepack", "loaders") for path in (ROOT / folder).rglob("*.py")]
    used = {name for source in sources for name in re.findall(r"torch\.(?:cuda|accelerator)\.\w+", source)}
    assert used == USED_NAMES
    assert all(pkgutil.resolve_name(name) for name in used)
