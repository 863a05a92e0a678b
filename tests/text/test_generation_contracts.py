"""Generation keeps to the boundary contracts of encoder and decoder, as an inference does."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tritonclient.grpc

import stagepack
from tests.serve.servers import Server, grpc_client, infer_json, post_json, refused, stagepack_server

pytestmark = pytest.mark.xdist_group("serve")
POSITIONS, MAX_LENGTH, MAX_ROWS, BANDS, WIDTH, VOCABULARY = 32, 4, 8, 4, 16, 20
FRAME_COUNTS = (1, 2, 3, 7, 9, 17, 18, 40)  # 4 to 16, and even, are allowed


class Speech(torch.nn.Module):
    """Two frames become a row of the encoder, which the decoder keeps."""

    rows: torch.Tensor
    keys: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(VOCABULARY, WIDTH), torch.nn.Linear(WIDTH, VOCABULARY)
        self.bands = torch.nn.Linear(BANDS, WIDTH)
        self.register_buffer("rows", torch.zeros(1, MAX_ROWS, WIDTH), persistent=False)
        self.register_buffer("keys", torch.zeros(1, POSITIONS, WIDTH), persistent=False)

    def encode(self, input_features: torch.Tensor) -> torch.Tensor:
        """The rows [1, frames / 2, width]."""
        return self.bands(input_features[:, ::2] + input_features[:, 1::2])

    def decode(
        self,
        *,
        input_ids: torch.Tensor,
        cache_position: torch.Tensor,
        attention_mask: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
    ) -> torch.Tensor:
        """The logits [1, vocabulary]."""
        self.rows.index_copy_(1, torch.arange(encoder_hidden_states.shape[1]), encoder_hidden_states)
        self.write(input_ids, cache_position)
        return self.head((self.keys * attention_mask[..., None]).sum(1) + self.rows.mean(1))

    def write(self, input_ids: torch.Tensor, cache_position: torch.Tensor) -> None:
        self.keys.index_copy_(1, cache_position, self.tokens(input_ids))


class Text(Speech):
    """A decoder alone."""

    def forward(
        self, *, input_ids: torch.Tensor, cache_position: torch.Tensor, attention_mask: torch.Tensor
    ) -> torch.Tensor:
        self.write(input_ids, cache_position)
        return self.head((self.keys * attention_mask[..., None]).sum(1))


@pytest.fixture(scope="module")
def server(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("contracts")
    ranges = {"half": (2, MAX_ROWS), "length": (1, MAX_LENGTH), "rows": (1, MAX_ROWS)}
    half, length, rows = (torch.export.Dim(name, min=low, max=high) for name, (low, high) in ranges.items())
    tokens: dict[str, Any] = {
        "input_ids": torch.ones(1, 3, dtype=torch.int64),
        "cache_position": torch.arange(3),
        "attention_mask": (torch.arange(POSITIONS) < 3).long()[None],
    }
    token_shapes: dict[str, Any] = {"input_ids": {1: length}, "cache_position": {0: length}, "attention_mask": None}
    features = torch.randn(1, 8, BANDS)
    decoder_inputs = tokens | {"encoder_hidden_states": torch.randn(1, 4, WIDTH)}
    decoder_shapes = token_shapes | {"encoder_hidden_states": {1: rows}}
    entry_points = {
        "encode": stagepack.Inputs(kwargs={"input_features": features}, dynamic_shapes=({1: 2 * half},)),
        "decode": stagepack.Inputs(kwargs=decoder_inputs, dynamic_shapes=decoder_shapes),
    }
    speech, text = folder / "speech.stagepack", folder / "text.stagepack"
    stagepack.export(Speech().eval(), entry_points=entry_points, out=speech, stages=1)
    stagepack.export(Text().eval(), (), tokens, dynamic_shapes=token_shapes, out=text, stages=1)
    with stagepack_server([speech, text, qwen]) as server:
        yield server


def generate(server: Server, model_name: str, **fields: Any) -> tuple[int, Any]:
    return post_json(server, f"/v2/models/{model_name}/generate", max_tokens=3, **fields)


def encode(server: Server, features: Any) -> tuple[int, Any]:
    return infer_json(server, "speech_encode", input_features=numpy.array(features, "float32"))


@pytest.mark.parametrize("frame_count", FRAME_COUNTS)
def test_an_encoder_runs_only_on_what_its_contract_allows(server: Server, frame_count: int) -> None:
    features = [[[0.1] * BANDS] * frame_count]
    status, answer = generate(server, "speech", input_features=features)
    assert (status, answer) == encode(server, features)
    assert (status, "speech_encode: input_features: dimension 1: expected" in answer["error"]) == (400, True), answer
    array = numpy.array(features, "float32")
    tensor = tritonclient.grpc.InferInput("input_features", array.shape, "FP32").set_data_from_numpy(array)
    with contextlib.closing(grpc_client(server.grpc)) as client, refused("INVALID_ARGUMENT", says=answer["error"]):
        client.infer("speech", [tensor])


@pytest.mark.parametrize("frame_count", [4, 8, 16])
def test_what_the_contract_of_an_encoder_allows_is_answered(server: Server, frame_count: int) -> None:
    status, answer = generate(server, "speech", input_features=[[[0.1] * BANDS] * frame_count])
    assert (status, len(answer["output_ids"])) == (200, 3)


def test_a_decoder_reads_only_prompts_that_its_contract_allows(server: Server) -> None:
    for length in (1, MAX_LENGTH):
        assert generate(server, "text", input_ids=[5] * length)[0] == 200
    status, answer = generate(server, "text", input_ids=[5] * (MAX_LENGTH + 1))
    assert (status, "text: input_ids: dimension 1: expected 1 to 4" in answer["error"]) == (400, True), answer


@pytest.mark.parametrize(
    ("positions", "mask", "says"),
    [
        ([[0, 1], [0, 1]], [[1, 1], [1, 1]], ""),
        ([[0, 1], [64, 0]], [[1, 1], [1, 0]], ""),  # padding before the token of its text
        ([[0, 1], [0, 1]], [[1, 1], [0, 0]], "found none in slot 0 of row 1"),
        ([[0, 1], [0, 1]], [[1, 1], [1, 0]], "found none in slot 1 of row 1"),
        ([[0, 1], [0, 1]], [[1], [1]], "found none in slot 1 of row 0"),
    ],
)
def test_a_token_that_is_read_has_a_slot_in_the_mask(server: Server, positions: Any, mask: Any, says: str) -> None:
    arrays = {"input_ids": [[5, 6], [7, 8]], "cache_position": positions, "attention_mask": mask}
    values = {name: numpy.array(value, "int64") for name, value in arrays.items()}
    values["cache_moves"] = numpy.zeros((0, 4), "int64")
    inputs = [
        tritonclient.grpc.InferInput(name, array.shape, "INT64").set_data_from_numpy(array)
        for name, array in values.items()
    ]
    is_refused = refused("INVALID_ARGUMENT", says=says) if says else contextlib.nullcontext()
    with contextlib.closing(grpc_client(server.grpc)) as client, is_refused:
        client.infer("qwen", inputs, sequence_id=3, sequence_start=True, sequence_end=True)
