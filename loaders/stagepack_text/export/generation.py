"""Models of transformers -> modules that generate, with their example inputs, and the files that generation needs beside them."""

import contextlib
import copy
import logging
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch

from stagepack.capture.extensions import GeneratingModel
from stagepack.capture.inputs import Inputs, on_device_of
from stagepack.capture.transformers.pretrained_model import model_files
from stagepack.capture.user_model import is_transformers_model
from stagepack.errors import OptionError, StagepackError, UnsupportedError, first_line
from stagepack.extras import explain_missing_packages

# Lengths of the example: of the prompt, and of what the encoder reads.
_PROMPT_LENGTH: Final = 3
_ENCODER_LENGTH: Final = 5
_FILLED_LENGTH: Final = 4
# Tokens of the text whose logits are compared: without a window, and with a window and the weights of the model.
_CHECKED_LENGTH: Final = 8
_CHECKED_WINDOW: Final = 64
# What configurations call the number of tokens that a layer looks back at, and the largest one that is tried: a text of 10,000 tokens
# takes seconds, and its mask 0.4 GB for each head that shares keys.
_WINDOW_FIELD: Final = re.compile(r"(window|window_size|window_len|local_attention|attention_chunk_size)$")
_LARGEST_WINDOW: Final = 8192
_TRIAL_VOCABULARY: Final = 256
_LOGGER = logging.getLogger("stagepack")


def generating_model(model: Any, max_positions: int, max_batch: int) -> GeneratingModel:
    """Wrap a model so that it generates."""
    if not is_transformers_model(model) or not model.can_generate():
        cure = ": merge its adapter before, by model.merge_and_unload()" if hasattr(model, "merge_and_unload") else ""
        raise OptionError(
            f"generate: expected a model of transformers that generates, found {type(model).__name__}{cure}"
        )
    if max_positions <= _ENCODER_LENGTH or max_batch < 1:
        raise OptionError(
            f"generate: expected more than {_ENCODER_LENGTH} positions and at least 1 text, found {max_positions} and {max_batch}"
        )
    position_limit = _position_limit(model)
    if position_limit is not None and max_positions > position_limit:
        raise OptionError(
            f"generate: expected at most the {position_limit} positions that the configuration of the model states, found {max_positions}"
        )
    with explain_missing_packages():
        from stagepack_text.export.generating_modules import GeneratingDecoder, GeneratingSeq2Seq  # noqa: PLC0415 - transformers

    files = model_files(model)
    example = _Example(max_positions, max_batch)
    _check_rotation(model, max_positions)
    if not model.config.is_encoder_decoder:
        with _run_errors(model):
            decoder = GeneratingDecoder(model, max_positions, max_batch)
            _check_logits(model, decoder, max_positions, max_batch)
        if window := max(_windows_within(model, max_positions), default=0):
            _check_window(model, window, max_positions)
        return GeneratingModel(
            module=decoder, inputs=on_device_of(model, example.decoder()), entry_points={}, files=files
        )
    takes_tokens = model.main_input_name == "input_ids"
    with _run_errors(model):
        encoder_rows = max_positions if takes_tokens else model.config.max_source_positions
        pair = GeneratingSeq2Seq(model, max_positions, encoder_rows, max_batch)
        encoder_example = example.token_encoder() if takes_tokens else example.speech_encoder(model.config, model.dtype)
    encoder_inputs = on_device_of(model, encoder_example)
    with torch.no_grad(), _run_errors(model):
        _check_logits_of_pair(model, pair, encoder_inputs.kwargs, max_positions, encoder_rows)
        rows = pair.encode(**encoder_inputs.kwargs)
    decoder_inputs = on_device_of(model, example.decoder_after(rows, encoder_rows, has_mask=takes_tokens))
    return GeneratingModel(
        module=pair, inputs=None, entry_points={"encode": encoder_inputs, "decode": decoder_inputs}, files=files
    )


@contextlib.contextmanager
def _run_errors(model: Any) -> Iterator[None]:
    """Say of which model an error is that its own code raises, for a cache or a mask that it does not take."""
    try:
        yield
    except StagepackError:
        raise
    except Exception as error:
        reason = first_line(error) or type(error).__name__
        raise UnsupportedError(
            f"generation: {type(model).__name__} does not run with a cache of fixed size and a mask [batch, 1, length, slots]: {reason}"
        ) from error


