"""``stages="layers"``: a stage for each layer, whole, in any kind of model."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.errors import CutError
from stagepack.format.rules import split_call_path
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from stagepack.roads.recut import whole_graph
from tests.cli.entry_point_model import translator
from tests.modules import module_of
from tests.text.generating_families import POSITIONS, make_model, make_prompts
from tests.zoo.architectures.build import SMALL, pixels, table, tokens
from tests.zoo.architectures.decoders import llama
from tests.zoo.case import Case, answers, assert_equal, captured_answers, files
from tests.zoo.cases import named
from tests.zoo.test_zoo import needless_sizes, tensors_sent_for_sizes

WIDTH = 8


def linear() -> torch.nn.Module:
    return torch.nn.Linear(WIDTH, WIDTH)


def mlp() -> torch.nn.Sequential:
    return torch.nn.Sequential(linear(), torch.nn.ReLU(), linear())


class Layer(torch.nn.Module):
    """A layer with heads side by side, and with layers one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(linear() for _ in range(2))
        self.steps = torch.nn.ModuleList(mlp() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + sum(head(x) for head in self.heads)
        for step in self.steps:
            x = x + step(x)
        return x


def in_a_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.children():
        x = layer(x)
    return x


def alternating(self: Any, x: torch.Tensor) -> torch.Tensor:
    for attention, norm, feed_forward in zip(self.attentions, self.norms, self.feed_forwards, strict=True):
        x = feed_forward(norm(attention(x))) + x
    return x


def side_by_side(self: Any, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([expert(x) for expert in self.experts]).sum(0)


def three_times(self: Any, x: torch.Tensor) -> torch.Tensor:
    for _ in range(3):
        x = self.norm(x + self.up(x).relu())
    return x


def of_functions(self: Any, x: torch.Tensor) -> torch.Tensor:
    for index in range(5):
        up, down = getattr(self, f"up{index}"), getattr(self, f"down{index}")
        x = x + torch.nn.functional.gelu(torch.nn.functional.layer_norm(x, (WIDTH,)) @ up) @ down
    return x.softmax(-1)


def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        self.count.add_(1)
        x = layer(x * self.count) + self.count
    return x


def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The second and the third layer use one buffer, and write it."""
    for index, layer in enumerate(self.layers):
        is_scaled = index in (1, 2)
        x = layer(x * self.scale if is_scaled else x)
        if is_scaled:
            self.scale.add_(x.mean())
    return x


class Residual(torch.nn.Module):
    """A residual block that adds in place."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.convolution = torch.nn.Conv2d(channels, width, 3, padding=1)
        self.norm = torch.nn.BatchNorm2d(width)
        self.shortcut = torch.nn.Conv2d(channels, width, 1) if channels != width else torch.nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.convolution(x))
        y += self.shortcut(x)
        return torch.relu_(y)


def residual_stages() -> torch.nn.Module:
    """Stages of residual blocks as torchvision names them."""
    blocks = ((3, 4), (4, 4)), ((4, 6), (6, 6), (6, 6)), ((6, 8),)
    stages = {
        f"layer{index}": torch.nn.Sequential(*itertools.starmap(Residual, sizes)) for index, sizes in enumerate(blocks)
    }
    return module_of(in_a_row, **stages, head=torch.nn.Flatten())


def layers_of(make: Callable[[], torch.nn.Module], count: int) -> torch.nn.ModuleList:
    return torch.nn.ModuleList(make() for _ in range(count))


def weights(count: int) -> dict[str, torch.Tensor]:
    names = (f"{name}{index}" for index in range(count) for name in ("up", "down"))
    return {name: torch.nn.Parameter(torch.randn(WIDTH, WIDTH)) for name in names}


def own(name: str, make: Callable[[], torch.nn.Module], *shape: int) -> Case:
    """A model of our own, with an input of this shape."""
    return Case(
        name=name, row="layers", build=lambda: (make().eval(), Inputs(args=(torch.randn(shape or (2, WIDTH)),)))
    )


def numbered(path: str, count: int) -> list[str]:
    return [f"{path}.{index}" for index in range(count)]


STAGES = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [3, 2], "layer_type": "bottleneck"}
RESNET = table("layers", {"resnet": ("ResNetModel", STAGES, pixels(64))})
PATTERN = ["sliding_attention", "sliding_attention", "full_attention"]
GEMMA = table(
    "layers",
    {
        "gemma": (
            "Gemma3ForCausalLM",
            {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4, "layer_types": PATTERN},
            tokens(use_cache=False),
        )
    },
)
# Each model with its layers; of a model that names none, their number.
MODELS: list[tuple[Case, list[str] | int]] = [
    (named("encoders-minilm")[0], numbered("encoder.layer", 6)),
    (llama(12), numbered("model.layers", 12)),
    (named("encoder-decoders-t5")[0], [*numbered("encoder.block", 2), *numbered("decoder.block", 2)]),
    (named("mixture-of-experts-mixtral")[0], numbered("model.layers", 3)),
    (named("mixture-of-experts-deepseek-v3")[0], numbered("model.layers", 3)),
    (GEMMA[0], numbered("model.layers", 3)),
    (RESNET[0], [*numbered("encoder.stages.0.layers", 3), *numbered("encoder.stages.1.layers", 2)]),
    (named("encoders-albert")[0], 3),
    (named("encoders-mobilebert")[0], numbered("encoder.layer", 3)),
    (named("encoders-bigbird")[0], numbered("encoder.layer", 3)),
    (named("vision-superpoint")[0], numbered("encoder.conv_blocks", 4)),
    (own("residual", residual_stages, 2, 3, 8, 8), [*numbered("layer0", 2), *numbered("layer1", 3), "layer2.0"]),
    (own("mlp", lambda: torch.nn.Sequential(*mlp(), torch.nn.ReLU(), linear())), ["0", "2", "4"]),
    (own("lists-inside", lambda: torch.nn.Sequential(linear(), *layers_of(Layer, 4), linear())), ["1", "2", "3", "4"]),
    (
        own("encoder-and-head", lambda: torch.nn.Sequential(torch.nn.Sequential(*layers_of(Layer, 3)), linear())),
        numbered("0", 3),
    ),
    (own("no-list", lambda: module_of(in_a_row, block1=Layer(), block2=Layer())), ["block1", "block2"]),
    (
        own(
            "alternating",
            lambda: module_of(
                alternating,
                attentions=layers_of(Layer, 3),
                norms=layers_of(lambda: torch.nn.LayerNorm(WIDTH), 3),
                feed_forwards=layers_of(mlp, 3),
            ),
        ),
        [*numbered("attentions", 3)],
    ),
    (own("shared", lambda: module_of(three_times, up=linear(), norm=torch.nn.LayerNorm(WIDTH))), 3),
    (own("functions", lambda: module_of(of_functions, **weights(5))), 5),
]


