"""The requests of a measurement: from a file, or drawn from what the server says of its models; and their answers as they arrive.

The times of a text are those of ``vllm bench serve``: the time to its first token (TTFT), the time between two events of its stream (ITL),
and the mean time of each token after the first one (TPOT).
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import msgspec
import numpy
from msgspec import Struct

from stagepack.errors import OptionError, StagepackError
from stagepack.format.rules import JSON_ERRORS
from stagepack_serving.bench.http_client import EncodedRequest, HttpClient, NoAnswerError, ServerUrl
from stagepack_serving.protocol.datatypes import NUMPY_DTYPES

_EVENT_END: Final = b"\n\n"
_DATA: Final = b"data:"
_DONE: Final = b"[DONE]"
Api = Literal["infer", "completions", "chat"]
# Of each request that is drawn, so many are sent in turn.
_DRAWN_REQUESTS: Final = 32
_BINARY_HEADER: Final = "inference-header-content-length"
# Token ids are drawn below it if the metadata does not say how many there are.
_LEAST_VOCABULARY: Final = 256
# Tokens below it are often special.
_FIRST_TOKEN: Final = 3
_WORDS: Final = ("time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school")
_ERROR_CHARACTERS: Final = 500


class _Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(Struct):
    """What is read of an event, or of a whole answer, of OpenAI's API or of the generate extension."""

    choices: list[msgspec.Raw] = []
    usage: _Usage | None = None
    error: Any = None
    text_output: Any = None


_DECODER: Final = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class TextTimes:
    """When the parts of a text arrived, in seconds of `time.perf_counter`, and how many tokens they have."""

    arrivals: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0


class AnswerReader:
    """Reads the body of an answer that is no text: it is whole when the connection says so."""

    times: TextTimes | None = None

    def read(self, data: bytes) -> None:
        """Read a part of the body."""

    @property
    def is_whole(self) -> bool:
        """Whether the body is a whole answer without an error, if the connection has delivered all of it."""
        return True


class EventReader(AnswerReader):
    """Reads the server-sent events of a text."""

    def __init__(self) -> None:
        self.times: TextTimes = TextTimes()
        self._buffer = bytearray()
        self._has_error = False
        self._is_done = False

    def read(self, data: bytes) -> None:
        """Read a part of the body."""
        now = time.perf_counter()
        self._buffer += data
        while (end := self._buffer.find(_EVENT_END)) >= 0:
            event, self._buffer = bytes(self._buffer[:end]), self._buffer[end + len(_EVENT_END) :]
            if event.startswith(_DATA):
                self._read_event(event[len(_DATA) :].strip(), now)

    def _read_event(self, content: bytes, now: float) -> None:
        if content == _DONE:
            self._is_done = True
            return
        try:
            event = _DECODER.decode(content)
        except JSON_ERRORS:
            self._has_error = True
            return
        self._has_error |= event.error is not None
        if event.choices or event.text_output is not None:
            self.times.arrivals.append(now)
        if event.usage is not None:
            self.times.prompt_tokens = event.usage.prompt_tokens
            self.times.output_tokens = event.usage.completion_tokens

    @property
    def is_whole(self) -> bool:
        """Whether the stream has ended as it should, with a text and without an error."""
        return self._is_done and not self._has_error and bool(self.times.arrivals)


