"""Encoders and decoders of text together."""

from tests.zoo.architectures.build import SMALL_PAIR, pair, table

T5 = {
    "vocab_size": 128,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}

CASES = table(
    "encoder-decoders",
    {
        "t5": ("T5ForConditionalGeneration", T5, pair()),
        "t5-gated": ("T5ForConditionalGeneration", {**T5, "feed_forward_proj": "gated-gelu"}, pair()),
        "mt5": ("MT5ForConditionalGeneration", T5, pair()),
        "umt5": ("UMT5ForConditionalGeneration", T5, pair()),
        "bart": ("BartForConditionalGeneration", SMALL_PAIR, pair()),
        "mbart": ("MBartForConditionalGeneration", SMALL_PAIR, pair()),
        "pegasus": ("PegasusForConditionalGeneration", SMALL_PAIR, pair()),
        "marian": ("MarianMTModel", SMALL_PAIR, pair()),
        "blenderbot": ("BlenderbotForConditionalGeneration", SMALL_PAIR, pair()),
        "blenderbot-small": ("BlenderbotSmallForConditionalGeneration", SMALL_PAIR, pair()),
        "m2m-100": ("M2M100ForConditionalGeneration", SMALL_PAIR, pair()),
        "plbart": ("PLBartForConditionalGeneration", SMALL_PAIR, pair()),
    },
)