def models() -> list[Any]:
    return [
        pytest.param(case, layers, id=case.name, marks=[] if case.row == "layers" else pytest.mark.slow)
        for case, layers in MODELS
    ]


def stages_of(bundle: stagepack.Bundle, path: str) -> set[int]:
    """The stages with the nodes of a module, without what is computed again."""
    plan = bundle.entry_point.plan
    assert plan is not None
    graph = whole_graph(bundle)
    inside = {
        number
        for number, node in enumerate(graph.nodes)
        if f"{split_call_path(graph.scopes[node.scope].path)[0]}.".startswith(f"{path}.")
    }
    return {
        stage_number
        for stage_number, stage in enumerate(plan.stages)
        for first, count in stage.nodes
        if not inside.isdisjoint(range(first, first + count))
    }


@pytest.mark.parametrize(("case", "layers"), models())
def test_each_layer_is_a_stage(case: Case, layers: list[str] | int, tmp_path: Path) -> None:
    capture = case.capture()
    calls = [capture.inputs] * 2
    wanted = captured_answers(capture, calls)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages="layers"))
    if isinstance(layers, int):
        assert len(bundle.stages) == layers
    else:
        assert [stages_of(bundle, path) for path in layers] == [{number} for number in range(len(bundle.stages))]
    assert_equal(answers(stagepack.load(bundle, types=case.classes()), calls), wanted)
    assert not needless_sizes(bundle)
    assert not tensors_sent_for_sizes(bundle)
    for number in range(1, len(bundle.stages)):
        crossing = [edge for edge in bundle.edges if edge.producer is not None and edge.producer < number]
        crossing = [edge for edge in crossing if any(consumer >= number for consumer in edge.consumers)]
        assert len(crossing) <= 2, (number, [edge.name for edge in crossing])
    uncut = stagepack.recut(bundle, out=tmp_path / "1.stagepack", stages=1)
    again = stagepack.recut(uncut, out=tmp_path / "again.stagepack", stages="layers")
    assert files(again.path) == files(bundle.path)
    same = stagepack.recut(uncut, out=tmp_path / "same.stagepack", plan=bundle.entry_point.plan)
    assert files(same.path) == files(bundle.path)
    assert stagepack.plan(uncut, stages="layers") == bundle.entry_point.plan


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (linear, "the model has no layers for 'layers'.*pass stages=N or split_at"),
        (lambda: torch.nn.Sequential(linear()), "the model has no layers"),
        (lambda: module_of(side_by_side, experts=layers_of(mlp, 3)), "the model has no layers"),
        (
            lambda: module_of(counted, layers=layers_of(linear, 3), count=torch.zeros(1)),
            "'count' is written, so .* no cut between two of the 3 layers is possible",
        ),
    ],
)
def test_a_model_without_layers_is_refused(make: Callable[[], torch.nn.Module], message: str, tmp_path: Path) -> None:
    model, given = make().eval(), (torch.randn(2, WIDTH),)
    with pytest.raises(CutError, match=message):
        stagepack.export(model, given, out=tmp_path / "m.stagepack", stages="layers")
    bundle = stagepack.export(model, given, out=tmp_path / "m.stagepack")
    with pytest.raises(CutError, match=message):
        stagepack.recut(bundle, out=tmp_path / "cut.stagepack", stages="layers")


