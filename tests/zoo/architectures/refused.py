"""Architectures that neither `torch.export` nor transformers' own exporter captures, so that there is nothing to cut."""

from tests.zoo.architectures.build import SMALL, fixed, ids, table
from tests.zoo.architectures.multimodal import VISION, picture_and_text

# What both say.
REASON = "Could not guard on data-dependent expression"
REFUSED = table(
    "refused",
    {
        "vilt": ("ViltModel", VISION, fixed(picture_and_text)),
        "longformer": ("LongformerModel", {**SMALL, "attention_window": 4}, fixed(lambda: {"input_ids": ids(2, 8)})),
    },
)
