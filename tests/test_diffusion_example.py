"""The diffusion pipeline of the examples: exported, and run by stages in processes, it draws the pictures that diffusers draws."""

import sys
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

import stagepack

TEXTS = ["a small red circle on blue", "A large green star on white "]


@pytest.mark.slow
@pytest.mark.xdist_group("distributed")
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # in diffusers
def test_the_bundle_draws_what_the_pipeline_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import PixArtAlphaPipeline  # a second of imports, for all tests if they were above

    from examples.diffusion import draw, export, train

    def run(main: object, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *map(str, arguments)])
        assert callable(main)
        main()

    run(train.main, tmp_path / "pipeline", "--steps", 0)
    run(export.main, tmp_path / "pipeline", tmp_path / "painter")
    run(draw.main, tmp_path / "painter", tmp_path / "drawn.png", *TEXTS, "--steps", 3)

    assert [
        len(entry_point.stages)
        for entry_point in stagepack.open(tmp_path / "painter" / "painter.stagepack").entry_points
    ] == [1, 2, 1]
    pipeline = PixArtAlphaPipeline.from_pretrained(tmp_path / "pipeline")
    pictures = pipeline(
        TEXTS,
        num_inference_steps=3,
        guidance_scale=4.5,
        generator=torch.manual_seed(0),
        max_sequence_length=train.TOKENS,
        use_resolution_binning=False,
    ).images
    drawn = numpy.asarray(Image.open(tmp_path / "drawn.png"))
    assert numpy.array_equal(drawn, numpy.concatenate([numpy.asarray(picture) for picture in pictures], axis=1))
    assert len(numpy.unique(drawn)) > 100