class BenchError(StagepackError):
    """A server cannot be measured: it does not answer, or refuses the requests. The message has its reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """How requests are drawn.

    Attributes:
        model: the name of the model; None for the only one of the server.
        api: which path of the server is asked; None for texts if the model writes texts, and inferences otherwise.
        shapes: the sizes of inputs with dynamic ones, by name.
        prompt_tokens: the number of tokens of a prompt.
        output_tokens: the number of tokens of an answer.
        timeout: the seconds after which the client gives up, which requests tell the server; None to tell nothing.
        seed: that of the random numbers.
    """

    model: str | None = None
    api: Api | None = None
    shapes: Mapping[str, tuple[int, ...]]
    prompt_tokens: int = 64
    output_tokens: int = 32
    timeout: float | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSource:
    """The requests of a measurement, which are sent in turn, and what they are.

    Attributes:
        is_stream: whether the answers are texts, which come as events.
    """

    model: str
    api: Api
    requests: Sequence[EncodedRequest]
    is_stream: bool

    def answer_reader(self) -> AnswerReader:
        """Return what reads one answer."""
        return EventReader() if self.is_stream else AnswerReader()


def read_requests(file: Path, url: ServerUrl, model: str | None) -> RequestSource:
    """Read a file with the JSON of a request on each line; its fields say for which path it is."""
    bodies: list[dict[str, Any]] = []
    for line_number, line in enumerate(file.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            bodies.append(msgspec.json.decode(line, type=dict[str, Any]))
        except JSON_ERRORS as error:
            raise OptionError(f"{file}: line {line_number}: expected a JSON object: {error}") from None
    if not bodies:
        raise OptionError(f"{file}: expected a request on each line, found none")
    kinds = {_api_of(file, line_number, body) for line_number, body in enumerate(bodies, start=1)}
    if len(kinds) > 1:
        raise OptionError(f"{file}: expected requests of one kind, found {' and '.join(sorted(kinds))}")
    (api,) = kinds
    if api == "infer":
        if model is None:
            raise OptionError(f"{file}: the requests do not say their model: pass its name")
        requests = [_post(url, f"/v2/models/{model}/infer", body) for body in bodies]
        return RequestSource(model=model, api=api, requests=requests, is_stream=False)
    model = model or bodies[0].get("model")
    if not isinstance(model, str):
        raise OptionError(f"{file}: the requests do not say their model: pass its name")
    requests = [_text_request(url, api, {"model": model} | body) for body in bodies]
    return RequestSource(model=model, api=api, requests=requests, is_stream=True)


def _api_of(file: Path, line_number: int, body: Mapping[str, Any]) -> Api:
    fields: Mapping[str, Api] = {"inputs": "infer", "prompt": "completions", "messages": "chat"}
    for field_name, api in fields.items():
        if field_name in body:
            return api
    raise OptionError(f"{file}: request {line_number}: expected one of the fields {', '.join(fields)}, found none")


async def draw_requests(client: HttpClient, url: ServerUrl, options: DrawOptions) -> RequestSource:
    """Draw requests for a model of the server."""
    text_models = [fields["id"] for fields in (await _get(client, url, "/v1/models") or {}).get("data", [])]
    model = options.model or await _only_model(client, url, text_models)
    metadata = await _get(client, url, f"/v2/models/{model}")
    api = options.api or ("completions" if model in text_models else "infer")
    random = numpy.random.default_rng(options.seed)
    if api == "infer":
        if metadata is None:
            raise BenchError(f"the server has no metadata of a model {model!r}: GET /v2/models/{model} is not answered")
        server = await _get(client, url, "/v2") or {}
        is_binary = "binary_tensor_data" in server.get("extensions", [])
        requests = [
            _inference_request(url, metadata, options, random, is_binary=is_binary) for _ in range(_DRAWN_REQUESTS)
        ]
        return RequestSource(model=model, api=api, requests=requests, is_stream=False)
    bodies = (_drawn_text(api, model, metadata, options, random) for _ in range(_DRAWN_REQUESTS))
    return RequestSource(
        model=model, api=api, requests=[_text_request(url, api, body) for body in bodies], is_stream=True
    )


async def check_requests(client: HttpClient, source: RequestSource) -> None:
    """Send the first request alone, and refuse what the server refuses."""
    status, body = await _answer(client, source.requests[0])
    reader = source.answer_reader()
    reader.read(body)
    if status == 200 and reader.is_whole:
        return
    answer = body[:_ERROR_CHARACTERS].decode(errors="replace")
    raise BenchError(f"the first request to the model {source.model} has the answer {status}: {answer}")


async def _only_model(client: HttpClient, url: ServerUrl, text_models: Sequence[str]) -> str:
    status, body = await _answer(client, url.encode("POST", "/v2/repository/index", b"{}"))
    entries = msgspec.json.decode(body) if status == 200 else []
    names = dict.fromkeys([*(entry["name"] for entry in entries if entry.get("state") == "READY"), *text_models])
    if len(names) != 1:
        raise BenchError(f"the server has {len(names)} models: name one of {', '.join(names) or 'them'}")
    return str(*names)


async def _get(client: HttpClient, url: ServerUrl, path: str) -> Any:
    """The JSON at a path; None if the server has none there."""
    status, body = await _answer(client, url.encode("GET", path))
    if status in (401, 403):
        raise BenchError(f"GET {path} has the answer {status}: the server requires a token")
    try:
        return msgspec.json.decode(body) if status == 200 else None
    except JSON_ERRORS:
        return None


async def _answer(client: HttpClient, request: EncodedRequest) -> tuple[int, bytes]:
    try:
        return await client.fetch(request)
    except NoAnswerError as error:
        raise BenchError(f"the server does not answer {request.head.target.decode()}: {error}") from None


def _inference_request(
    url: ServerUrl,
    metadata: Mapping[str, Any],
    options: DrawOptions,
    random: numpy.random.Generator,
    *,
    is_binary: bool,
) -> EncodedRequest:
    """A request with drawn inputs."""
    known_names = [tensor["name"] for tensor in metadata["inputs"]]
    if unknown_names := sorted(set(options.shapes) - set(known_names)):
        raise OptionError(f"{unknown_names[0]}: the model has no such input: expected one of {', '.join(known_names)}")
    inputs, arrays = [], []
    for tensor in metadata["inputs"]:
        shape = _shape(tensor, options.shapes)
        array = _drawn_array(tensor["datatype"], shape, random)
        entry = {"name": tensor["name"], "datatype": tensor["datatype"], "shape": shape}
        if is_binary:
            entry["parameters"] = {"binary_data_size": array.nbytes}
            arrays.append(array.tobytes())
        else:
            entry["data"] = array.reshape(-1).tolist()
        inputs.append(entry)
    parameters: dict[str, Any] = {"binary_data_output": True} if is_binary else {}
    if options.timeout is not None:
        parameters["timeout"] = round(1e6 * options.timeout)
    head = msgspec.json.encode({"inputs": inputs, "parameters": parameters})
    headers = [(_BINARY_HEADER, str(len(head))), ("content-type", "application/octet-stream")] if is_binary else []
    return url.encode("POST", f"/v2/models/{metadata['name']}/infer", b"".join([head, *arrays]), headers)


def _shape(tensor: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> list[int]:
    """The shape of an input; dynamic sizes are 1 unless the caller says them."""
    expected, chosen = list(tensor["shape"]), shapes.get(tensor["name"])
    if chosen is None:
        return [1 if size == -1 else size for size in expected]
    fits = len(chosen) == len(expected) and all(
        -1 in pair or len(set(pair)) == 1 for pair in zip(expected, chosen, strict=True)
    )
    if not fits:
        raise OptionError(f"{tensor['name']}: expected sizes that fit {expected}, found {list(chosen)}")
    return list(chosen)


def _drawn_array(datatype: str, shape: Sequence[int], random: numpy.random.Generator) -> numpy.ndarray[Any, Any]:
    """An array with numbers from 0 to 1: integers are 0 or 1, as they may be indices."""
    if datatype not in NUMPY_DTYPES:
        raise BenchError(f"no numbers are drawn for the datatype {datatype}: pass requests in a file")
    dtype = NUMPY_DTYPES[datatype]
    if datatype == "BF16":  # its upper half is that of a float32
        return (random.random(shape, numpy.float32).view(numpy.uint32) >> 16).astype(dtype)
    if dtype.kind == "f":
        return random.random(shape, numpy.float32).astype(dtype)
    return random.integers(0, 2, shape).astype(dtype)


def _drawn_text(
    api: Api, model: str, metadata: Any, options: DrawOptions, random: numpy.random.Generator
) -> dict[str, Any]:
    """The fields of a request for a text."""
    fields: dict[str, Any] = {"model": model, "max_tokens": options.output_tokens, "temperature": 0}
    if api == "chat":
        content = " ".join(random.choice(_WORDS, options.prompt_tokens))
        return fields | {"messages": [{"role": "user", "content": content}]}
    vocabulary = _vocabulary(metadata)
    prompt = random.integers(min(_FIRST_TOKEN, vocabulary - 1), vocabulary, options.prompt_tokens)
    return fields | {"prompt": prompt.tolist()}


def _vocabulary(metadata: Any) -> int:
    """How many tokens there are for certain: as many as the logits of a token."""
    outputs = {} if metadata is None else {tensor["name"]: tensor["shape"] for tensor in metadata["outputs"]}
    size = outputs.get("logits", [-1])[-1]
    return size if size > 0 else _LEAST_VOCABULARY


def _text_request(url: ServerUrl, api: Api, fields: Mapping[str, Any]) -> EncodedRequest:
    """A request for a text whose answer is a stream that ends with the numbers of tokens."""
    path = "/v1/chat/completions" if api == "chat" else "/v1/completions"
    return _post(url, path, {**fields, "stream": True, "stream_options": {"include_usage": True}})


def _post(url: ServerUrl, path: str, fields: Mapping[str, Any]) -> EncodedRequest:
    return url.encode("POST", path, msgspec.json.encode(fields), [("content-type", "application/json")])
