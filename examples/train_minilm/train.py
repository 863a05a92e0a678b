"""Fine-tune MiniLM on pairs of texts, in as many processes as the bundle has stages.

``torchrun --nproc-per-node 2 -m examples.train_minilm.train BUNDLE TOKENIZER_JSON OUT CURVE_PNG``. The two texts of a pair shall be more
similar than texts of different pairs: each is asked to find its partner among all texts of its microbatch. Needs `tokenizers` and
`matplotlib`.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import torch
from tokenizers import Tokenizer

import stagepack
from examples.train_minilm.pairs import held_out_pairs, training_batches

STEPS = 40
MICROBATCHES = 2  # each is a group of pairs
LEARNING_RATE = 3e-4
WARM_UP_STEPS = 8
TEMPERATURE = 0.05


def main() -> None:
    """Train, save, and measure the model before and after."""
    bundle_path, tokenizer_path, out, curve_path = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    # Each microbatch is a contest of its own, as the loss is defined.
    training = stagepack.train(bundle_path, contrastive_loss, microbatches=MICROBATCHES, loss_reduction="mean")
    losses = train(training, tokenizer)
    stagepack.save(training, out=out, overwrite=True)
    if training.rank == 0:
        before, after = (found_partners(path) for path in (bundle_path, out))
        print(f"held-out lines whose meaning is found among 200: before {before:.1%}, after {after:.1%}")
        draw(losses, before, after, Path(curve_path))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def train(training: Any, tokenizer: Tokenizer) -> list[float]:
    """Train the stages of this process; return the loss of each step."""
    optimizer = torch.optim.AdamW(training.parameters(), lr=LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, learning_rate_factor)
    losses = []
    start_time = time.perf_counter()
    for number, pairs in enumerate(training_batches(STEPS, MICROBATCHES)):
        # Texts of a pair are neighbours, so that they are in the same microbatch.
        inputs = tokenize(tokenizer, [text for pair in pairs for text in (pair.line, pair.sentence)])
        loss = training.step(**inputs)
        training.clip_gradients(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(loss.item())
        if training.rank == 0 and number % 10 == 9:
            seconds = (time.perf_counter() - start_time) / (number + 1)
            print(f"step {number + 1}: loss {sum(losses[-10:]) / 10:.3f}, {seconds:.2f} s a step", flush=True)
    return losses


def learning_rate_factor(step: int) -> float:
    """Warm up, then fall to zero."""
    return min((step + 1) / WARM_UP_STEPS, (STEPS - step) / (STEPS - WARM_UP_STEPS))


def contrastive_loss(result: Mapping[str, torch.Tensor], _: None) -> torch.Tensor:
    """How badly texts find their partners among those of the microbatch: rows 0 and 1 are a pair, 2 and 3, and so on."""
    vectors = result["sentence_embedding"]
    similarities = vectors[0::2] @ vectors[1::2].T / TEMPERATURE  # [pair, pair]
    partners = torch.arange(len(similarities))
    cross_entropy = torch.nn.functional.cross_entropy
    return (cross_entropy(similarities, partners) + cross_entropy(similarities.T, partners)) / 2


def tokenize(tokenizer: Tokenizer, texts: Sequence[str]) -> dict[str, torch.Tensor]:
    """The inputs of the model for some texts, padded to the longest one: `[text, token]`."""
    encodings = tokenizer.encode_batch(list(texts))
    return {
        "input_ids": torch.tensor([encoding.ids for encoding in encodings]),
        "attention_mask": torch.tensor([encoding.attention_mask for encoding in encodings]),
        "token_type_ids": torch.tensor([encoding.type_ids for encoding in encodings]),
    }


def found_partners(bundle_path: str) -> float:
    """The share of held-out lines to which their own sentence is the most similar one of all."""
    model = stagepack.load(bundle_path)
    pairs = held_out_pairs()
    similarities = model.encode([pair.line for pair in pairs]) @ model.encode([pair.sentence for pair in pairs]).T
    return (similarities.argmax(1) == torch.arange(len(pairs))).double().mean().item()


def draw(losses: Sequence[float], before: float, after: float, path: Path) -> None:
    """Draw the loss of each step, and how many partners are found before and after."""
    figure, (curve, bars) = plt.subplots(1, 2, figsize=(9, 3.6), width_ratios=(3, 1), layout="constrained")
    curve.plot(range(1, len(losses) + 1), losses, color="#1f5fa8", linewidth=2)
    curve.set(xlabel="step", ylabel="contrastive loss", ylim=(0, None), xlim=(1, len(losses)))
    curve.set_title("Training in two processes")
    curve.grid(visible=True, color="#e4e4e4")
    shares = bars.bar(["before", "after"], [100 * before, 100 * after], color=["#b8b8b8", "#1f5fa8"], width=0.6)
    bars.bar_label(shares, fmt="%.1f %%", padding=3)
    bars.set(ylim=(0, 110), yticks=[0, 25, 50, 75, 100], ylabel="meaning found, %", title="200 held-out lines")
    for axes in (curve, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
