"""Embed sentences with a bundle of all-MiniLM-L6-v2 and with the original model: `demo_embed.py BUNDLE MODEL_FOLDER`."""

import sys

import torch

import stagepack
from stagepack.capture.imports import import_transformers
from stagepack_text.export.sentence_source import import_sentence_transformers

SENTENCES = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "Stocks fell sharply on Monday.",
    "The market dropped at the start of the week, and nobody knew why.",
]

bundle, folder = sys.argv[1:]
import_transformers().utils.logging.disable_progress_bar()
model = import_sentence_transformers(folder).SentenceTransformer(folder, device="cpu")
pipe = stagepack.load(bundle)
for count in (2, 4):
    ours, theirs = pipe.encode(SENTENCES[:count]), model.encode(SENTENCES[:count], convert_to_tensor=True)
    print(f"{count} sentences")
    for row, sentence in zip((ours @ ours.T).tolist(), SENTENCES, strict=False):
        print("  " + "  ".join(f"{value:5.2f}" for value in row) + f"   {sentence}")
    if not torch.equal(ours, theirs):
        raise SystemExit(f"the original model differs by up to {(ours - theirs).abs().max():g}")
    print("  equal to encode of sentence-transformers, bit for bit")
