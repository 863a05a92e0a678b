"""Loaded stages on a GPU: weights by every way, state, sequences, modules, other devices later, quantized weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.errors import DigestError
from stagepack.format.reader import Bundle
from stagepack_loaders.torch import weight_transfer
from stagepack_loaders.torch.stage import TorchStage
from stagepack_loaders.torch.weight_transfer import CachedCopies, StreamCopies
from tests.gpu.answers import assert_close, inputs_on
from tests.zoo.case import Case, answers, assert_equal
from tests.zoo.cases import named
from tests.zoo.test_zoo import name_of, namespaces

pytestmark = pytest.mark.gpu

HIDDEN = 1536


class Tower(torch.nn.Module):
    """Some chunks of weights, a tied weight, and a counter."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(HIDDEN, HIDDEN) for _ in range(6))
        self.layers[5].weight = self.layers[0].weight
        self.register_buffer("count", torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        for layer in self.layers:
            x = layer(x).relu()
        return x * self.count


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, torch.Tensor]:
    """A bundle in three stages, and an input."""
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("tower") / "m.stagepack"
    return stagepack.export(Tower(), (torch.randn(4, HIDDEN),), out=out, stages=3), torch.randn(4, HIDDEN)


@torch.no_grad()
@pytest.mark.parametrize(
    "options", [{}, {"stream": True}, {"verify": "manifest"}, {"copy": True}, {"device_memory": "40MB"}], ids=str
)
def test_weights_arrive_by_every_way(
    tower: tuple[Bundle, torch.Tensor], device: torch.device, options: dict[str, Any]
) -> None:
    bundle, x = tower
    model = Tower().to(device)
    pipeline: Any = stagepack.load(bundle, [str(device)], **options)
    on_cpu = stagepack.load(bundle)
    model.load_state_dict(on_cpu.state_dict())
    model.count.fill_(3.0)
    x = x.to(device)
    for _ in range(3):
        assert torch.equal(pipeline(x), model(x))
    found = pipeline.state_dict()
    # A weight that is tied stays one, where all weights are on the device.
    assert "device_memory" in options or found["layers.0.weight"].data_ptr() == found["layers.5.weight"].data_ptr()
    for weight_name, weight in on_cpu.state_dict().items():
        if weight_name != "count":
            assert torch.equal(found[weight_name].cpu(), weight)
    pipeline.reset_state()
    model.count.fill_(3.0)
    assert torch.equal(pipeline(x), model(x))
    if "device_memory" in options:
        assert sum(stage.residency.streamed_bytes for stage in pipeline.stages) > 0


def test_a_changed_byte_is_found_on_the_way_to_the_device(
    tower: tuple[Bundle, torch.Tensor], device: torch.device, tmp_path: Path
) -> None:
    bundle = stagepack.recut(tower[0], out=tmp_path / "m.stagepack", stages=1)
    path = bundle.path / "stage-0.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DigestError, match=r"stage-0\.safetensors"):
        stagepack.load(bundle.path, [str(device)])


