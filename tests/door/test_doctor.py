"""`stagepack doctor` takes every SOURCE of `stagepack export`, and failed captures lead to it or to a recipe."""

import importlib
import json
from pathlib import Path

import pytest
import torch

import stagepack
from tests.hostile.attack import command_fails, run

MODEL = """
import torch
import stagepack


class Pair(torch.nn.Module):
    def encode(self, x):
        return x + 1

    def decode(self, x):
        return x * 2 if x.sum() > 0 else x


class Data(torch.nn.Module):
    def forward(self, x):
        return x[: int(x[0])]


class Odd(torch.nn.Module):
    def forward(self, x):
        raise RuntimeError("odd")


def pair():
    return Pair(), {"encode": stagepack.Inputs(args=(torch.ones(2),)), "decode": stagepack.Inputs(args=(torch.ones(2),))}


def data():
    return Data(), (torch.tensor([2, 1, 1]),)


def odd():
    return Odd(), (torch.ones(2),)


def linear():
    return torch.nn.Linear(3, 2), (torch.ones(2, 3),)
"""

PIPELINE = """
import stagepack
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel


def pipeline():
    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        block_out_channels=(8, 16), layers_per_block=1, sample_size=8, cross_attention_dim=8, norm_num_groups=2, attention_head_dim=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    vae = AutoencoderKL(block_out_channels=[8], norm_num_groups=2, sample_size=16)
    return StableDiffusionPipeline(
        vae=vae.eval(), unet=unet.eval(), text_encoder=None, tokenizer=None, scheduler=DDIMScheduler(clip_sample=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )


def with_inputs():
    return pipeline(), {
        "unet": stagepack.Inputs(args=(torch.randn(2, 4, 8, 8), torch.tensor(3), torch.randn(2, 5, 8))),
        "vae.decode": stagepack.Inputs(args=(torch.randn(2, 4, 8, 8),)),
    }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with models."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models.py").write_text(MODEL)
    return tmp_path


# draft_export of torch leaves its log open.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_each_entry_point_is_diagnosed(folder: Path) -> None:
    done = run("doctor", "models.py:pair")
    assert done.exit_code == 1
    encode, decode = done.stdout.split("entry point decode\n")
    assert encode.startswith("entry point encode\n")
    assert "stagepack export" in encode
    assert "stagepack export" not in decode


def test_a_program_is_written(folder: Path) -> None:
    torch.export.save(torch.export.export(torch.nn.Linear(3, 2), (torch.ones(2, 3),)), "net.pt2")
    done = run("doctor", "net.pt2", "--json")
    assert done.exit_code == 0, done.output
    attempts = json.loads(done.stdout)["attempts"]
    assert [(attempt["way"], attempt["error"]) for attempt in attempts] == [("stagepack export", None)]


def test_a_failed_capture_ends_with_the_recipe_or_with_doctor(folder: Path) -> None:
    command_fails("export", "models.py:data", "-o", "m", says="advice: the line makes a number of a tensor's data")
    command_fails("export", "models.py:pair", "-o", "m", says="advice: the line asks a tensor for an answer")
    command_fails("export", "models.py:odd", "-o", "m", says="run 'stagepack doctor SOURCE', which tries other ways$")


def test_strict_has_a_flag(folder: Path) -> None:
    done = run("export", "models.py:linear", "--strict", "-o", "m", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["captured_by"] == "torch.export.export, strict=True"
    assert stagepack.load("m")(torch.randn(2, 3)).shape == (2, 2)


def test_modules_without_forward_are_exported_by_their_parts(folder: Path) -> None:
    (folder / "parts.py").write_text(
        "import torch\ndef parts():\n    return torch.nn.ModuleDict({'unet': torch.nn.Linear(2, 2), 'vae': torch.nn.ReLU()})\n"
    )
    command_fails(
        "export",
        "parts.py:parts",
        "-o",
        "m",
        says=r"ModuleDict has no forward.*\(unet, vae\).*\{'unet': stagepack.Inputs",
    )
    (folder / "saved").mkdir()
    (folder / "saved" / "model_index.json").write_text("{}")
    command_fails("export", "./saved", "-o", "m", says=r"is a pipeline of diffusers: .*from_pretrained\('./saved'\)")


def test_a_module_with_components_is_no_pipeline(folder: Path) -> None:
    (folder / "net.py").write_text(
        "import torch\nclass Net(torch.nn.Linear):\n    @property\n    def components(self): return {'part': torch.nn.ReLU()}\n"
        "def net():\n    return Net(2, 2), (torch.ones(1, 2),)\n"
    )
    done = run("export", "net.py:net", "-o", "m")
    assert done.exit_code == 0, done.output
    assert [weight.names[0] for weight in stagepack.open("m").graph(0).weights] == ["weight", "bias"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_pipelines_of_diffusers_are_sources(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("diffusers", reason="diffusers is not installed")
    (folder / "pipelines.py").write_text(PIPELINE)
    assert "ModuleDict has no forward" in run("export", "pipelines.py:pipeline", "-o", "m").stderr
    done = run("export", "pipelines.py:with_inputs", "-o", "m")
    assert done.exit_code == 0, done.output
    assert "entry point vae_decode" in done.stdout
    done = run("doctor", "pipelines.py:with_inputs")
    assert done.exit_code == 0, done.output
    monkeypatch.syspath_prepend(str(folder))
    pipeline, inputs = importlib.import_module("pipelines").with_inputs()
    bundle = stagepack.export(pipeline, entry_points=inputs, out="same")
    loaded = stagepack.load_entry_points(bundle)
    with torch.no_grad():
        assert torch.equal(loaded["unet"](*inputs["unet"].args).sample, pipeline.unet(*inputs["unet"].args).sample)
        assert torch.equal(
            loaded["vae_decode"](*inputs["vae.decode"].args)[0], pipeline.vae.decode(*inputs["vae.decode"].args)[0]
        )
