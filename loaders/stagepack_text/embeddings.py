"""Texts -> embeddings, by bundles whose result is ``{"sentence_embedding": [batch, dimension]}``, as the result of sentence-transformers.

The file tokenizer.json of the bundle says how texts are cut and padded, too.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakKeyDictionary

import msgspec
import numpy
from msgspec import Struct

from stagepack.errors import InputError
from stagepack.format.graph import ValueArg
from stagepack.format.limits import Int64
from stagepack.format.manifest import Edge, EntryPoint
from stagepack.format.reader import Bundle
from stagepack.format.rules import JSON_ERRORS
from stagepack.format.tree import DictTree, ValueLeaf
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.decoders import largest_size
from stagepack_loaders.elements import ELEMENT_DTYPES, Array
from stagepack_text.prompts import TOKENIZER_FILE, adapter_of, check_adapter_count, read_tokenizer
from stagepack_text.token_texts import tokenizer_errors

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from stagepack_text.generate import TextPipeline

_RESULT: Final = "sentence_embedding"
IDS_INPUT: Final = "input_ids"
_MASK: Final = "attention_mask"
_TYPES: Final = "token_type_ids"
_OFFSETS: Final = "offsets"
_PROMPT_LENGTHS: Final = "prompt_length"
PROMPTS_FILE: Final = "config_sentence_transformers.json"

# Operators that look tokens up in a table, their first argument; and those whose result has the same tokens.
_TABLES: Final = frozenset({"embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"})
_COPIES: Final = frozenset(
    {"_to_copy", "alias", "clone", "contiguous", "expand", "reshape", "squeeze", "to", "unsqueeze", "view"}
)


class EmbeddingSettings(Struct, frozen=True, kw_only=True):
    """How texts become embeddings: the fields of a folder of sentence-transformers that say it, and further ones.

    Attributes:
        prompts: texts that are put before others, by name.
        default_prompt_name: the prompt of texts for which the caller names none.
        is_normalized: whether embeddings have the length 1.
        matryoshka_dimensions: the sizes that embeddings may be cut to; True for any size.
        special_token_ids: the tokens that a prompt does not end with.
    """

    prompts: dict[str, str] = {}
    default_prompt_name: str | None = None
    is_normalized: bool = False
    matryoshka_dimensions: tuple[Int64, ...] | bool = False
    special_token_ids: frozenset[Int64] = frozenset()

    def prompt(self, prompt_name: str | None) -> str:
        """Return the prompt of a name, or the default one."""
        if prompt_name is None:
            return "" if self.default_prompt_name is None else self.prompts.get(self.default_prompt_name, "")
        if prompt_name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            raise InputError(f"prompt_name: expected a prompt of the model ({names}), found {prompt_name!r}")
        return self.prompts[prompt_name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingFacts:
    """What is needed to call an entry point that embeds texts.

    Attributes:
        inputs: the inputs by name.
        result: the edge of the embeddings.
        max_length: the largest number of tokens; None for any.
        max_batch: the largest number of texts; None for any.
        is_flat: the tokens of all texts are one list, and ``offsets`` has the first of each, as static embeddings take them.
    """

    inputs: Mapping[str, Edge]
    result: Edge
    max_length: int | None
    max_batch: int | None
    is_flat: bool


def embedding_facts(entry_point: EntryPoint) -> EmbeddingFacts | None:
    """Return what is needed to call an entry point that embeds texts; None for any other."""
    inputs = {edge.name: edge for edge in entry_point.inputs}
    result = entry_point.signature.result
    if not isinstance(result, DictTree) or [key for key, _ in result.items] != [_RESULT]:
        return None
    [(_, leaf)] = result.items
    is_flat = inputs.keys() == {IDS_INPUT, _OFFSETS}
    is_known = is_flat or (inputs.keys() <= {IDS_INPUT, _MASK, _TYPES, _PROMPT_LENGTHS} and IDS_INPUT in inputs)
    if not isinstance(leaf, ValueLeaf) or not is_known or len(inputs[IDS_INPUT].shape) != 2 - is_flat:
        return None
    [edge] = (edge for edge in entry_point.edges if edge.name == leaf.name)
    batch_dim = inputs[_OFFSETS if is_flat else IDS_INPUT].shape[0]
    return EmbeddingFacts(
        inputs=inputs,
        result=edge,
        max_length=largest_size(inputs[IDS_INPUT].shape[-1], entry_point.symbols),
        max_batch=largest_size(batch_dim, entry_point.symbols),
        is_flat=is_flat,
    )


def vocabulary_size(bundle: Bundle) -> int | None:
    """Return the number of tokens that an entry point that embeds texts has embeddings of; None if its graphs do not say it."""
    [ids_edge] = (edge for edge in bundle.entry_point.inputs if edge.name == IDS_INPUT)
    row_counts: list[int] = []
    for stage_number in ids_edge.consumers:
        graph = bundle.graph(stage_number)
        shapes: dict[str, Sequence[object]] = {weight.value: weight.shape for weight in graph.weights}
        id_names = {IDS_INPUT}  # the tokens, and what has the same numbers
        for node in graph.nodes:
            operator_name = graph.ops[node.op].name.removeprefix("aten.").partition(".")[0]
            arguments = [argument.name if isinstance(argument, ValueArg) else None for argument in node.args[:2]]
            if operator_name in _COPIES and arguments[0] in id_names:
                id_names |= {value.name for value in node.outputs if value is not None}
            elif operator_name in _TABLES and arguments[-1] in id_names:
                row_counts += [size for size in shapes.get(arguments[0] or "", ())[:1] if isinstance(size, int)]
            shapes |= {value.name: value.shape for value in node.outputs if value is not None}
    return min(row_counts, default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddedBatch:
    """Texts as a model takes them.

    Attributes:
        inputs: the inputs by name.
        token_count: the number of tokens, without padding.
    """

    inputs: dict[str, Array]
    token_count: int


class TextReader:
    """Makes the inputs of a bundle that embeds texts.

    Attributes:
        facts: the inputs and the result.
        settings: the prompts, and what else the bundle says.
    """

    def __init__(self, bundle: Bundle, facts: EmbeddingFacts) -> None:
        self.facts = facts
        self.settings = _read_settings(bundle)
        self._location = bundle.location
        self._tokenizer: Tokenizer | None = read_tokenizer(bundle, cuts_and_pads=True)
        if self._tokenizer is not None and not facts.is_flat:
            # To the longest text, also where the file says a fixed length, beyond which texts would have several lengths.
            self._tokenizer.enable_padding(**{**(self._tokenizer.padding or {}), "length": None})

    def batches(self, lengths: Sequence[int], batch_size: int) -> Iterator[list[int]]:
        """Yield the positions of the texts of each batch: the longest first, as ``encode`` of sentence-transformers orders them."""
        order: list[int] = numpy.argsort([-length for length in lengths]).tolist()
        largest = batch_size if self.facts.max_batch is None else min(batch_size, self.facts.max_batch)
        for start in range(0, len(order), largest):
            yield order[start : start + largest]

    def read_texts(self, sentences: Sequence[str], prompt: str) -> EmbeddedBatch:
        """Return the inputs for texts, which are padded to the longest of them."""
        if self._tokenizer is None:
            raise InputError(f"{self._location}: expected tokens, found a text: the bundle has no {TOKENIZER_FILE}")
        with tokenizer_errors("the text"):
            encodings = self._tokenizer.encode_batch(
                [prompt + sentence for sentence in sentences], add_special_tokens=not self.facts.is_flat
            )
        if self.facts.is_flat:
            return self._flat_batch([encoding.ids for encoding in encodings])
        return self._batch(
            numpy.array([encoding.ids for encoding in encodings], numpy.int64),
            numpy.array([encoding.attention_mask for encoding in encodings], numpy.int64),
            numpy.array([encoding.type_ids for encoding in encodings], numpy.int64),
            self._prompt_length(prompt),
        )

    def read_tokens(self, rows: Sequence[Sequence[int]]) -> EmbeddedBatch:
        """Return the inputs for tokens, which are taken as they are: with those that begin and end a text."""
        if self.facts.is_flat:
            return self._flat_batch(rows)
        if _TYPES in self.facts.inputs and any(self._encode_one("a").type_ids):
            raise InputError(f"the tokenizer of the model gives tokens types ({_TYPES}): expected texts, found tokens")
        padding: Mapping[str, Any] = {} if self._tokenizer is None else self._tokenizer.padding or {}
        shape = (len(rows), max(map(len, rows)))
        ids, mask = numpy.full(shape, padding.get("pad_id", 0), numpy.int64), numpy.zeros(shape, numpy.int64)
        types = numpy.full(shape, padding.get("pad_type_id", 0), numpy.int64)
        for position, row in enumerate(rows):
            columns = slice(shape[1] - len(row), None) if padding.get("direction") == "left" else slice(len(row))
            ids[position, columns], mask[position, columns], types[position, columns] = row, 1, 0
        return self._batch(ids, mask, types, 0)

    def _flat_batch(self, rows: Sequence[Sequence[int]]) -> EmbeddedBatch:
        ids = numpy.array([token for row in rows for token in row], numpy.int64)
        offsets = numpy.cumsum([0, *map(len, rows[:-1])], dtype=numpy.int64)
        return EmbeddedBatch(inputs={IDS_INPUT: ids, _OFFSETS: offsets}, token_count=len(ids))

    def _batch(self, ids: Array, mask: Array, types: Array, prompt_length: int) -> EmbeddedBatch:
        lengths = numpy.full(len(ids), prompt_length, numpy.int64)
        arrays = {IDS_INPUT: ids, _MASK: mask, _TYPES: types, _PROMPT_LENGTHS: lengths}
        inputs = {input_name: array for input_name, array in arrays.items() if input_name in self.facts.inputs}
        return EmbeddedBatch(inputs=inputs, token_count=int(mask.sum()))

    def _prompt_length(self, prompt: str) -> int:
        """The number of tokens that a prompt takes at the beginning of a text, for models that leave them out."""
        if not prompt or _PROMPT_LENGTHS not in self.facts.inputs:
            return 0
        tokens = self._encode_one(prompt).ids
        return len(tokens) - len(self.settings.special_token_ids.intersection(tokens[-1:]))

    def _encode_one(self, sentence: str) -> Any:
        """The encoding of a text; that of no text without a tokenizer."""
        if self._tokenizer is None:
            return SimpleNamespace(ids=[], type_ids=[])
        with tokenizer_errors("the text"):
            [encoding] = self._tokenizer.encode_batch([sentence])
        return encoding


# One for each bundle that runs, since it takes long to read a tokenizer.
_READERS: Final[WeakKeyDictionary[Bundle, TextReader]] = WeakKeyDictionary()


def _text_reader(bundle: Bundle) -> TextReader:
    """What makes the inputs of a bundle that embeds texts."""
    if (reader := _READERS.get(bundle)) is None:
        facts = embedding_facts(bundle.entry_point)
        if facts is None:
            raise InputError(
                f"{bundle.location}: to encode texts, expected a model that takes {IDS_INPUT} [batch, sequence] and returns "
                f"{_RESULT!r}, such as one of sentence-transformers"
            )
        reader = _READERS[bundle] = TextReader(bundle, facts)
    return reader


def encode(
    pipeline: "TextPipeline",
    sentences: Any,
    prompt_name: str | None,
    prompt: str | None,
    batch_size: int,
    adapter: Any = None,
) -> Any:
    """Embed texts; see `CallablePipeline.encode`."""
    reader = _text_reader(pipeline.bundle)
    rows = _listed(sentences)
    check_adapter_count(adapter, len(rows))
    if batch_size < 1:
        raise InputError(f"batch_size: expected 1 or more, found {batch_size}")
    prompt = reader.settings.prompt(prompt_name) if prompt is None else prompt
    if not rows:
        return _no_embeddings(pipeline.arrays, reader.facts.result)
    answers, positions = [], []
    with pipeline.inference():
        for batch in reader.batches([len(row) for row in rows], batch_size):
            inputs = reader.read_texts([rows[position] for position in batch], prompt).inputs
            answer = pipeline(
                **adapter_of(batch, adapter),
                **{
                    input_name: pipeline.arrays.from_elements(array, reader.facts.inputs[input_name])
                    for input_name, array in inputs.items()
                },
            )
            answers.append(answer[_RESULT])
            positions += batch
        embeddings = pipeline.arrays.join(answers)[numpy.argsort(positions).tolist()]
    return embeddings[0] if isinstance(sentences, str) else embeddings


def _listed(sentences: Any) -> list[str]:
    """Texts as a list; `encode` takes a single one too."""
    try:
        rows = [sentences] if isinstance(sentences, str) else list(sentences)
    except TypeError:
        rows = [sentences]
    for row in rows:
        if not isinstance(row, str):
            raise InputError(f"encode: expected a text, or a list of texts, found {type(row).__name__}")
    return rows


def _no_embeddings(arrays: ArrayOps, result: Edge) -> Any:
    """The embeddings of no text, [0, dimension]."""
    dimension = result.shape[-1] if len(result.shape) == 2 else None
    if not isinstance(dimension, int):
        raise InputError("encode: expected 1 text or more, found an empty list: the size of the embeddings varies")
    return arrays.from_elements(numpy.zeros((0, dimension), ELEMENT_DTYPES[result.dtype]), result)


def _read_settings(bundle: Bundle) -> EmbeddingSettings:
    if PROMPTS_FILE not in bundle.files:
        return EmbeddingSettings()
    try:
        return msgspec.json.decode(bundle.read(PROMPTS_FILE), type=EmbeddingSettings)
    except JSON_ERRORS as error:
        raise InputError(f"{bundle.location}: {PROMPTS_FILE}: {error}") from None
