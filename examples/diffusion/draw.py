"""Draw pictures with an exported pipeline: ``python -m examples.diffusion.draw FOLDER OUT.png TEXT [TEXT ...]``.

FOLDER is one that `examples.diffusion.export` wrote. The stages of the transformer run in processes of their own. Needs `tokenizers`,
`pillow`, and the schedulers of `diffusers`, but no source code of the models.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy
import torch
from diffusers import DPMSolverMultistepScheduler
from PIL import Image
from tokenizers import Tokenizer

import stagepack


def main() -> None:
    """Draw a picture for each text, side by side."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.5, help="how much the pictures follow the texts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--enlarge", type=int, default=1, help="draw each pixel as a square of so many")
    options = parser.parse_args()
    pictures = draw(options.folder, options.texts, options.steps, options.guidance, options.seed)
    pixels = (numpy.concatenate(list(pictures.permute(0, 2, 3, 1).float().numpy()), axis=1) * 255).round()
    image = Image.fromarray(pixels.astype(numpy.uint8))
    image.resize((image.width * options.enlarge, image.height * options.enlarge), Image.Resampling.NEAREST).save(
        options.out
    )


@torch.no_grad()
def draw(folder: Path, texts: list[str], steps: int, guidance: float, seed: int) -> torch.Tensor:
    """Pictures `[text, 3, height, width]` from 0 to 1."""
    bundle = stagepack.open(folder / "painter.stagepack")
    encode, decode = (stagepack.load(bundle.select(name)) for name in ("encode", "decode"))
    (token_count,), latent_sizes = (fixed_sizes(pipe.inputs[0].shape) for pipe in (encode, decode))
    ids, mask = tokenize(folder, ["" for _ in texts] + texts, token_count)
    hidden_states = encode(ids, mask)
    latents = torch.randn(len(texts), *latent_sizes, generator=torch.manual_seed(seed)).to(hidden_states.dtype)
    scheduler = DPMSolverMultistepScheduler.from_pretrained(folder)
    scheduler.set_timesteps(steps)
    with stagepack.load(bundle.select("denoise"), processes=True) as denoise:
        for timestep in scheduler.timesteps:
            without_text, with_text = denoise(torch.cat([latents] * 2), timestep, hidden_states, mask).chunk(2)
            output = without_text + guidance * (with_text - without_text)
            latents = scheduler.step(output, timestep, latents).prev_sample
    return decode(latents)


def fixed_sizes(shape: Sequence[object]) -> list[int]:
    """The dimensions that are no symbol, which the one of the batch is."""
    return [size for size in shape if isinstance(size, int)]


def tokenize(folder: Path, texts: list[str], token_count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and mask of texts: `[text, token]`."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=token_count)
    tokenizer.enable_truncation(token_count)
    encodings = tokenizer.encode_batch([text.lower().strip() for text in texts])
    ids, masks = zip(*((encoding.ids, encoding.attention_mask) for encoding in encodings), strict=True)
    return torch.tensor(ids), torch.tensor(masks)


if __name__ == "__main__":
    main()
