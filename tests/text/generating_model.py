"""A small decoder with the inputs of generation, its tokenizer, and its text without a server."""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

import stagepack
from stagepack_loaders.decoders import DecoderFacts
from stagepack_text.server.served_text import GeneratedPart, GenerationRequest, ServedText
from stagepack_text.server.text_stream import TextFormat
from stagepack_text.settings import GenerationSettings

POSITIONS = 96
VOCABULARY = 260
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + message.role) }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class CachedAttention(torch.nn.Module):
    """Attention over the keys and values of all tokens so far."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self, width: int, head_count: int) -> None:
        super().__init__()
        self.head_count = head_count
        self.projection, self.output = torch.nn.Linear(width, 3 * width), torch.nn.Linear(width, width)
        shape = (1, head_count, POSITIONS, width // head_count)
        self.register_buffer("keys", torch.zeros(shape), persistent=False)
        self.register_buffer("values", torch.zeros(shape), persistent=False)

    def forward(self, hidden: torch.Tensor, cache_position: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.reshape(batch, length, self.head_count, -1).transpose(1, 2)
            for part in self.projection(hidden).chunk(3, -1)
        )
        self.keys.index_copy_(2, cache_position, key)
        self.values.index_copy_(2, cache_position, value)
        attended = torch.nn.functional.scaled_dot_product_attention(query, self.keys, self.values, mask)
        return hidden + self.output(attended.transpose(1, 2).reshape(batch, length, width))


class Decoder(torch.nn.Module):
    """Two layers; what it says of a text depends on all tokens of it."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.tokens, self.positions = torch.nn.Embedding(VOCABULARY, width), torch.nn.Embedding(POSITIONS, width)
        self.layers = torch.nn.ModuleList([CachedAttention(width, 4) for _ in range(2)])
        self.head = torch.nn.Linear(width, VOCABULARY)

    def forward(
        self, *, input_ids: torch.Tensor, cache_position: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        position_ids = (attention_mask.cumsum(-1) - 1).clamp(min=0)[:, cache_position]
        hidden = self.tokens(input_ids) * 3 + self.positions(position_ids)
        is_earlier = torch.arange(POSITIONS)[None, :] <= cache_position[:, None]
        mask = is_earlier[None, None] & attention_mask.bool()[:, None, None]
        for layer in self.layers:
            hidden = layer(hidden, cache_position, mask)
        return self.head(hidden[:, -1])


def tokenizer() -> Tokenizer:
    """Bytes as tokens, so that characters are torn apart."""
    byte_tokenizer = Tokenizer(models.BPE())
    byte_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_tokenizer.decoder = decoders.ByteLevel()
    alphabet, specials = pre_tokenizers.ByteLevel.alphabet(), ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=258, initial_alphabet=alphabet, special_tokens=specials, show_progress=False
    )
    byte_tokenizer.train_from_iterator([], trainer)
    return byte_tokenizer


def export_decoder(folder: Path, biases: Mapping[int, float] | None = None) -> Path:
    """Write the bundle ``writer``, with the assets of a chat model, which may prefer some tokens."""
    torch.manual_seed(0)
    decoder = Decoder().eval()
    for token, bias in (biases or {}).items():
        decoder.head.bias.data[token] += bias
    length = torch.export.Dim("length", min=1, max=POSITIONS)
    inputs = {
        "input_ids": torch.ones(1, 3, dtype=torch.int64),
        "cache_position": torch.arange(3),
        "attention_mask": (torch.arange(POSITIONS) < 3).long()[None],
    }
    dynamic_shapes = {"input_ids": {1: length}, "cache_position": {0: length}, "attention_mask": None}
    path, assets = folder / "writer.stagepack", write_assets(folder)
    stagepack.export(decoder, (), inputs, out=path, stages=2, dynamic_shapes=dynamic_shapes, assets=assets)
    return path


def write_assets(folder: Path) -> list[Path]:
    (folder / "tokenizer.json").write_text(tokenizer().to_str())
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return [folder / "tokenizer.json", folder / "chat_template.jinja"]


def continue_tokens(tokens: list[int], count: int) -> list[int]:
    """The likeliest tokens after a text, by the model without a cache of earlier calls."""
    torch.manual_seed(0)
    decoder = Decoder().eval()
    continued = list(tokens)
    for _ in range(count):
        length = len(continued)
        mask = (torch.arange(POSITIONS) < length).long()[None]
        with torch.no_grad():
            logits = decoder(
                input_ids=torch.tensor([continued]), cache_position=torch.arange(length), attention_mask=mask
            )
        continued.append(int(logits[0].argmax()))
    return continued[len(tokens) :]


def served_text(facts: DecoderFacts, settings: GenerationSettings, **request: Any) -> ServedText:
    """A text after two tokens, as the server holds it; `request` are other fields than its prompt, and its text format."""
    text_format, prompt = request.pop("text_format", None), request.pop("prompt", (1, 1))
    asked = GenerationRequest(prompt=numpy.array([prompt]), settings={}, **request)
    return ServedText(facts, settings, asked, text_format, asyncio.Queue())


def decoded_parts(text_format: TextFormat, tokens: Sequence[int], **request: Any) -> list[GeneratedPart]:
    """The parts of a text of these tokens."""
    facts = DecoderFacts(max_positions=1000, logits=None, takes_encoder=False, encoder_positions=None)  # type: ignore[arg-type]
    settings = GenerationSettings(max_new_tokens=len(tokens))
    text = served_text(facts, settings, text_format=text_format, **request)
    return [text.take(row[None]) for row in numpy.eye(max(tokens) + 1, dtype=numpy.float32)[list(tokens)]]
