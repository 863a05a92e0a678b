"""Small models of sentence-transformers, with random weights and a tokenizer of a few words."""

from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from stagepack.capture.imports import import_transformers, torchao_on_demand

WORDS = [
    "how", "do", "i", "bake", "bread", "stocks", "fell", "on", "monday", "the", "of", "a", "to", "query", ":", ".",
    "é",
]  # fmt: skip
SPECIAL = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
POSITIONS = 40
HIDDEN = 32
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS,
}
# Several lengths, cases and scripts, more words than positions, and no words.
TEXTS = ["how do i bake bread", "Stocks FELL on Monday. " * 20, "é", "the of and", "", "日本語 to in", "query : the"]


def sentence_transformers() -> Any:
    """The package, without what is imported beside transformers."""
    import_transformers()
    with torchao_on_demand():
        import sentence_transformers
        import sentence_transformers.sentence_transformer.modules
    return sentence_transformers


def tokenizer(side: str = "right", *, types: bool = False) -> transformers.PreTrainedTokenizerFast:
    """A tokenizer of words and letters."""
    letters = [prefix + letter for letter in "abcdefghijklmnopqrstuvwxyz" for prefix in ("", "##")]
    vocabulary = {token: number for number, token in enumerate(dict.fromkeys([*SPECIAL.values(), *WORDS, *letters]))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token=SPECIAL["unk_token"]))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        **SPECIAL,
        padding_side=side,
        model_max_length=POSITIONS,
        model_input_names=["input_ids", "attention_mask", *(["token_type_ids"] if types else [])],
    )


def sentence_model(
    folder: Path, *modules: torch.nn.Module, side: str = "right", types: bool = False, **fields: Any
) -> Any:
    """A BERT, or a Qwen2 whose padding comes first, with modules after it; `folder` gets the encoder."""
    package = sentence_transformers()
    torch.manual_seed(0)
    if side == "right":
        encoder: Any = transformers.BertModel(transformers.BertConfig(**SIZES))
    else:
        config = transformers.Qwen2Config(**SIZES, num_key_value_heads=2, pad_token_id=0, **fields.pop("config", {}))
        encoder = transformers.Qwen2Model(config)
    encoder.save_pretrained(folder)
    tokenizer(side, types=types).save_pretrained(folder)
    transformer = package.sentence_transformer.modules.Transformer(str(folder), **fields)
    return package.SentenceTransformer(modules=[transformer, *modules], device="cpu")