@pytest.mark.parametrize("stream", [False, True])
def test_all_weights_arrive_by_few_blocks(
    tower: tuple[Bundle, torch.Tensor], device: torch.device, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    for copies in (CachedCopies, StreamCopies):
        monkeypatch.setattr(copies, "new_block", _counted(copies.new_block, made))
    monkeypatch.setattr(weight_transfer, "usable_cpu_count", lambda: 2)
    pipeline: Any = stagepack.load(tower[0], [str(device)], stream=stream)
    expected = stagepack.load(tower[0]).state_dict()
    for weight_name, weight in pipeline.state_dict().items():
        assert torch.equal(weight.cpu(), expected[weight_name])
    # The CPU maps files that are not streamed.
    assert len(made) <= 4
    assert made or (device.type == "cpu" and not stream)


def _counted(new_block: Any, made: list[int]) -> Any:
    def make(copies: Any) -> torch.Tensor:
        block: torch.Tensor = new_block(copies)
        made.append(len(block))
        return block

    return make


@torch.no_grad()
def test_stages_move_with_their_weights_and_their_state(
    tower: tuple[Bundle, torch.Tensor], device: torch.device
) -> None:
    bundle, x = tower
    pipeline, still = stagepack.load(bundle), stagepack.load(bundle)
    assert torch.equal(pipeline(x), still(x))
    pipeline.to(str(device))
    assert pipeline.devices == (str(device),) * len(pipeline.stages)
    assert_close(pipeline(x.to(device)), still(x))
    pipeline.to("cpu")
    assert torch.equal(pipeline(x), still(x))


@torch.no_grad()
def test_sequences_have_state_of_their_own(tower: tuple[Bundle, torch.Tensor], device: torch.device) -> None:
    bundle, x = tower
    pipeline = stagepack.load(bundle, [str(device)])
    x = x.to(device)
    expected = [pipeline(x) for _ in range(3)]
    pipeline.reset_state()
    with pipeline.sequence() as first, pipeline.sequence() as second:
        for answer in expected:
            assert torch.equal(first(x), answer)
            assert torch.equal(second(x), answer)


@pytest.mark.parametrize(
    "case",
    named("state-caches-of-several-layers", "state-static-cache-decoder", "operators-custom-operator-that-writes"),
    ids=name_of,
)
def test_a_stage_runs_by_its_modules(case: Case, device: torch.device, tmp_path: Path) -> None:
    capture = case.capture()
    bundle = stagepack.export(
        capture.program,
        tuple(capture.inputs.args),
        dict(capture.inputs.kwargs),
        out=tmp_path / "m",
        stages=1,
        allow_ops=["tests"],
    )
    loaded: list[TorchStage] = [
        stagepack.load_stage(
            bundle, 0, device=device, modules=modules, types=case.classes(), allow_ops=namespaces(bundle)
        )
        for modules in (False, True)
    ]
    inputs = inputs_on(capture.inputs, device)
    leaves = torch.utils._pytree.tree_leaves((inputs.args, inputs.kwargs))
    given = [Inputs(args=tuple(leaf for leaf in leaves if leaf is not None))] * 2
    assert_equal(answers(loaded[1], given), answers(loaded[0], given))


@torch.no_grad()
def test_a_module_of_a_stage_is_called_on_its_own(device: torch.device, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)).eval()
    x = torch.randn(2, 8)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m", stages=1)
    stage = stagepack.load_stage(bundle, 0, device=device, modules=True)
    model, x = model.to(device), x.to(device)
    assert torch.equal(stage.get_submodule("0")(x), model[0](x))
    assert torch.equal(stage(x)[0], model(x))


@pytest.mark.parametrize(
    ("config", "settings", "capability"),
    [
        ("Int8WeightOnlyConfig", {}, None),
        ("Float8WeightOnlyConfig", {}, None),
        ("Int4WeightOnlyConfig", {"group_size": 128, "int4_packing_format": "tile_packed_to_4d"}, (0, 0)),
        ("Float8DynamicActivationFloat8WeightConfig", {}, (8, 9)),
    ],
)
def test_quantized_weights(
    config: str,
    settings: dict[str, Any],
    capability: tuple[int, int] | None,
    device: torch.device,
    tmp_path: Path,
) -> None:
    """Some need CUDA, or products of float8, which a GPU of compute capability 8.9 or newer has."""
    quantization = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
    if capability and (device.type != "cuda" or torch.cuda.get_device_capability(device) < capability):
        pytest.skip(f"needs CUDA and the compute capability {capability}, found {device}")
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(3)]
    model = torch.nn.Sequential(*layers).eval().requires_grad_(False).to(device)
    quantization.quantize_(model, getattr(quantization, config)(**settings))
    x = torch.randn(16, 256, dtype=torch.bfloat16, device=device)
    with torch.no_grad():
        expected = model(x)
        operators_of_torchao = ["torchao", "mslk", "fbgemm", "aten._weight_int4pack_mm"]
        bundle = stagepack.export(model, (x,), out=tmp_path / "m", stages=2)
        found = stagepack.load(bundle, [str(device)], allow_ops=operators_of_torchao)(x)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("case", named("shapes-attention-by-hand", "shapes-nonzero"), ids=name_of)
def test_inputs_of_the_host_are_taken(case: Case, device: torch.device, tmp_path: Path) -> None:
    capture = case.capture()
    bundle = stagepack.export(
        capture.program, tuple(capture.inputs.args), dict(capture.inputs.kwargs), out=tmp_path / "m", stages=2
    )
    pipeline = stagepack.load(bundle, [str(device)])
    found, expected = answers(pipeline, [capture.inputs]), answers(pipeline, [inputs_on(capture.inputs, device)])
    assert_close(found, expected)
