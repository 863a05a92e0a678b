"""Cuts: again they give the bytes of a direct export, and what is computed again empties no stage and takes no weights along."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture, capture_module
from stagepack.errors import CutError
from stagepack.format.graph import value_bytes
from stagepack.format.shapes import example_sizes
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture, plan_capture
from tests.laws.picture_models import PICTURE_MODELS, FeaturePyramid, NestedUNet
from tests.modules import module_of
from tests.zoo.case import Case, files, stages_at_most
from tests.zoo.cases import ROWS, named
from tests.zoo.test_zoo import name_of, slow, tensors_sent_for_sizes

LAYERS: dict[str, Callable[[int], torch.nn.Module]] = {
    "linear": lambda width: torch.nn.Linear(width, width),
    "norm": torch.nn.LayerNorm,
    "buffer": lambda width: module_of(lambda self, x: x * self.table, table=torch.linspace(0, 1, width)),
    "none": lambda _: torch.nn.ReLU(),
}


class Layers(torch.nn.Module):
    """A model that is so small that all of it is cheaper to compute again than to send."""

    def __init__(self, layer: str, width: int, mark: int | None = None) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, width)
        self.layers = torch.nn.ModuleList(LAYERS[layer](width) for _ in range(4))
        self.mark = mark

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for index, layer in enumerate(self.layers):
            if index == self.mark:
                stagepack.split_here()
            x = torch.tanh(layer(x))
        return x


IDS = torch.arange(40).reshape(8, 5) % 16
SHAPES = {"ids": {0: torch.export.Dim("rows", min=1, max=64)}}
WAYS: dict[str, dict[str, Any]] = {
    "split_at": {"split_at": ["layers.2"]},
    "split_at each": {"split_at": [f"layers.{index}" for index in range(4)]},
    "stages": {"stages": 3},
    "policy": {"policy": lambda node: int(node.index > 2) + int(node.index > 4)},
    "split_here": {},
}


def stages_of_weights(bundle: stagepack.Bundle) -> dict[str, list[int]]:
    stages: dict[str, list[int]] = {}
    for stage_number in range(len(bundle.stages)):
        for weight in bundle.graph_file(stage_number).graph.weights:
            stages.setdefault(weight.names[0], []).append(stage_number)
    return stages


@pytest.mark.parametrize(("layer", "way"), list(itertools.product(LAYERS, WAYS)))
@torch.no_grad()
def test_no_stage_is_emptied_and_each_weight_is_in_one(layer: str, way: str, tmp_path: Path) -> None:
    model = Layers(layer, 8, mark=2 if way == "split_here" else None).eval().double()
    bundle = stagepack.export(model, (IDS,), dynamic_shapes=SHAPES, out=tmp_path / "b.stagepack", **WAYS[way])
    assert all(stage.nodes for stage in bundle.stages)
    stages = stages_of_weights(bundle)
    # A buffer may be in several stages, unless its module is named.
    assert all(len(places) == 1 for name, places in stages.items() if "table" not in name or "split_at" in way)
    if way != "policy":
        first_stages = [stages[name][0] for name in ["embed.weight", *model.state_dict()] if name in stages]
        assert first_stages == sorted(first_stages)
    assert torch.equal(stagepack.load(bundle)(IDS), model(IDS))
    if way in ("split_at", "split_here"):
        assert {places[0] for name, places in stages.items() if name.startswith(("layers.2", "layers.3"))} <= {1}
        assert {places[0] for name, places in stages.items() if name.startswith(("embed", "layers.0", "layers.1"))} == {
            0
        }
    plan = bundle.entry_point.plan
    again = stagepack.recut(bundle, out=tmp_path / "again.stagepack", plan=plan)
    assert [stage.nodes for stage in again.stages] == [stage.nodes for stage in bundle.stages]


def tensor_bytes(bundle: stagepack.Bundle) -> int:
    """The bytes that stages send, at the sizes of the example; to each stage anew."""
    sizes = example_sizes(bundle.entry_point.symbols)
    return sum(value_bytes(edge, sizes) * len(edge.consumers) for edge in bundle.edges if edge.producer is not None)


# A nested UNet has the skip connections of a UNet several times, and no others.
PICTURE_CASES = [
    pytest.param(
        make,
        stage_counts,
        marks=pytest.mark.slow if stage_counts == (2, 3, 4, 5, 6) or make is NestedUNet else (),
        id=f"{make.__name__}-{stage_counts}",
    )
    for make in PICTURE_MODELS
    for stage_counts in ((2, 3, 5), (2, 3, 4, 5, 6))
]


@pytest.mark.parametrize(("make", "stage_counts"), PICTURE_CASES)
@torch.no_grad()
def test_no_picture_model_sends_a_tensor_for_its_size(
    make: type[torch.nn.Module], stage_counts: tuple[int, ...], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    picture, larger = torch.randn(2, 3, 36, 44), torch.randn(3, 3, 52, 64)
    sizes = {0: torch.export.Dim("rows", max=8)}
    sizes |= {dim: 4 * torch.export.Dim(name, min=2, max=32) for dim, name in ((2, "height"), (3, "width"))}
    capture = capture_module(make().eval(), Inputs(args=(picture,), dynamic_shapes={"x": sizes}))
    program = capture.program.module()
    wanted = [pytree.tree_leaves(program(given)) for given in (picture, larger)]
    less = []
    for stages in stage_counts:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("stagepack.partition.recipes.find_size_nodes", lambda _: frozenset())
            before = export_capture(capture, out=tmp_path / f"{stages}.old", cut_options=CutOptions(stages=stages))
        for way in ({"stages": stages}, {"plan": before.entry_point.plan}):
            name = f"{stages}-{min(way)}"
            bundle = stagepack.recut(before, out=tmp_path / name, **way)
            if stages == stage_counts[0]:
                direct = export_capture(capture, out=tmp_path / f"{name}-direct", cut_options=CutOptions(**way))
                assert direct.digest == bundle.digest
            assert not tensors_sent_for_sizes(bundle)
            pipe = stagepack.load(bundle)
            for given, leaves in zip((picture, larger), wanted, strict=True):
                assert all(map(torch.equal, pytree.tree_leaves(pipe(given)), leaves))
        less.append(tensor_bytes(before) - tensor_bytes(bundle))  # of the same cut
    assert min(less) > -17, less  # two integers
    assert max(less) > 20_000 or make is FeaturePyramid, less


def layer_cuts(capture: Capture) -> list[CutOptions]:
    """A stage for each layer, if the model has layers."""
    cut_options = CutOptions(stages="layers")
    try:
        plan_capture(capture, cut_options)
    except CutError as error:
        assert "no layers" in str(error) or "no cut between two" in str(error)  # noqa: PT017 - both ends are right
        return []
    return [cut_options]


# Models of many nodes.
LARGE = named(
    "containers-cache-of-any-length",
    "containers-static-cache-as-an-input",
    "decoders-llama-tied",
    "encoder-decoders-t5",
)
CASES = [*(case for case in ROWS[::32] if case not in LARGE), *slow([*ROWS[16::32], *ROWS[8::16], *LARGE])]


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_every_cut_from_every_cut(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    five, three = stages_at_most(5, capture), stages_at_most(3, capture)
    cuts = [
        CutOptions(),
        CutOptions(stages=stages_at_most(2, capture)),
        CutOptions(stages=five, shared="transmit"),
        CutOptions(stages=three, speeds=[1, 3, 2][:three], memory=["1GiB", "24GB", "1GB"][:three]),
        *layer_cuts(capture),
    ]
    direct = [tmp_path / f"{index}.stagepack" for index in range(len(cuts))]
    for cut_options, path in zip(cuts, direct, strict=True):
        export_capture(capture, out=path, cut_options=cut_options)
    for source in direct:
        for cut_options, expected_path in zip(cuts, direct, strict=True):
            again = stagepack.recut(
                source,
                out=tmp_path / "again.stagepack",
                stages=cut_options.stages,
                shared=cut_options.shared,
                speeds=cut_options.speeds,
                memory=cut_options.memory,
                overwrite=True,
            )
            assert files(again.path) == files(expected_path), (source.name, expected_path.name)
