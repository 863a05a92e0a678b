"""Models of diffusers are exported by their folders, which a pipeline has."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import stagepack
from stagepack.errors import CaptureError
from tests.hostile.attack import command_fails, run

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")
WEIGHTS = "diffusion_pytorch_model.safetensors"
UNET_INPUTS = [
    "--input", "sample=float32[batch,4,4*h,4*w]", "--input", "timestep=int64[]",
    "--input", "encoder_hidden_states=float32[batch,5,8]",
]  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pipeline of small models with random weights, as ``save_pretrained`` writes it."""
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        block_out_channels=(8, 8), layers_per_block=1, sample_size=8, cross_attention_dim=8, norm_num_groups=2,
        attention_head_dim=4, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"), mid_block_type=None,
    )  # fmt: skip
    vae = diffusers.AutoencoderKL(block_out_channels=[8], norm_num_groups=2, sample_size=16)
    scheduler = diffusers.DDIMScheduler(clip_sample=False, steps_offset=1)
    pipeline = diffusers.StableDiffusionPipeline(
        vae=vae, unet=unet, text_encoder=None, tokenizer=None, scheduler=scheduler, safety_checker=None,
        feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("diffusers") / "sd"
    pipeline.save_pretrained(folder)
    return folder


def test_a_model_of_a_pipeline_is_exported(saved: Path, tmp_path: Path) -> None:
    done = run("export", str(saved / "unet"), *UNET_INPUTS, "-o", str(tmp_path / "m"), "--stages", "2")
    assert done.exit_code == 0, done.output
    assert "torchao" not in done.stderr
    assert "accelerate" not in done.stderr
    model = diffusers.UNet2DConditionModel.from_pretrained(saved / "unet").eval()
    pipe = stagepack.load(tmp_path / "m")
    for batch, height, width in ((2, 8, 12), (3, 16, 8)):  # other numbers than those of the example
        args: tuple[Any, ...] = (
            torch.randn(batch, 4, height, width),
            torch.tensor(3),
            torch.randn(batch, 5, 8),
        )
        with torch.no_grad():
            assert torch.equal(pipe(*args)[0], model(*args)[0])
    with pytest.raises(stagepack.errors.InputError, match="expected a multiple of 4"):
        pipe(torch.randn(2, 4, 10, 8), torch.tensor(3), torch.randn(2, 5, 8))


def test_python_and_entry_points_take_the_folder(saved: Path, tmp_path: Path) -> None:
    decode = stagepack.Inputs(args=(torch.randn(1, 4, 16, 16),))
    bundle = stagepack.export(str(saved / "vae"), entry_points={"decode": decode}, out=tmp_path / "decode")
    model = diffusers.AutoencoderKL.from_pretrained(saved / "vae").eval()
    with torch.no_grad():
        assert torch.equal(stagepack.load(bundle)(*decode.args)[0], model.decode(*decode.args)[0])
    sample = {"sample": "bfloat16[2,3,16,16]"}
    half = stagepack.export(str(saved / "vae"), inputs=sample, dtype="bfloat16", out=tmp_path / "half")
    assert {weight.dtype for weight in half.graph(0).weights} == {"bfloat16"}


def test_a_model_without_inputs_names_them(saved: Path, tmp_path: Path) -> None:
    says = "UNet2DConditionModel: expected example inputs for sample, timestep, encoder_hidden_states, found none"
    command_fails("export", str(saved / "unet"), "-o", str(tmp_path / "m"), says=says)


def test_a_pipeline_names_its_models(saved: Path, tmp_path: Path) -> None:
    says = rf"is a pipeline of diffusers: export one of its models \(unet, vae\), as in 'stagepack export {saved}/unet', or "
    command_fails("export", str(saved), "-o", str(tmp_path / "m"), says=says)


def test_a_folder_that_diffusers_cannot_load_is_refused(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(saved / "vae", tmp_path / "vae"))
    sample = {"sample": "float32[2,3,16,16]"}

    def says(message: str) -> None:
        with pytest.raises(CaptureError, match=message):
            stagepack.export(str(folder), inputs=sample, out=tmp_path / "m")

    weights = load_file(folder / WEIGHTS)
    save_file({name: tensor for name, tensor in weights.items() if name != "quant_conv.weight"}, folder / WEIGHTS)
    says("does not have the weights of AutoencoderKL: quant_conv.weight is missing")
    (folder / WEIGHTS).write_bytes(b"no weights")
    says("vae: diffusers cannot load it: ")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"_class_name": "OfALaterVersion"}))
    says("has no model OfALaterVersion: install a newer one")
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(stagepack.errors.MissingPackageError, match="is a OfALaterVersion of diffusers, which is not"):
        stagepack.export(str(folder), inputs=sample, out=tmp_path / "m")
