"""Embeddings of texts with a served model."""

import asyncio
import base64
import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy

from stagepack.errors import InputError
from stagepack.format.reader import Bundle
from stagepack_loaders.elements import Array
from stagepack_loaders.versions import StageVersion
from stagepack_serving.protocol.datatypes import NUMPY_DTYPES
from stagepack_serving.server.access_log import current_record, weight_fields
from stagepack_serving.server.errors import AssetError, BadRequestError, RequestError, RequestStatus, errors_of_field
from stagepack_serving.server.model_part import ModelPart
from stagepack_serving.server.parameters import ADAPTER_PARAMETER, InferenceRequest, InferenceTensor
from stagepack_serving.server.served_model import ServedModel
from stagepack_text.embeddings import (
    IDS_INPUT,
    PROMPTS_FILE,
    EmbeddedBatch,
    EmbeddingFacts,
    TextReader,
    embedding_facts,
    vocabulary_size,
)
from stagepack_text.openai.requests import EmbeddingFields
from stagepack_text.prompts import TOKENIZER_FILE
from stagepack_text.sampling import logits_as_floats
from stagepack_text.version_assets import VersionAssets

# Texts of a request that run together, as in `encode` of sentence-transformers.
_BATCH_SIZE: Final = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Embeddings:
    """The embeddings of a request, float32 [text, dimension], and the number of tokens of all texts."""

    vectors: Array
    token_count: int


class Embedder(ModelPart):
    """Embeds texts with a model."""

    def __init__(self, facts: EmbeddingFacts, model: ServedModel) -> None:
        self._readers = VersionAssets((TOKENIZER_FILE, PROMPTS_FILE), functools.partial(_read_assets, facts=facts))
        self._model = model
        self.check_version(model.weights)
        ids_dtype = NUMPY_DTYPES[model.interface.inputs[IDS_INPUT].datatype]
        self._vocabulary_size = vocabulary_size(model.bundle) or numpy.iinfo(ids_dtype).max
        [self._output] = model.interface.outputs

    def check_version(self, weights: StageVersion) -> None:
        """See `ModelPart`: its tokenizer and its prompts are read."""
        self._readers.of(weights.bundle)

    async def embed(
        self, sentences: Sequence[str] | Sequence[Sequence[int]], fields: EmbeddingFields, deadline: asyncio.Timeout
    ) -> Embeddings:
        """Embed texts, all as one version of the model has it."""
        adapter, weights = self._model.adapter_named(fields.model), self._model.weights
        if (record := current_record.get()) is not None:
            record.weights = weights
        reader = self._readers.of(weights.bundle)
        with self._errors_of("prompt_name"):
            prompt = reader.settings.prompt(fields.prompt_name)
        with self._errors_of("dimensions"):
            dimensions = self._dimensions(reader, fields.dimensions)
        positions = [*reader.batches([len(sentence) for sentence in sentences], _BATCH_SIZE)]
        with self._errors_of("input"):
            # In a thread: a long text takes as long as other requests must not wait for.
            batches = [
                await asyncio.to_thread(self._read, reader, [sentences[position] for position in batch], prompt)
                for batch in positions
            ]
        tasks = [asyncio.ensure_future(self._model.infer(self._request(batch, adapter), deadline)) for batch in batches]
        try:
            with errors_of_field("input"):
                answers = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        rows = numpy.concatenate([logits_as_floats(output.array, reader.facts.result) for [output] in answers])
        vectors = rows[numpy.argsort(numpy.concatenate(positions))].astype("<f4", copy=False)
        return Embeddings(
            vectors=vectors if dimensions is None else _cut(reader, vectors, dimensions),
            token_count=sum(batch.token_count for batch in batches),
        )

    def _read(self, reader: TextReader, sentences: Sequence[Any], prompt: str) -> EmbeddedBatch:
        """The inputs of a batch."""
        if isinstance(sentences[0], str):
            return reader.read_texts(sentences, prompt)
        longest, limit = max(map(len, sentences)), reader.facts.max_length
        if limit is not None and longest > limit:
            raise InputError(f"input: expected at most {limit} tokens, found {longest}")
        lowest, highest = min(map(min, sentences)), max(map(max, sentences))
        # A runtime may take negative numbers from the end of the table, and read memory beyond it.
        if lowest < 0 or highest >= self._vocabulary_size:
            wrong_token = lowest if lowest < 0 else highest
            raise InputError(f"input: expected tokens from 0 to {self._vocabulary_size - 1}, found {wrong_token}")
        return reader.read_tokens(sentences)

    @contextlib.contextmanager
    def _errors_of(self, field_name: str) -> Iterator[None]:
        try:
            yield
        except InputError as error:
            with errors_of_field(field_name):
                raise BadRequestError(f"{self._model.name}: {error}") from None

    def _request(self, batch: EmbeddedBatch, adapter: str | None) -> InferenceRequest:
        datatypes = {input_name: tensor.datatype for input_name, tensor in self._model.interface.inputs.items()}
        inputs = [
            InferenceTensor(
                name=input_name,
                datatype=datatypes[input_name],
                array=array.astype(NUMPY_DTYPES[datatypes[input_name]], copy=False),
            )
            for input_name, array in batch.inputs.items()
        ]
        parameters = {} if adapter is None else {ADAPTER_PARAMETER: adapter}
        return InferenceRequest(inputs=inputs, output_names=[self._output], parameters=parameters)

    def _dimensions(self, reader: TextReader, dimensions: int | None) -> int | None:
        """The size that embeddings are cut to; None for all of them."""
        size = reader.facts.result.shape[-1]
        if dimensions is None or dimensions == size:
            return None
        allowed = reader.settings.matryoshka_dimensions
        if not allowed:
            raise InputError(
                "dimensions: the model does not say that its embeddings may be cut (matryoshka_dimensions in its config.json): leave it out"
            )
        is_allowed = isinstance(size, int) and dimensions < size if isinstance(allowed, bool) else dimensions in allowed
        if not is_allowed:
            sizes = f"1 to {size}" if isinstance(allowed, bool) else ", ".join(map(str, allowed))
            raise InputError(f"dimensions: expected {sizes}, found {dimensions}")
        return dimensions


