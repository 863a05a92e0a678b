"""Embed sentences with a bundle of all-MiniLM-L6-v2 and with the original model: `demo_embed.py BUNDLE MODEL_FOLDER`."""

import sys
from collections.abc import Callable
from typing import Any

import torch

import stagepack
from stagepack.capture.transformers_package import import_transformers

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "Stocks fell sharply on Monday.",
    "The market dropped at the start of the week, and nobody knew why.",
]

bundle, folder = sys.argv[1:]
transformers = import_transformers()
transformers.utils.logging.disable_progress_bar()
tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
pipe = stagepack.load(bundle)
model = transformers.AutoModel.from_pretrained(folder).eval()


def similarities(run: Callable[..., Any], sentences: list[str]) -> torch.Tensor:
    """Cosine similarities of the mean of each sentence's token embeddings."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    with torch.no_grad():
        tokens = run(input_ids=batch["input_ids"], attention_mask=mask)["last_hidden_state"]
    means = (tokens * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
    means = torch.nn.functional.normalize(means)
    return means @ means.T


for count in (2, 4):
    ours, theirs = similarities(pipe, SENTENCES[:count]), similarities(model, SENTENCES[:count])
    print(f"{count} sentences")
    for row, sentence in zip(ours.tolist(), SENTENCES, strict=False):
        print("  " + "  ".join(f"{value:5.2f}" for value in row) + f"   {sentence}")
    if not torch.equal(ours, theirs):
        raise SystemExit(f"the original model differs by up to {(ours - theirs).abs().max():g}")
    print("  equal to the original model's, bit for bit")
