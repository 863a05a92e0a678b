"""The bytes of an ONNX model are changed as its graph is, or refused; a model that somebody has changed gives one typed error."""

import contextlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import stagepack
from stagepack.adapter.onnx_model import ModelChanges, adapt_model
from stagepack.adapter.rewrite import Pair
from stagepack.adapter.uses import find_uses
from stagepack.errors import AdapterError, FormatError
from stagepack.format.graph import Graph
from stagepack.format.onnx import parse_onnx_model
from stagepack.format.protobuf import Field, join_message, split_message
from stagepack.roads.onnx import add_onnx
from tests.adapters.lora import write_lora
from tests.adapters.models import export_model, make_model

MODULES = ("transformer.wte", "transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj")

fields = st.lists(
    st.one_of(
        st.builds(Field, st.integers(1, 2**28), st.binary(max_size=300), st.just(2)),
        st.builds(Field, st.integers(1, 2**28), st.integers(0, 2**64 - 1), st.just(0)),
        st.builds(Field, st.integers(1, 2**28), st.binary(min_size=8, max_size=8), st.just(1)),
        st.builds(Field, st.integers(1, 2**28), st.binary(min_size=4, max_size=4), st.just(5)),
    )
)


@given(fields)
def test_the_fields_of_a_message_are_read_as_they_were_written(message: list[Field]) -> None:
    assert split_message(join_message(message)) == message


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Graph, ModelChanges, bytes]:
    """The graph of a GPT-2, changes of three of its modules, and its ONNX model."""
    folder = tmp_path_factory.mktemp("gpt2")
    model = make_model("gpt2")
    bundle = add_onnx(export_model(model, folder)).bundle
    lora = write_lora(model, folder / "lora", dict.fromkeys(MODULES, 2))
    adapter = stagepack.write_adapter(bundle, lora, out=folder / "a")
    graph = bundle.graph(0)
    changes = ModelChanges(
        uses=find_uses(graph, adapter.changes),
        pairs=dict.fromkeys(MODULES, Pair(2)),
        replaced=[(graph.weights[2], 1)],
        count=1,
        shared_modules=frozenset(),
    )
    return graph, changes, bundle.onnx_file(0).content


def test_the_model_is_one_that_the_parser_takes(gpt2: tuple[Graph, ModelChanges, bytes]) -> None:
    graph, changes, content = gpt2
    assert join_message(split_message(content)) == content
    before, adapted = parse_onnx_model(content, "m"), adapt_model(content, graph, changes, "adapter.rows", "f")
    after = parse_onnx_model(adapted.content, "m")
    assert [value.name for value in after.inputs] == [*(value.name for value in before.inputs), "adapter.rows"]
    assert after.outputs == before.outputs
    own = {tensor.name for tensor in adapted.tensors}
    assert {tensor.name for tensor in after.tensors} == own | {
        adapted.new_names.get(tensor.name, tensor.name) for tensor in before.tensors
    }
    assert {tensor.location for tensor in after.tensors if tensor.name in own} == {"f"}
    assert max(tensor.offset + tensor.length for tensor in after.tensors if tensor.name in own) == adapted.byte_count


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b"\x22\x04Gemm", b"\x22\x04Gelu", "expected an ONNX model that uses its weight"),
        (b"transformer.h.0.attn.c_attn.weight", b"transformer.h.0.attn.c_attn.wxight", "uses its weight as the graph"),
        (b"\x22\x06Gather", b"\x22\x06Scaler", "transformer.wte: expected an ONNX model that uses its weight"),
    ],
)
def test_a_model_that_uses_a_weight_otherwise_is_refused(
    old: bytes, new: bytes, says: str, gpt2: tuple[Graph, ModelChanges, bytes]
) -> None:
    graph, changes, content = gpt2
    assert old in content
    with pytest.raises(AdapterError, match=says):
        adapt_model(content.replace(old, new), graph, changes, "adapter.rows", "f")


def test_a_model_whose_bytes_were_changed_gives_typed_errors(gpt2: tuple[Graph, ModelChanges, bytes]) -> None:
    graph, changes, content = gpt2
    drawn, adapted_count = random.Random(0), 0  # noqa: S311 - a fixed sequence
    for _ in range(400):
        changed = bytearray(content)
        for _ in range(drawn.randint(1, 4)):
            changed[drawn.randrange(len(changed))] = drawn.randrange(256)
        with contextlib.suppress(FormatError):
            parse_onnx_model(bytes(changed), "m")
            with contextlib.suppress(AdapterError):
                adapt_model(bytes(changed), graph, changes, "adapter.rows", "f")
                adapted_count += 1
    assert adapted_count > 20
