"""Export a PixArt pipeline as a bundle of three entry points: ``python -m examples.diffusion.export PIPELINE OUT``.

PIPELINE is a folder or a name on the Hugging Face Hub. OUT becomes a folder with the bundle and what is no model: the tokenizer and the
settings of the scheduler. Needs `diffusers` and `transformers`; what reads OUT needs no source code of the models.
"""

import argparse
from pathlib import Path

import torch
from diffusers import PixArtAlphaPipeline

import stagepack


class Painter(torch.nn.Module):
    """The models of the pipeline, and what it does with their inputs and outputs."""

    def __init__(self, pipeline: PixArtAlphaPipeline) -> None:
        super().__init__()
        self.text_encoder = pipeline.text_encoder
        self.transformer = pipeline.transformer
        self.autoencoder = pipeline.vae

    def encode(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Texts `[batch, token]` -> their hidden states `[batch, token, hidden]`."""
        return self.text_encoder(ids, attention_mask=mask).last_hidden_state

    def denoise(
        self, latents: torch.Tensor, timestep: torch.Tensor, hidden_states: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Noisy latents `[batch, channel, height, width]` -> the output that a step of the scheduler takes, of the same shape."""
        output = self.transformer(
            latents,
            encoder_hidden_states=hidden_states,
            encoder_attention_mask=mask,
            timestep=timestep.expand(latents.shape[0]),
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        return output[:, : latents.shape[1]]  # without a learned variance

    def decode(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents -> pictures `[batch, 3, height, width]` from 0 to 1."""
        pictures = self.autoencoder.decode(latents / self.autoencoder.config.scaling_factor).sample
        return (pictures * 0.5 + 0.5).clamp(0, 1)


def inputs_of(painter: Painter, token_count: int) -> dict[str, stagepack.Inputs]:
    """Example inputs of each entry point, for any number of pictures."""
    config, dtype = painter.transformer.config, painter.transformer.dtype
    batch = {0: torch.export.Dim("batch", min=1, max=32)}
    ids, mask = torch.ones(2, token_count, dtype=torch.int64), torch.ones(2, token_count, dtype=torch.int64)
    latents = torch.randn(2, config.in_channels, config.sample_size, config.sample_size, dtype=dtype)
    hidden_states = torch.randn(2, token_count, config.caption_channels, dtype=dtype)
    timestep = torch.tensor(999)
    return {
        "encode": stagepack.Inputs(args=(ids, mask), dynamic_shapes={"ids": batch, "mask": batch}),
        "denoise": stagepack.Inputs(
            args=(latents, timestep, hidden_states, mask),
            dynamic_shapes={"latents": batch, "timestep": None, "hidden_states": batch, "mask": batch},
        ),
        "decode": stagepack.Inputs(args=(latents,), dynamic_shapes={"latents": batch}),
    }


def main() -> None:
    """Load the pipeline, export it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pipeline")
    parser.add_argument("out", type=Path)
    parser.add_argument("--stages", type=int, default=2, help="of the transformer")
    parser.add_argument("--tokens", type=int, help="of a text, with padding; by default as many as the tokenizer takes")
    parser.add_argument("--dtype", default="float32", help="of the weights, such as bfloat16")
    options = parser.parse_args()
    pipeline = PixArtAlphaPipeline.from_pretrained(options.pipeline, dtype=getattr(torch, options.dtype))
    painter = Painter(pipeline).eval()
    options.out.mkdir(parents=True, exist_ok=True)
    bundle = stagepack.export(
        painter,
        entry_points=inputs_of(painter, options.tokens or pipeline.tokenizer.model_max_length),
        out=options.out / "painter.stagepack",
        stages={"denoise": options.stages},
        overwrite=True,
    )
    pipeline.scheduler.save_pretrained(options.out)
    pipeline.tokenizer.backend_tokenizer.save(str(options.out / "tokenizer.json"))
    for entry_point in bundle.entry_points:
        weight_bytes = sum(stage.weight_bytes for stage in entry_point.stages)
        print(f"{entry_point.name}: {len(entry_point.stages)} stages, {weight_bytes / 1e6:,.1f} MB")


if __name__ == "__main__":
    main()