def test_layers_that_write_one_buffer_stay_together(tmp_path: Path) -> None:
    model = module_of(scaled, layers=layers_of(mlp, 5), scale=torch.ones(1)).eval()
    bundle = stagepack.export(model, (torch.randn(2, WIDTH),), out=tmp_path / "m.stagepack", stages="layers")
    assert [stages_of(bundle, path) for path in numbered("layers", 5)] == [{0}, {1}, {1}, {2}, {3}]
    assert [stage.state for stage in bundle.stages] == [(), ("scale",), (), ()]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stages": "layer"}, "stages: expected a whole number or 'layers', found 'layer'"),
        ({"stages": "layers", "memory": [1]}, "pass stages=N too"),
        ({"stages": "layers", "split_at": ["a"]}, "found stages and split_at"),
    ],
)
def test_options_that_do_not_go_with_layers_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(CutError, match=message):
        CutOptions(**options)


def test_an_entry_point_alone_is_cut_by_layers(tmp_path: Path) -> None:
    model, entry_points = translator()
    out = tmp_path / "m.stagepack"
    bundle = stagepack.export(model.eval(), entry_points=entry_points, out=out, stages={"encode": "layers"})
    assert [len(bundle.select(name).stages) for name in ("encode", "decode")] == [2, 1]


@pytest.mark.parametrize("family", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_the_cache_of_a_layer_is_in_its_stage(family: str, tmp_path: Path) -> None:
    model, prompts = make_model(family), make_prompts(family, 4)
    bundle = stagepack.export(
        model, out=tmp_path / "m.stagepack", stages="layers", generate=POSITIONS, generate_batch=4
    )
    cut = bundle if family == "llama" else bundle.select("decode")
    caches = [{name.split(".")[1] for name in stage.state if name.endswith(".tokens")} for stage in cut.stages]
    assert caches == [{"0"}, {"1"}]
    uncut = bundle
    for entry_point in bundle.entry_points:
        uncut = stagepack.recut(uncut.select(entry_point.name), out=tmp_path / entry_point.name, stages=1)
    load: Any = stagepack.load if family == "llama" else stagepack.load_entry_points
    found, wanted = (load(path).generate(**prompts, max_new_tokens=6) for path in (bundle.path, uncut.path))
    assert torch.equal(found, wanted)


def test_residual_blocks_of_a_diffusion_model_are_layers(tmp_path: Path) -> None:
    diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
    torch.manual_seed(0)
    kinds = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
    sizes = {"sample_size": 16, "layers_per_block": 2, "block_out_channels": (8, 16), "norm_num_groups": 4}
    unet = diffusers.UNet2DModel(**sizes, **kinds)
    model, x = module_of(lambda self, x: self.unet(x, 1).sample, unet=unet).eval(), torch.randn(1, 3, 16, 16)
    bundle = stagepack.export(model, (x,), out=tmp_path / "m.stagepack", stages="layers")
    counts = {"down_blocks.0": 2, "down_blocks.1": 2, "mid_block": 2, "up_blocks.0": 3, "up_blocks.1": 3}
    blocks = [path for name, count in counts.items() for path in numbered(f"unet.{name}.resnets", count)]
    assert [stages_of(bundle, path) for path in blocks] == [{number} for number in range(12)]
    with torch.no_grad():
        assert torch.equal(stagepack.load(bundle)(x), model(x))
