"""Texts as tokens that arrive one by one, and the tokenizer and chat template that a bundle carries as assets."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack.format.rules import JSON_ERRORS
from stagepack_serving.server.errors import AssetError, BadRequestError
from stagepack_text.prompts import read_tokenizer
from stagepack_text.server.chat_template import ChatTemplate
from stagepack_text.token_texts import BYTE_OF_CHARACTER, BYTE_TOKEN, tokenizer_errors

# What other tokenizers write for the space before a word.
_WORD_START: Final = "\u2581"
# What an incomplete UTF-8 character is decoded to.
_REPLACEMENT: Final = "\ufffd"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_TEMPLATE: Final = "chat_template.jinja"
# What is read beside the tokenizer.
FORMAT_FILES: Final = (_TOKENIZER_CONFIG, _SPECIAL_TOKENS, _TEMPLATE)


class TextStream:
    """Decodes the tokens of one text as they arrive: the parts, joined, equal the text that all tokens are decoded to at once.

    A part ends where later tokens cannot change it: not inside of a UTF-8 character, and not inside of a run of byte tokens. Only the
    tokens since the previous such place are decoded again, after those of the previous part, since a decoder treats the first token of
    a text in its own way. `tokenizers.decoders.DecodeStream` raises for tokens after an incomplete run of bytes, and drops them at the end.
    """

    def __init__(self, tokenizer: Tokenizer, special_tokens: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._special_tokens = special_tokens
        self._settled_tokens: list[int] = []
        self._new_tokens: list[int] = []

    def add(self, token: int) -> str:
        """Add a token; return the text that is complete with it, which may be empty."""
        token_text = self._tokenizer.id_to_token(token)
        if token_text is None or token in self._special_tokens:
            return ""
        self._new_tokens.append(token)
        # The ByteFallback decoder decodes each run of such tokens as a whole.
        content = "" if BYTE_TOKEN.fullmatch(token_text) else self._new_text()
        if not content or content.endswith(_REPLACEMENT):
            return ""
        self._settled_tokens, self._new_tokens = self._new_tokens, []
        return content

    def finish(self) -> str:
        """End the text."""
        return self._new_text()

    def _new_text(self) -> str:
        settled_text = self._decode(self._settled_tokens)
        return self._decode(self._settled_tokens + self._new_tokens)[len(settled_text) :]

    def _decode(self, tokens: list[int]) -> str:
        content: str = self._tokenizer.decode(tokens, skip_special_tokens=False) if tokens else ""
        return content


class StopStrings:
    """Looks for strings that end a text, in parts as they arrive. A part is held back while it may begin one of them."""

    def __init__(self, stop_strings: Sequence[str]) -> None:
        self._stop_strings = stop_strings
        self._held_text = ""
        self.is_found = False

    def add(self, content: str) -> str:
        """Add a part of the text."""
        content = self._held_text + content
        positions = [position for stop in self._stop_strings if (position := content.find(stop)) >= 0]
        if positions:
            self.is_found, self._held_text = True, ""
            return content[: min(positions)]
        held_length = max((_overlap(content, stop) for stop in self._stop_strings), default=0)
        sent_length = len(content) - held_length
        self._held_text = content[sent_length:]
        return content[:sent_length]

    def finish(self) -> str:
        """End the text."""
        return self._held_text


def _overlap(content: str, stop_string: str) -> int:
    """The length of the longest end of a text that begins a stop string."""
    longest = min(len(content), len(stop_string) - 1)
    return next((length for length in range(longest, 0, -1) if content.endswith(stop_string[:length])), 0)


class TextFormat:
    """Texts as tokens, and conversations as texts if the bundle has a chat template."""

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_tokens = frozenset(token for token, added in added_tokens.items() if added.special)
        self._is_byte_level = "ByteLevel" in repr(tokenizer.decoder)
        self.chat_template = chat_template

    def encode(self, content: str, *, adds_special_tokens: bool) -> list[int]:
        """Convert a text to tokens. A filled in chat template has the special tokens that begin and end a text already."""
        try:
            with tokenizer_errors("the text"):
                # A batch of one text: `encode` stops all threads of Python until it ends, 4 s for 4 MB of text.
                [encoding] = self.tokenizer.encode_batch([content], add_special_tokens=adds_special_tokens)
        except InputError as error:
            raise BadRequestError(str(error)) from None
        tokens: list[int] = encoding.ids
        return tokens

    def decode(self, tokens: Sequence[int]) -> str:
        """Convert tokens to a text, without special tokens."""
        with tokenizer_errors("the tokens"):
            content: str = self.tokenizer.decode(list(tokens), skip_special_tokens=True)
        return content

    def is_special(self, token: int) -> bool:
        """Return whether a token is no text, such as the one that ends a text."""
        return token in self._special_tokens

    def token_bytes(self, token: int) -> bytes:
        """Return what a token adds to a text, in UTF-8: a character may be torn apart."""
        token_text = self.tokenizer.id_to_token(token) or ""
        if BYTE_TOKEN.fullmatch(token_text):
            return bytes([int(token_text[3:5], 16)])
        if token in self._special_tokens:
            return token_text.encode()
        if self._is_byte_level and all(character in BYTE_OF_CHARACTER for character in token_text):
            return bytes(BYTE_OF_CHARACTER[character] for character in token_text)
        return token_text.replace(_WORD_START, " ").encode()

    def special_ids(self, token_texts: Sequence[str]) -> frozenset[int]:
        """Return those of some tokens that are special."""
        return self._special_tokens.intersection(map(self.tokenizer.token_to_id, token_texts))

    def start_text(self, shown_tokens: frozenset[int] = frozenset()) -> TextStream:
        """Start to decode a text, without special tokens but those that are shown."""
        return TextStream(self.tokenizer, self._special_tokens - shown_tokens)


def read_text_format(bundle: Bundle) -> TextFormat | None:
    """Read the tokenizer and the chat template of a bundle; None if it has no tokenizer."""
    try:
        tokenizer = read_tokenizer(bundle)
    except InputError as error:
        raise AssetError(str(error)) from None
    if tokenizer is None:
        return None
    config = _read_fields(bundle, _TOKENIZER_CONFIG)
    templates = _templates_in(config)
    if _TEMPLATE in bundle.files:
        templates = {"default": bundle.read(_TEMPLATE).decode(errors="replace")}
    if "default" not in templates:
        return TextFormat(tokenizer, None)
    special_tokens = _special_token_texts(_read_fields(bundle, _SPECIAL_TOKENS) | config)
    return TextFormat(tokenizer, ChatTemplate(templates["default"], special_tokens, templates.get("tool_use")))


def _read_fields(bundle: Bundle, asset_name: str) -> dict[str, Any]:
    """The fields of an asset that is a JSON object; none if the bundle does not have it."""
    if asset_name not in bundle.files:
        return {}
    try:
        return msgspec.json.decode(bundle.read(asset_name), type=dict[str, Any])
    except JSON_ERRORS as error:
        raise AssetError(f"{bundle.location}: {asset_name}: expected a JSON object: {error}") from None


def _templates_in(config: Mapping[str, Any]) -> dict[str, str]:
    """The chat templates in the configuration of a tokenizer, by name: one is the default."""
    templates = config.get("chat_template")
    if isinstance(templates, str):
        return {"default": templates}
    entries = [entry for entry in templates if isinstance(entry, dict)] if isinstance(templates, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {
        template_name: template
        for template_name, template in named
        if isinstance(template_name, str) and isinstance(template, str)
    }


def _special_token_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens by name, such as ``bos_token``: each is a string, or an object with more facts."""
    texts = {}
    for field_name, value in fields.items():
        content = value.get("content") if isinstance(value, dict) else value
        if field_name.endswith("_token") and isinstance(content, str):
            texts[field_name] = content
    return texts
