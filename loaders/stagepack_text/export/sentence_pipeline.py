"""Pipelines of sentence-transformers: an encoder with its pooling as one module that takes tokens, and the files that read texts for it."""

import contextlib
import inspect
import itertools
import json
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch.export import Dim

from stagepack.capture.extensions import LibraryModel
from stagepack.capture.inputs import Inputs
from stagepack.capture.transformers.model_folders import SETTINGS_FILE
from stagepack.errors import CaptureError, ExportWarning, warn_caller
from stagepack.torch_internals import pooled_without_prompts

# The name of the result in sentence-transformers; `stagepack_text.embeddings` finds bundles by it.
_RESULT: Final = "sentence_embedding"
_PROMPT_LENGTHS: Final = "prompt_length"
_LARGEST_BATCH: Final = 1024
_MOST_TOKENS: Final = 2**20
# Tokenizers without a largest length state more than this one.
_LONGEST: Final = 1_000_000
# The longer one first: the smallest example, one token of one text, is no padding on either side then.
_EXAMPLE: Final = ["How do I bake bread with wild yeast?", "Stocks fell on Monday."]
# What tells tokenizers apart: case, accents, space, scripts, special tokens, no text, and more tokens than models take.
_PROBES: Final = [
    [" Ünïcode  TEXT\tΣΩΣ ﬁ №\n", "", "x"],
    ["日本語と emoji 👩‍🚀 ok?", "[MASK] <s> </s> [CLS]"],
    ["word " * 40_000, "y"],
]


class SentencePipeline(LibraryModel):
    """The modules of a ``SentenceTransformer``, under their names there, called with the tensors that it makes of texts.

    The result is a dict with the embeddings alone, ``{"sentence_embedding": [batch, dimension]}``.
    """

    def __init__(self, model: Any, modules: Mapping[str, torch.nn.Module]) -> None:
        super().__init__()
        for path, module in modules.items():
            self.add_module(path, module)
        self.eval()
        self.description = ", ".join(type(module).__name__ for module in self.children())
        self._example = _example_features(model)
        self._truncate_dim = model.truncate_dim
        # Plain data, since the model would be a child.
        self._settings = {
            "prompts": dict(model.prompts),
            "default_prompt_name": model.default_prompt_name,
            "similarity_fn_name": model.similarity_fn_name,
            "modules": [_module_settings(module) for module in model],
        }
        self._length_limit = _length_limit(model)
        if others := [str(modality) for modality in model.modalities if modality not in ("text", "message")]:
            message = f"the model also reads {', '.join(others)}, which are left out: the bundle takes texts"
            warn_caller(ExportWarning(message))
        self.files = self._files(model)

    @property
    def _excluding(self) -> list[torch.nn.Module]:
        """The modules that leave prompts out of what they pool."""
        return [module for module in self.modules() if getattr(module, "include_prompt", True) is False]

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        prompt_length: torch.Tensor | None = None,
        **further: Any,
    ) -> dict[str, torch.Tensor]:
        """Compute the embeddings of texts, of tensors ``[batch, sequence]``; `attention_mask` is 0 for padding.

        prompt_length: the number of tokens of each text that belong to a prompt, [batch], for models that leave them out of the mean.
        """
        tensors = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "token_type_ids": token_type_ids,
            **further,
        }
        constants = {
            feature_name: value for feature_name, value in self._example.items() if not isinstance(value, torch.Tensor)
        }
        features = constants | {feature_name: tensor for feature_name, tensor in tensors.items() if tensor is not None}
        with contextlib.ExitStack() as contexts:
            if prompt_length is not None:
                features[_PROMPT_LENGTHS] = 1  # there is a prompt; its length is in the mask

                def without_prompt(mask: torch.Tensor) -> torch.Tensor:
                    positions = torch.arange(mask.size(1), device=mask.device)
                    starts = mask.to(torch.int32).argmax(dim=1) + prompt_length
                    return mask.masked_fill(positions < starts.unsqueeze(1), 0)

                for pooling in self._excluding:
                    contexts.enter_context(pooled_without_prompts(pooling, without_prompt))
            for module in self.children():
                features = module(features)
        if _RESULT not in features:
            raise CaptureError(f"the modules {self.description} give no {_RESULT!r}: add a Pooling after the encoder")
        embeddings: torch.Tensor = features[_RESULT]
        return {_RESULT: embeddings if self._truncate_dim is None else embeddings[..., : self._truncate_dim]}

    def example(self) -> Inputs:
        """Two texts as an example, with dynamic batch and sequence."""
        tensors = {
            feature_name: value for feature_name, value in self._example.items() if isinstance(value, torch.Tensor)
        }
        named = [parameter for parameter in inspect.signature(self.forward).parameters if parameter in tensors]
        tensors = {feature_name: tensors[feature_name] for feature_name in (*named, *(tensors.keys() - named))}
        batch = Dim("batch", min=1, max=_LARGEST_BATCH)
        dims = self._token_dims(tensors, batch)
        if self._excluding:
            tensors[_PROMPT_LENGTHS] = torch.ones(len(_EXAMPLE), dtype=torch.int64, device=tensors["input_ids"].device)
            dims[_PROMPT_LENGTHS] = {0: batch}
        return Inputs(kwargs=tensors, dynamic_shapes=dims)

    def _token_dims(self, tensors: Mapping[str, torch.Tensor], batch: Dim) -> dict[str, dict[int, Dim]]:
        """The dynamic sizes of the example."""
        shapes = {tuple(tensor.shape) for tensor in tensors.values()}
        if tensors.keys() == {"input_ids", "offsets"}:  # the tokens of all texts, one after the other
            return {"input_ids": {0: Dim("tokens", min=1, max=_MOST_TOKENS)}, "offsets": {0: batch}}
        if "input_ids" in tensors and [len(shape) for shape in shapes] == [2]:
            length = Dim("sequence", min=1, max=self._length_limit)
            return {feature_name: {0: batch, 1: length} for feature_name in tensors}
        features = (
            ", ".join(f"{feature_name} {list(tensor.shape)}" for feature_name, tensor in tensors.items()) or "none"
        )
        first_module = type(next(self.children())).__name__
        raise CaptureError(
            f"{first_module}: expected tokens of texts as its inputs, [batch, sequence], found {features}: pass --inputs "
            "FILE.py:FUNCTION (in Python: kwargs= and dynamic_shapes=)"
        )

    def _files(self, model: Any) -> dict[str, bytes]:
        """The tokenizer, and the settings of texts by the name that they have in a folder of sentence-transformers."""
        tokenizer = _tokenizer_text(model) if "input_ids" in self._example else None
        if tokenizer is None:
            return {}
        config = getattr(model[0], "config", None)
        dimensions = getattr(config, "matryoshka_dimensions", None) or getattr(config, "is_matryoshka", None)
        settings = {
            **self._settings,
            **({"matryoshka_dimensions": dimensions} if dimensions else {}),
            "is_normalized": type(model[-1]).__name__ == "Normalize" and self._truncate_dim is None,
            **({"special_token_ids": sorted(model.tokenizer.all_special_ids)} if self._excluding else {}),
        }
        encoded = json.dumps(settings, indent=2, sort_keys=True, ensure_ascii=False).encode()
        return {"tokenizer.json": tokenizer.encode(), SETTINGS_FILE: encoded + b"\n"}


