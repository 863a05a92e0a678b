"""Make a small diffusion pipeline and train it to draw coloured shapes: ``python -m examples.diffusion.train OUT [--steps 0]``.

OUT is a folder as `DiffusionPipeline.save_pretrained` of diffusers writes it: a T5 text encoder, a PixArt transformer, an autoencoder, a
tokenizer and a scheduler. Without steps, the weights are random. Needs `diffusers`, `transformers` and `pillow`.
"""

import argparse
import itertools
import time
from collections.abc import Iterator

import torch
from diffusers import AutoencoderKL, DPMSolverMultistepScheduler, PixArtAlphaPipeline, PixArtTransformer2DModel
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, T5Config, T5EncoderModel

from examples.diffusion.shapes import COLORS, SCALES, SHAPES, SIZE, scenes

TOKENS = 12  # of each caption, with padding
PICTURES = 4000
SPECIAL_TOKENS = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
WORDS = ("a", "on", *SCALES, *COLORS, *SHAPES)


def main() -> None:
    """Make the pipeline, train it, write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", help="folder of the pipeline")
    parser.add_argument(
        "--steps", type=int, default=4000, help="of the transformer; the autoencoder takes a third of them"
    )
    options = parser.parse_args()
    pipeline = make_pipeline()
    if options.steps:
        captions, pictures = zip(*itertools.islice(scenes(seed=0), PICTURES), strict=True)
        train_autoencoder(pipeline, torch.stack(pictures), options.steps // 3)
        train_transformer(pipeline, list(captions), torch.stack(pictures), options.steps)
    pipeline.save_pretrained(options.out)


def make_pipeline() -> PixArtAlphaPipeline:
    """The models with random weights."""
    torch.manual_seed(0)
    text_encoder = T5EncoderModel(
        T5Config(
            vocab_size=len(WORDS) + len(SPECIAL_TOKENS),
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=2,
            num_heads=4,
            dropout_rate=0.0,
        )
    )
    autoencoder = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(16, 32, 64),
        layers_per_block=1,
        norm_num_groups=8,
        latent_channels=4,
        sample_size=SIZE,
    )
    transformer = PixArtTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=32,
        in_channels=4,
        out_channels=4,
        num_layers=6,
        sample_size=SIZE // 4,
        patch_size=2,
        cross_attention_dim=128,
        caption_channels=text_encoder.config.d_model,
    )
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True)
    return PixArtAlphaPipeline(make_tokenizer(), text_encoder, autoencoder, transformer, scheduler)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each word."""
    vocabulary = {word: number for number, word in enumerate((*SPECIAL_TOKENS.values(), *WORDS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, SPECIAL_TOKENS["unk_token"]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=TOKENS, **SPECIAL_TOKENS)


def train_autoencoder(pipeline: PixArtAlphaPipeline, pictures: torch.Tensor, steps: int) -> None:
    """Teach the autoencoder the pictures, and measure how large its latents are."""
    autoencoder = pipeline.vae.train()
    for batch in progress("autoencoder", autoencoder.parameters(), steps, len(pictures), batch_size=32):
        latents = autoencoder.encode(pictures[batch.rows]).latent_dist
        decoded = autoencoder.decode(latents.sample()).sample
        batch.minimize(
            (decoded - pictures[batch.rows]).abs().mean() + 1e-4 * latents.kl().mean() / latents.mean[0].numel()
        )
    autoencoder.eval()
    autoencoder.register_to_config(scaling_factor=1 / encode(pipeline, pictures[:256], scale=1.0).std().item())


@torch.no_grad()
def encode(pipeline: PixArtAlphaPipeline, pictures: torch.Tensor, scale: float) -> torch.Tensor:
    """The latents of pictures: `[picture, 4, SIZE / 4, SIZE / 4]`."""
    return torch.cat([pipeline.vae.encode(rows).latent_dist.mean for rows in pictures.split(64)]) * scale


def train_transformer(pipeline: PixArtAlphaPipeline, captions: list[str], pictures: torch.Tensor, steps: int) -> None:
    """Teach the transformer and the text encoder which way noise leads to the latents of a picture (flow matching)."""
    latents = encode(pipeline, pictures, pipeline.vae.config.scaling_factor)
    texts = pipeline.tokenizer(captions, padding="max_length", return_tensors="pt")
    no_text = pipeline.tokenizer([""], padding="max_length", return_tensors="pt")
    models = torch.nn.ModuleList([pipeline.transformer, pipeline.text_encoder]).train()
    for batch in progress("transformer", models.parameters(), steps, len(captions), batch_size=64):
        # A tenth learns to draw without a text, for guidance.
        without_text = (torch.rand(len(batch.rows)) < 0.1)[:, None]
        ids = torch.where(without_text, no_text.input_ids, texts.input_ids[batch.rows])
        mask = torch.where(without_text, no_text.attention_mask, texts.attention_mask[batch.rows])
        noise = torch.randn_like(latents[batch.rows])
        share = torch.randn(len(batch.rows)).sigmoid()
        noisy = torch.lerp(latents[batch.rows], noise, share[:, None, None, None])
        flow = pipeline.transformer(
            noisy,
            encoder_hidden_states=pipeline.text_encoder(ids, attention_mask=mask).last_hidden_state,
            encoder_attention_mask=mask,
            timestep=share * 1000,
            added_cond_kwargs={"resolution": None, "aspect_ratio": None},
        ).sample
        batch.minimize(torch.nn.functional.mse_loss(flow, noise - latents[batch.rows]))
    models.eval()


class Batch:
    """The rows of a step, and the step."""

    def __init__(self, rows: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self.rows = rows
        self.loss = 0.0
        self._optimizer = optimizer

    def minimize(self, loss: torch.Tensor) -> None:
        """Take a step against the gradient of a loss."""
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.loss = loss.item()


def progress(
    name: str, parameters: Iterator[torch.nn.Parameter], steps: int, row_count: int, batch_size: int
) -> Iterator[Batch]:
    """Batches of random rows; prints the mean loss now and then."""
    optimizer = torch.optim.AdamW(parameters, lr=2e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, steps, pct_start=0.1)
    losses, start = [], time.perf_counter()
    for step in range(1, steps + 1):
        batch = Batch(torch.randint(row_count, (batch_size,)), optimizer)
        yield batch
        schedule.step()
        losses.append(batch.loss)
        if step % max(1, steps // 10) == 0:
            seconds = (time.perf_counter() - start) / step
            print(
                f"{name}, step {step}: loss {sum(losses[-50:]) / len(losses[-50:]):.4f}, {seconds:.2f} s a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
