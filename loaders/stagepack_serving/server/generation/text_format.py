"""The tokenizer and the chat template that a bundle carries as assets."""

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer

from stagepack.errors import InputError
from stagepack.format.codec import JSON_ERRORS
from stagepack.format.reader import Bundle
from stagepack_loaders.generation.prompts import read_tokenizer, tokenizer_errors
from stagepack_serving.server.errors import AssetError, RequestError, RequestStatus
from stagepack_serving.server.generation.chat_template import ChatTemplate
from stagepack_serving.server.generation.text_stream import TextStream

_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_SPECIAL_TOKENS: Final = "special_tokens_map.json"
_TEMPLATE: Final = "chat_template.jinja"


class TextFormat:
    """Texts as tokens, and conversations as texts.

    Attributes:
        chat_template: the chat template; None if the bundle has none.
    """

    def __init__(self, tokenizer: Tokenizer, chat_template: ChatTemplate | None) -> None:
        self._tokenizer = tokenizer
        added_tokens = tokenizer.get_added_tokens_decoder()
        self._special_tokens = frozenset(token for token, added in added_tokens.items() if added.special)
        self.chat_template = chat_template

    def encode(self, text: str, *, adds_special_tokens: bool) -> list[int]:
        """Convert a text to tokens.

        adds_special_tokens: add the tokens that begin and end a text for this model; a filled in chat template has them already.
        """
        try:
            with tokenizer_errors("the text"):
                # Of a batch, since `encode` stops all threads of Python until it ends: 4 s for 4 MB of text.
                [encoding] = self._tokenizer.encode_batch([text], add_special_tokens=adds_special_tokens)
        except InputError as error:
            raise RequestError(RequestStatus.BAD_REQUEST, str(error)) from None
        tokens: list[int] = encoding.ids
        return tokens

    def start_text(self) -> TextStream:
        """Start to decode a text."""
        return TextStream(self._tokenizer, self._special_tokens)


def read_text_format(bundle: Bundle) -> TextFormat | None:
    """Read the tokenizer and the chat template of a bundle.

    The result is the tokenizer and the template; None if the bundle has no tokenizer.
    """
    try:
        tokenizer = read_tokenizer(bundle)
    except InputError as error:
        raise AssetError(str(error)) from None
    if tokenizer is None:
        return None
    config = _read_fields(bundle, _TOKENIZER_CONFIG)
    template = bundle.read(_TEMPLATE).decode(errors="replace") if _TEMPLATE in bundle.files else _template_in(config)
    if template is None:
        return TextFormat(tokenizer, None)
    special_tokens = _special_token_texts(_read_fields(bundle, _SPECIAL_TOKENS) | config)
    return TextFormat(tokenizer, ChatTemplate(template, special_tokens))


def _read_fields(bundle: Bundle, asset_name: str) -> dict[str, Any]:
    """The fields of an asset that is a JSON object; none if the bundle does not have it."""
    if asset_name not in bundle.files:
        return {}
    try:
        return msgspec.json.decode(bundle.read(asset_name), type=dict[str, Any])
    except JSON_ERRORS as error:
        raise AssetError(f"{bundle.location}: {asset_name}: expected a JSON object: {error}") from None


def _template_in(config: Mapping[str, Any]) -> str | None:
    """The chat template in the configuration of a tokenizer, which may have several by name."""
    template = config.get("chat_template")
    if isinstance(template, list):
        named_templates = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
        template = named_templates[0].get("template") if named_templates else None
    return template if isinstance(template, str) else None


def _special_token_texts(fields: Mapping[str, Any]) -> dict[str, str]:
    """The texts of the special tokens by name, such as ``bos_token``: each is a string, or an object with more facts."""
    texts = {}
    for field_name, value in fields.items():
        text = value.get("content") if isinstance(value, dict) else value
        if field_name.endswith("_token") and isinstance(text, str):
            texts[field_name] = text
    return texts