def _check_rotation(model: Any, max_positions: int) -> None:
    """Refuse positions that are rotated by other angles when a batch has a long text: texts would depend on those beside them."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    for rope in [parameters, *(value for value in parameters.values() if isinstance(value, dict))]:
        rope_type = rope.get("rope_type", rope.get("type"))
        original = rope.get("original_max_position_embeddings") or getattr(
            config, "original_max_position_embeddings", None
        )
        if rope_type == "dynamic" or (rope_type == "longrope" and (original is None or max_positions > original)):
            cure = "" if rope_type == "dynamic" or original is None else f": choose at most {original} positions"
            raise UnsupportedError(
                f"generation: expected angles of positions that no other text changes, found the rope type {rope_type!r}{cure}"
            )


def _windows_within(model: Any, max_positions: int) -> list[int]:
    """The windows that the configuration of a model states, and that texts are longer than."""
    config = model.config.get_text_config(decoder=True)
    fields = (getattr(config, name, None) for name in config.to_dict() if _WINDOW_FIELD.search(name))
    return [field for field in fields if type(field) is int and 0 < field < max_positions]


def _check_window(model: Any, window: int, max_positions: int) -> None:
    """Check that a small model of the same class looks back as its masks say, in a text that is longer than its window.

    It takes seconds, and weights that are not loaded are not needed.
    """
    from stagepack_text.export.generating_modules import GeneratingDecoder  # noqa: PLC0415 - transformers

    name, cure = type(model).__name__, f"choose at most {window} positions"
    if window > _LARGEST_WINDOW:
        raise UnsupportedError(
            f"generation: expected a window of up to {_LARGEST_WINDOW} tokens, whose texts are tried, found {window} in {name}: {cure}"
        )
    try:
        with torch.random.fork_rng(devices=[]), torch.device("cpu"), _run_errors(model):
            torch.manual_seed(0)
            small_model = _small_model(model)
            length = min(window + window // 16 + _CHECKED_LENGTH, max_positions)
            _check_logits(small_model, GeneratingDecoder(small_model, max_positions, 2), max_positions, 2, length)
    except UnsupportedError as error:
        raise UnsupportedError(
            f"{error} (tried with a small model and its window of {window} tokens): {cure}"
        ) from error


def _small_model(model: Any) -> Any:
    """A model of the same class with few heads and layers, one of each type, and the same windows. Its weights let all tokens matter."""
    config = copy.deepcopy(model.config)
    text_config = config.get_text_config(decoder=True)
    layer_count = text_config.num_hidden_layers
    types = getattr(text_config, "layer_types", None) or getattr(text_config, "attention_layers", None) or [0, 0]
    kept_count = min(layer_count, max(2, *(types.index(layer_type) + 1 for layer_type in set(types))))
    for field_name, value in list(vars(text_config).items()):
        if isinstance(value, list) and len(value) == layer_count:
            setattr(text_config, field_name, value[:kept_count])
    head_count = text_config.num_attention_heads
    key_head_count = getattr(text_config, "num_key_value_heads", None) or head_count
    group_size = head_count // key_head_count
    sizes = {
        "num_hidden_layers": kept_count,
        "num_attention_heads": group_size,
        "num_key_value_heads": 1,
        "hidden_size": text_config.hidden_size // head_count * group_size,
        "intermediate_size": 64,
        "vocab_size": _TRIAL_VOCABULARY,
        "pad_token_id": 0,
    }
    for field_name, size in sizes.items():
        if isinstance(getattr(text_config, field_name, None), int):
            setattr(text_config, field_name, size)
    small_model = type(model)(config).float().eval()
    for weight in small_model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=2 / weight.shape[-1] ** 0.5)
    return small_model


@torch.no_grad()
def _check_logits(model: Any, decoder: Any, max_positions: int, max_batch: int, length: int = 0) -> None:
    """Check that a text that two calls read, the second one beside a short text, has the logits that the model has without a cache.

    length: that of the text; 0 for one that is longer than a window, if that is short.
    """
    config = model.config.get_text_config(decoder=True)
    if not length:
        windows = [window for window in _windows_within(model, max_positions) if window <= _CHECKED_WINDOW]
        length = min(max([_CHECKED_LENGTH, *(window + 2 for window in windows)]), max_positions)
    token_rows = [torch.arange(size, device=model.device) * 7 % config.vocab_size for size in (length, 2)[:max_batch]]
    expected = torch.cat(
        [model(input_ids=row_tokens[None], use_cache=False).logits[:, -1] for row_tokens in token_rows]
    )
    half = length // 2
    decoder(
        input_ids=token_rows[0][None, :half],
        cache_position=torch.arange(half, device=model.device)[None],
        attention_mask=torch.ones_like(token_rows[0][None, :half]),
    )
    input_ids = token_rows[0].new_zeros(len(token_rows), length - half)
    positions = torch.full_like(input_ids, max_positions)
    mask = token_rows[0].new_zeros(len(token_rows), length)
    for row, (row_tokens, start) in enumerate(zip(token_rows, (half, 0), strict=False)):
        count = len(row_tokens) - start
        input_ids[row, -count:] = row_tokens[start:]
        positions[row, -count:] = torch.arange(start, len(row_tokens), device=model.device)
        mask[row, : len(row_tokens)] = 1
    logits = decoder(input_ids=input_ids, cache_position=positions, attention_mask=mask)
    decoder.clear()
    _require_equal(model, logits, expected)


def _check_logits_of_pair(
    model: Any, pair: Any, encoder_inputs: Mapping[str, torch.Tensor], max_positions: int, max_encoder_positions: int
) -> None:
    """Check that texts that two calls of the decoder read, after texts of several lengths, have the logits that the model has alone."""
    inputs = dict(encoder_inputs)
    batch_size = len(next(iter(inputs.values())))
    length = min(_CHECKED_LENGTH, max_positions)
    vocabulary_size = model.config.get_text_config(decoder=True).vocab_size
    decoder_tokens = (torch.arange(batch_size * length, device=model.device) * 7 % vocabulary_size).view(batch_size, -1)
    decoder_inputs = {}
    if "input_ids" in inputs:
        vocabulary_size = model.get_encoder().get_input_embeddings().num_embeddings
        inputs["input_ids"] = (inputs["input_ids"].flatten().cumsum(0) * 5 % vocabulary_size).view(batch_size, -1)
        inputs["attention_mask"] = inputs["attention_mask"].clone()
        inputs["attention_mask"][1:, 2:] = 0
        padding = (0, max_encoder_positions - _ENCODER_LENGTH)
        decoder_inputs["encoder_attention_mask"] = torch.nn.functional.pad(inputs["attention_mask"], padding)
    expected = []
    for row in range(batch_size):
        row_inputs = {input_name: array[row : row + 1] for input_name, array in inputs.items()}
        if "input_ids" in inputs:
            row_length = 2 if row else _ENCODER_LENGTH
            row_inputs = {input_name: array[:, :row_length] for input_name, array in row_inputs.items()}
        result = model(**row_inputs, decoder_input_ids=decoder_tokens[row : row + 1], use_cache=False)
        expected.append(result.logits[:, -1])
    encoder_rows = pair.encode(**inputs)
    for start, end in ((0, length // 2), (length // 2, length)):
        logits = pair.decode(
            input_ids=decoder_tokens[:, start:end],
            cache_position=torch.arange(start, end, device=model.device),
            attention_mask=torch.ones_like(decoder_tokens[:, :end]),
            # Rows that the first call has kept need not come again.
            encoder_hidden_states=encoder_rows if start == 0 else encoder_rows[:, :1],
            **decoder_inputs,
        )
    pair.clear()
    _require_equal(model, logits, torch.cat(expected))


def _require_equal(model: Any, logits: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that the logits are those of the model without a cache."""
    if expected.is_meta:
        return
    expected = expected.double()
    difference, scale = float((logits - expected).abs().max()), float(expected.abs().max())
    _LOGGER.info("generation: logits of up to %.3g differ from those of the model by at most %.3g", scale, difference)
    allowed = scale * torch.finfo(model.dtype).eps ** 0.5
    if not difference <= allowed:
        raise UnsupportedError(
            f"generation: expected the logits of the model without a cache up to {allowed:.3g}, found a difference of {difference:.3g}: "
            f"{type(model).__name__} attends in a way that its masks do not say"
        )


