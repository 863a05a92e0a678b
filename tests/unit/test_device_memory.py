"""Stages whose weights do not all fit into the memory of their device."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import stagepack
from stagepack.errors import DigestError, OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders import file_leases
from stagepack_loaders.base import Loading
from stagepack_loaders.local_pipeline import Pipeline
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.preparation import prepare
from stagepack_loaders.weight_files import FolderReader
from stagepack_loaders.window_plan import PLACE_ALIGNMENT, WeightUse, least_bytes, plan_window


class Tower(nn.Module):
    """Equal blocks, one of them in autocast, a tied weight, a counter, and a view of a weight that is used later."""

    count: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(768, 768), nn.GELU()) for _ in range(24))
        self.mixed = nn.Linear(768, 768)
        self.first, self.last = nn.Linear(768, 8, bias=False), nn.Linear(768, 8, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("count", torch.full((), 3.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        scores = self.first(x)
        transposed = self.mixed.weight.t()
        for block in self.blocks:
            x = block(x)
        with torch.autocast("cpu", torch.bfloat16):
            x = self.mixed(x).float()
        return scores + self.last(x @ transposed) + self.count


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    torch.manual_seed(0)
    out = tmp_path_factory.mktemp("device_memory") / "m"
    return stagepack.export(Tower(), (torch.randn(2, 768),), out=out, stages=3)


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def test_a_quarter_of_the_weights_gives_the_same_bits(bundle: Bundle) -> None:
    inputs = [torch.randn(2, 768) for _ in range(3)]
    pipeline = stagepack.load(bundle, copy=True)
    expected = [pipeline(x) for x in inputs]
    del pipeline
    weight_bytes = sum(stage.weight_bytes for stage in bundle.stages)
    before = _private_bytes()
    pipeline = stagepack.load(bundle, device_memory=weight_bytes // 4)
    for x, answer in zip(inputs, expected, strict=True):
        assert torch.equal(pipeline(x), answer)
    assert _private_bytes() - before < weight_bytes // 4 + 8e6 < weight_bytes // 2
    stages: list[Any] = list(pipeline.stages)
    residencies = [stage.residency for stage in stages]
    assert sum(residency.resident_bytes for residency in residencies) + residencies[0].window_bytes <= weight_bytes // 4
    assert sum(residency.streamed_bytes for residency in residencies) > weight_bytes // 2
    # A stage that is called again, and alone.
    assert torch.equal(stages[0](inputs[0])[0], stages[0](inputs[0])[0])
    pipeline.reset_state()
    assert torch.equal(pipeline(inputs[0]), expected[0])


@pytest.mark.parametrize("options", [{"device_memory": "1.1MB"}, {"stream": True, "verify": "manifest"}])
def test_a_bundle_that_takes_the_place_of_the_loaded_one_is_not_read(options: dict[str, Any], tmp_path: Path) -> None:
    """As an export over the bundle of a server does."""
    models = [nn.Sequential(*(nn.Linear(256, 256) for _ in range(6))) for _ in range(2)]
    x = torch.randn(1, 256)
    for name, model in zip(("m", "new"), models, strict=True):
        stagepack.export(model, (x,), out=tmp_path / name, stages=2)
    pipeline = stagepack.load(tmp_path / "m", **options)
    (tmp_path / "m").rename(tmp_path / "old")
    (tmp_path / "new").rename(tmp_path / "m")
    for _ in range(2):
        assert torch.equal(pipeline(x), models[0](x))


def test_memory_for_all_weights_changes_nothing(bundle: Bundle) -> None:
    stage = stagepack.load_stage(bundle, 1, device_memory="1GiB")
    assert str(stage.residency).endswith("of weights stay")
    assert copy.deepcopy(stage).state_dict().keys() == stage.state_dict().keys()


def test_weights_that_were_replaced_are_used(bundle: Bundle) -> None:
    stages = [stagepack.load_stage(bundle, 1, device_memory=limit) for limit in ("1GiB", "8MB")]
    x = torch.randn(2, 768)
    for stage in stages:
        for parameter_name, parameter in list(stage.named_parameters()):
            module_name, _, attribute_name = parameter_name.rpartition(".")
            stage.get_submodule(module_name).register_parameter(attribute_name, nn.Parameter(parameter.detach() / 2))
    assert all(map(torch.equal, *(stage(*_inputs(stage, x)) for stage in stages)))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(stages[1])


def _halves(stage: Any) -> dict[str, torch.Tensor]:
    return {weight_name: tensor / 2 for weight_name, tensor in stage.state_dict().items()}


def _halve_data(stage: Any) -> None:
    for parameter in stage.parameters():
        parameter.data = parameter.data / 2


def _halve_in_numpy(stage: Any) -> None:
    for parameter in stage.parameters():
        numpy.multiply(parameter.detach().numpy(), 0.5, out=parameter.detach().numpy())


HALVED: dict[str, Callable[[Any], object]] = {
    "load_state_dict": lambda stage: stage.load_state_dict(_halves(stage), strict=False),
    "assignment": lambda stage: stage.load_state_dict(_halves(stage), strict=False, assign=True),
    "in place": lambda stage: [parameter.mul_(0.5) for parameter in stage.parameters()],
    "data": _halve_data,
    "numpy": _halve_in_numpy,
}


@pytest.mark.parametrize("halve", HALVED.values(), ids=HALVED)
def test_what_is_written_into_weights_is_used(bundle: Bundle, halve: Callable[[Any], object]) -> None:
    stages = [stagepack.load_stage(bundle, 1, device_memory=limit) for limit in ("1GiB", "8MB")]
    original = stagepack.load_stage(bundle, 1)
    inputs = _inputs(original, torch.randn(2, 768))
    first_answers = [stage(*inputs) for stage in stages]
    for stage in stages:
        halve(stage)
    for _ in range(2):
        answers = [stage(*inputs) for stage in stages]
        assert all(map(torch.equal, *answers))
        assert not torch.equal(answers[1][0], first_answers[1][0])
    written, expected = stages[1].state_dict(), original.state_dict()
    for parameter_name, parameter in original.named_parameters():
        assert torch.equal(written[parameter_name], expected[parameter_name] / 2)
        assert torch.equal(parameter, expected[parameter_name])


@pytest.mark.parametrize("part", [lambda stage: stage, lambda stage: stage.blocks], ids=["stage", "part"])
def test_a_conversion_is_refused_unless_it_changes_nothing(bundle: Bundle, part: Callable[[Any], Any]) -> None:
    stage = stagepack.load_stage(bundle, 1, device_memory="8MB")
    inputs = _inputs(stage, torch.randn(2, 768))
    expected = stage(*inputs)
    for convert in (lambda module: module.double(), lambda module: module.to("meta")):
        with pytest.raises(OptionError, match="load the stage without device_memory"):
            convert(part(stage))
    assert part(stage).float().to("cpu") is part(stage)
    assert all(map(torch.equal, stage(*inputs), expected))
    unlimited = stagepack.load_stage(bundle, 1, device_memory="1GiB")
    assert all(tensor.dtype == torch.float64 for tensor in unlimited.double().parameters())


def test_a_kernel_that_does_not_tell_what_is_written(bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_leases, "_PAGEMAP_PATH", "/nowhere")
    stage = stagepack.load_stage(bundle, 1, device_memory="8MB")
    inputs = _inputs(stage, torch.randn(2, 768))
    expected = stagepack.load_stage(bundle, 1)(*inputs)
    assert all(map(torch.equal, stage(*inputs), expected))


def test_a_file_that_cannot_be_read_fails_one_call(bundle: Bundle) -> None:
    class FailingReader(FolderReader):
        fails = False

        def read_into(self, file_name: str, start: int, memory: memoryview) -> None:
            if self.fails:
                self.fails = False
                raise OSError("the disk is gone")
            super().read_into(file_name, start, memory)

    reader = FailingReader(bundle.path)
    loading = Loading(options=LoadOptions(device_memory=12_000_000, runtime="torch"))
    loading.shared.get(FolderReader, lambda: reader)
    prepared = prepare(bundle, loading)
    pipeline = Pipeline(bundle, [stage.finish(verify=True) for stage in prepared.values()], [])
    x = torch.randn(2, 768)
    expected = stagepack.load(bundle)(x)
    assert torch.equal(pipeline(x), expected)
    reader.fails = True
    with pytest.raises(DigestError, match="the disk is gone"):
        _call_twice(pipeline, x)  # the weights of the next call are read ahead
    assert pipeline(x).shape == expected.shape


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device_memory": 100_000}, r"the weights need at least [\d.]+ MB on one device, found 100.0 kB"),
        ({"device_memory": "much"}, "device_memory: expected a number of bytes such as 24GiB"),
        ({"device_memory": "1GB", "stream": True}, "device_memory excludes stream"),
        ({"device_memory": "1GB", "compile": True}, "device_memory excludes compile"),
        ({"device_memory": "1GB", "runtime": "onnxruntime"}, "leave out device_memory"),
    ],
)
def test_options_are_refused(bundle: Bundle, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        stagepack.load(bundle, **options)


@st.composite
def _uses(draw: st.DrawFn) -> list[WeightUse]:
    uses, first_step = [], 0
    for _ in range(draw(st.integers(1, 12))):
        first_step += draw(st.integers(0, 3))
        span = draw(st.sampled_from([0, 0, 0, 1, 2, 30]))
        byte_count = draw(st.integers(1, 12 * PLACE_ALIGNMENT))
        must_stay = draw(st.integers(0, 5)) == 0
        uses.append(
            WeightUse(byte_count=byte_count, first_step=first_step, last_step=first_step + span, must_stay=must_stay)
        )
    return uses


@given(_uses(), st.integers(0, 100 * PLACE_ALIGNMENT))
def test_weights_in_use_never_share_a_place(uses: list[WeightUse], extra_bytes: int) -> None:
    memory_bytes = least_bytes(uses) + extra_bytes
    plan = plan_window(uses, memory_bytes)
    residency = plan.residency(uses)
    assert residency.resident_bytes + plan.window_bytes <= memory_bytes
    assert residency.resident_bytes + residency.streamed_bytes == sum(use.byte_count for use in uses)
    streamed = [(use, position) for use, position in zip(uses, plan.positions, strict=True) if position is not None]
    for index, (use, position) in enumerate(streamed):
        assert position % plan.window_bytes + use.byte_count <= plan.window_bytes
        for earlier_use, earlier_position in streamed[:index]:
            if earlier_use.last_step >= use.first_step:
                assert position + use.place_bytes - earlier_position <= plan.window_bytes


def _call_twice(pipeline: Pipeline, x: torch.Tensor) -> None:
    pipeline(x)
    pipeline(x)


def _inputs(stage: Any, x: torch.Tensor) -> list[torch.Tensor]:
    return [torch.ones(value.shape) if value.shape != x.shape else x for value in stage.graph.inputs]


def _private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) * 1024