def _module_settings(module: Any) -> dict[str, Any]:
    """What a module of a pipeline computes, but for its weights."""
    settings = dict(module.get_config_dict()) if hasattr(module, "get_config_dict") else {}
    config = getattr(module, "config", None)
    encoder = {} if config is None else {"config": {**config.to_diff_dict(), "_name_or_path": ""}}
    encoded = json.dumps({"class": type(module).__name__, **settings, **encoder}, default=str, sort_keys=True)
    plain: dict[str, Any] = json.loads(encoded)
    return plain


def _example_features(model: Any) -> dict[str, Any]:
    """What a model makes of two texts: the inputs of its modules."""
    features = model.preprocess(list(_EXAMPLE))
    features.pop(_PROMPT_LENGTHS, None)
    device = model.device
    return {
        feature_name: value.to(device) if isinstance(value, torch.Tensor) else value
        for feature_name, value in features.items()
    }


def _length_limit(model: Any) -> int:
    limit = model.max_seq_length
    return int(limit) if isinstance(limit, int) and limit < _LONGEST else 4096


def _tokenizer_text(model: Any) -> str | None:
    """The tokenizer of a model as a file that cuts and pads texts as the model does; None, with a warning, if it has no such file."""
    from tokenizers import Tokenizer  # noqa: PLC0415 - of transformers

    source = getattr(model[0], "tokenizer", None)
    backend = source if isinstance(source, Tokenizer) else getattr(source, "backend_tokenizer", None)
    if backend is not None:
        tokenizer = Tokenizer.from_str(backend.to_str())
        if source is not backend:
            _cut_and_pad(tokenizer, source)
        if all(_reads_alike(model, tokenizer, sentences) for sentences in (_EXAMPLE, *_PROBES)):
            encoded: str = tokenizer.to_str()
            return encoded
    message = (
        f"{type(model[0]).__name__}: reads texts by code of its own, for which there is no tokenizer.json: the bundle takes tokens and no "
        "texts"
    )
    warn_caller(ExportWarning(message))
    return None


def _cut_and_pad(tokenizer: Any, source: Any) -> None:
    """Let a tokenizer cut and pad texts as that of transformers does which it is the backend of."""
    tokenizer.no_truncation()
    if isinstance(source.model_max_length, int) and source.model_max_length < _LONGEST:
        tokenizer.enable_truncation(source.model_max_length, direction=source.truncation_side)
    tokenizer.enable_padding(
        direction=source.padding_side,
        pad_id=source.pad_token_id or 0,
        pad_type_id=source.pad_token_type_id,
        pad_token=source.pad_token or "",
    )


def _reads_alike(model: Any, tokenizer: Any, sentences: list[str]) -> bool:
    """Whether a tokenizer makes the same tensors of texts as a model does."""
    tensors = {
        feature_name: value
        for feature_name, value in model.preprocess(list(sentences)).items()
        if isinstance(value, torch.Tensor)
    }
    if tensors.keys() == {"input_ids", "offsets"}:
        encodings = tokenizer.encode_batch(sentences, add_special_tokens=False)
        starts = itertools.accumulate((len(encoding.ids) for encoding in encodings[:-1]), initial=0)
        ids = [token for encoding in encodings for token in encoding.ids]
        return bool(tensors["input_ids"].tolist() == ids and tensors["offsets"].tolist() == list(starts))
    encodings = tokenizer.encode_batch(sentences)
    rows = {
        "input_ids": [encoding.ids for encoding in encodings],
        "attention_mask": [encoding.attention_mask for encoding in encodings],
        "token_type_ids": [encoding.type_ids for encoding in encodings],
    }
    return tensors.keys() <= rows.keys() and all(
        value.tolist() == rows[feature_name] for feature_name, value in tensors.items()
    )