def _position_limit(model: Any) -> int | None:
    """The number of tokens that the decoder of a model has positions for; None if its configuration states none, as with T5."""
    config = model.config.get_text_config(decoder=True)
    limits = (getattr(config, name, None) for name in ("max_target_positions", "max_position_embeddings"))
    return next((limit for limit in limits if isinstance(limit, int)), None)


class _Example:
    """Example inputs, with the sizes that may change."""

    def __init__(self, max_positions: int, max_batch: int) -> None:
        self._max_positions = max_positions
        self._max_batch = max_batch
        self._batch_size = min(2, max_batch)
        self._batch = {0: torch.export.Dim("batch", min=1, max=max_batch)} if max_batch > 1 else {}

    def decoder(self) -> Inputs:
        """Inputs of a decoder that reads a prompt."""
        inputs = self._token_inputs()
        kwargs = dict(inputs.kwargs)
        kwargs["cache_position"] = kwargs["cache_position"].repeat(self._batch_size, 1)
        length = inputs.dynamic_shapes["cache_position"][0]
        shapes = inputs.dynamic_shapes | {"cache_position": {**self._batch, 1: length}}
        if self._batch:  # a single row does not move
            # To the slot of padding: a call writes each other one at most once.
            moves = [[0, 0, row, self._max_positions] for row in range(self._batch_size)]
            kwargs["cache_moves"] = torch.tensor(moves)
            # All slots: the number says that each row has one of zeros beside the one of padding (SPEC.md, "Generation").
            shapes["cache_moves"] = {
                0: torch.export.Dim("moves", min=0, max=self._max_batch * (self._max_positions + 2))
            }
        return Inputs(kwargs=kwargs, dynamic_shapes=shapes)

    def _token_inputs(self) -> Inputs:
        """Inputs whose tokens have the same positions in all texts."""
        length, filled = (torch.export.Dim(name, min=1, max=self._max_positions) for name in ("length", "filled"))
        kwargs = {
            "input_ids": torch.ones(self._batch_size, _PROMPT_LENGTH, dtype=torch.int64),
            "cache_position": torch.arange(_PROMPT_LENGTH),
            "attention_mask": self._mask(_PROMPT_LENGTH, _FILLED_LENGTH),
        }
        shapes = {
            "input_ids": {**self._batch, 1: length},
            "cache_position": {0: length},
            "attention_mask": {**self._batch, 1: filled},
        }
        return Inputs(kwargs=kwargs, dynamic_shapes=shapes)

    def token_encoder(self) -> Inputs:
        """Inputs of an encoder that reads tokens."""
        length = torch.export.Dim("encoder_length", min=1, max=self._max_positions)
        tokens = torch.ones(self._batch_size, _ENCODER_LENGTH, dtype=torch.int64)
        shapes = {name: {**self._batch, 1: length} for name in ("input_ids", "attention_mask")}
        return Inputs(kwargs={"input_ids": tokens, "attention_mask": tokens.clone()}, dynamic_shapes=shapes)

    def speech_encoder(self, config: Any, dtype: torch.dtype) -> Inputs:
        """Inputs of an encoder that reads the spectrogram of speech: two columns for each of its rows."""
        shape = (self._batch_size, config.num_mel_bins, 2 * config.max_source_positions)
        spectrogram = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
        return Inputs(kwargs={"input_features": spectrogram}, dynamic_shapes={"input_features": self._batch})

    def decoder_after(self, rows: torch.Tensor, max_rows: int, *, has_mask: bool) -> Inputs:
        """Inputs of a decoder that reads what an encoder returns."""
        inputs = self._token_inputs()
        row_count = torch.export.Dim("rows", min=1, max=max_rows)
        kwargs = dict(inputs.kwargs) | {"encoder_hidden_states": rows}
        shapes = inputs.dynamic_shapes | {"encoder_hidden_states": {**self._batch, 1: row_count}}
        if has_mask:
            kwargs["encoder_attention_mask"] = self._mask(rows.shape[1], max_rows)
            shapes["encoder_attention_mask"] = self._batch
        return Inputs(kwargs=kwargs, dynamic_shapes=shapes)

    def _mask(self, length: int, size: int) -> torch.Tensor:
        return (torch.arange(size) < length).to(torch.int64).repeat(self._batch_size, 1)