def _cut(reader: TextReader, vectors: Array, dimensions: int) -> Array:
    """The beginning of each embedding, of length 1 if whole ones are."""
    beginnings = vectors[:, :dimensions]
    if not reader.settings.is_normalized:
        return beginnings
    lengths = numpy.linalg.norm(beginnings, axis=1, keepdims=True)
    unit_vectors: Array = beginnings / numpy.maximum(lengths, numpy.finfo(numpy.float32).tiny)
    return unit_vectors


def embedding_answer(fields: EmbeddingFields, embeddings: Embeddings) -> bytes:
    """Return the JSON of an answer."""
    if fields.encoding_format == "base64":
        encoded: list[Any] = [base64.b64encode(row.tobytes()).decode() for row in embeddings.vectors]
    elif not numpy.isfinite(embeddings.vectors).all():
        message = (
            f"{fields.model}: an embedding has NaN or infinity, which JSON has not: ask for encoding_format base64"
        )
        raise RequestError(RequestStatus.MODEL_FAILED, message)
    else:
        encoded = embeddings.vectors.tolist()
    usage = {"prompt_tokens": embeddings.token_count, "total_tokens": embeddings.token_count}
    data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(encoded)]
    heading = {"object": "list", "data": data, "model": fields.model}
    return msgspec.json.encode(heading | {"usage": usage} | weight_fields())


def embedder_of(model: ServedModel) -> Embedder:
    """Return what embeds texts with a model."""
    embedder = model.part(Embedder)
    if embedder is None:
        message = f"{model.name}: the model embeds no texts: expected a bundle that returns 'sentence_embedding'"
        raise BadRequestError(message)
    return embedder


def add_embedders(models: Sequence[ServedModel]) -> None:
    """Make the models of a bundle embed texts that can."""
    for model in models:
        facts = embedding_facts(model.bundle.entry_point)
        if facts is not None:
            model.parts[Embedder] = Embedder(facts, model)


def _read_assets(bundle: Bundle, facts: EmbeddingFacts) -> TextReader:
    try:
        return TextReader(bundle, facts)
    except InputError as error:
        raise AssetError(str(error)) from None
