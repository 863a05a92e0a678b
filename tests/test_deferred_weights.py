"""Exports that never have all weights in memory write the bytes of an export from memory."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.state_dict_saver import save

import stagepack
from stagepack.capture.checkpoint import DataNeededError, DeferredTensors, checkpoint_file_tensors, read_checkpoint
from stagepack.capture.inputs import Inputs
from stagepack.capture.module_checkpoint import tensors_by_weight_name
from stagepack.capture.transformers.hugging_face import capture_pretrained
from stagepack.capture.transformers.pretrained_model import model_files
from stagepack.errors import CaptureError, OptionError
from stagepack.format.file_writing import write_pieces
from stagepack.format.reader import Bundle
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import ExportOptions, export_capture
from stagepack.torch_internals import FakeTensor
from tests.zoo.architectures.encoders import minilm_encoder_folder
from tests.zoo.cases import named

MODELS = [
    ("decoders-llama-tied", torch.bfloat16),
    *(
        pytest.param(name, dtype, marks=pytest.mark.slow)
        for name, dtype in (
            ("mixture-of-experts-mixtral", torch.float32),
            ("decoders-llama", torch.bfloat16),
            ("decoders-gpt2", torch.float32),
            ("encoders-bert", torch.bfloat16),
            ("encoder-decoders-t5", torch.float32),
            ("vision-resnet", torch.bfloat16),
            ("audio-whisper", torch.float32),
        )
    ),
]


def exported(source: str, out: Path, *, deferred: bool) -> Bundle:
    capture = capture_pretrained(source, Inputs(), deferred=deferred)
    assert (capture.deferred is not None) == deferred
    return export_capture(capture, out=out, cut_options=CutOptions(stages=3))


@pytest.mark.parametrize(("name", "dtype"), MODELS)
def test_a_folder_becomes_the_same_bundle(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = named(name)[0].build()
    model.to(dtype).save_pretrained(tmp_path / "model", max_shard_size="100kB")  # type: ignore[operator]
    source = str(tmp_path / "model")
    bundles = [exported(source, tmp_path / str(deferred), deferred=deferred) for deferred in (True, False)]
    assert bundles[0].digest == bundles[1].digest


def test_weights_are_converted_to_another_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, _ = named("decoders-llama")[0].build()
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    source = str(tmp_path / "model")
    digests = set()
    for deferred in (True, False):
        capture = capture_pretrained(source, Inputs(), deferred=deferred, dtype="bfloat16")
        assert (capture.deferred is not None) == deferred
        options = ExportOptions(assets=model_files(capture.model))
        bundle = export_capture(
            capture, out=tmp_path / str(deferred), cut_options=CutOptions(stages=2), options=options
        )
        digests.add(bundle.digest)
    assert len(digests) == 1
    graph = bundle.graph(0)
    assert {weight.dtype for weight in graph.weights if weight.kind == "parameter"} == {"bfloat16"}
    assert json.loads((bundle.path / "config.json").read_text())["dtype"] == "bfloat16"
    loaded = stagepack.load(bundle, runtime="torch")
    ids = torch.arange(8).reshape(1, 8)
    converted = type(model).from_pretrained(source, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=ids, attention_mask=torch.ones_like(ids))["logits"], converted(ids).logits)


@pytest.mark.parametrize(
    ("model", "dtype", "message"),
    [
        ("gpt2", "int8", "dtype: expected one of float64, float32, float16, bfloat16, found int8"),
        ("gpt2", torch.int64, "dtype: expected one of float64, .*, found torch.int64"),
        (torch.nn.ReLU(), "bfloat16", r"dtype: it is for a Hugging Face folder or hub name: convert a module yourself"),
    ],
)
def test_a_dtype_that_is_not_possible(model: Any, dtype: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=message):
        stagepack.export(model, (torch.ones(1),), out=tmp_path / "m.stagepack", dtype=dtype)


@pytest.mark.slow
def test_real_weights_become_the_same_bundle(tmp_path: Path) -> None:
    bundles = [
        exported(minilm_encoder_folder(), tmp_path / str(deferred), deferred=deferred) for deferred in (True, False)
    ]
    assert bundles[0].digest == bundles[1].digest


def test_what_is_done_with_deferred_tensors_is_done_with_their_data(tmp_path: Path) -> None:
    torch.save({"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(2, 3)}, tmp_path / "c.bin")
    tensors = checkpoint_file_tensors(tmp_path / "c.bin")
    deferred = DeferredTensors()
    a, b = deferred.add(tensors["a"]), deferred.add(tensors["b"])
    with deferred:
        stacked = torch.nn.Parameter(torch.stack([a, b.to(torch.bfloat16).float()]).transpose(1, 2))
        halves = a.chunk(3, dim=1)
        equal = torch.equal(a, b), torch.equal(b, b.clone())
        with pytest.raises(DataNeededError):
            a.add_(1)
    assert equal == (False, True)
    assert isinstance(stacked, FakeTensor)
    assert isinstance(stacked, torch.nn.Parameter)
    assert torch.equal(deferred.real(stacked)[0].T, torch.arange(6.0).reshape(2, 3))
    assert torch.equal(deferred.real(halves[2]), torch.tensor([[2.0], [5.0]]))
    assert deferred.real(torch.ones(1)) == 1


class Net(torch.nn.Module):
    """Tied weights, a persistent buffer, a buffer that no checkpoint has, one that calls write, a constant, and a transposed weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.BatchNorm1d(8).eval()
        self.transposed = torch.nn.Parameter(torch.randn(8, 4).T)
        self.lstm = torch.nn.LSTM(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight
        self.scale: torch.Tensor
        self.calls: torch.Tensor
        self.register_buffer("scale", torch.linspace(1, 2, 8), persistent=False)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self.calls.add_(1)
        hidden, _ = self.lstm(self.embedding(ids) * self.scale)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2) + torch.tensor([0.5])
        return self.head(hidden), hidden @ self.transposed.T + self.calls


@pytest.mark.parametrize("kind", ["c.bin", "c.safetensors", "c", "nested.bin"])
def test_a_module_with_a_checkpoint_becomes_the_same_bundle(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = Net()
    state = {name: tensor for name, tensor in model.state_dict().items() if name != "head.weight"}
    path = tmp_path / kind
    if kind == "c":
        with warnings.catch_warnings(action="ignore"):  # that it is one process
            save({"model": state, "optimizer": {"step": 1}}, checkpoint_id=path, no_dist=True)
    elif kind == "c.safetensors":
        save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    else:
        torch.save({"model": state} if kind == "nested.bin" else model.state_dict(), path)
    ids = torch.arange(6).reshape(2, 3)
    expected = stagepack.export(model, (ids,), out=tmp_path / "expected.stagepack", stages=2)
    found = stagepack.export(Net, (ids,), weights=path, out=tmp_path / "found.stagepack", stages=2)
    assert found.digest == expected.digest


def test_a_checkpoint_of_another_module_is_refused(tmp_path: Path) -> None:
    state = Net().state_dict()
    torch.save({**state, "other": torch.ones(1), "norm.bias": torch.ones(3)}, tmp_path / "c.bin")
    with pytest.raises(CaptureError, match=r"the model lacks other; .*norm\.bias \[3\] instead of \[8\]: pass"):
        stagepack.export(Net, (), weights=tmp_path / "c.bin", out=tmp_path / "m.stagepack")
    state.pop("lstm.bias_hh_l0")
    torch.save(state, tmp_path / "c.bin")
    with pytest.raises(CaptureError, match=r"the checkpoint lacks lstm\.bias_hh_l0: pass"):
        stagepack.export(Net, (), weights=tmp_path / "c.bin", out=tmp_path / "m.stagepack")
    with pytest.raises(OptionError, match="found Net"):
        stagepack.export(Net(), (), weights=tmp_path / "c.bin", out=tmp_path / "m.stagepack")
    (tmp_path / "c.safetensors").write_bytes(b"12345678{")
    save_file({"a": torch.ones(8)}, tmp_path / "whole.safetensors")
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "whole.safetensors").read_bytes()[:-1])
    for damaged in ("c.safetensors", "cut.safetensors"):
        with pytest.raises(CaptureError, match="cannot be read as a safetensors file"):
            stagepack.export(Net, (), weights=tmp_path / damaged, out=tmp_path / "m.stagepack")
    with pytest.raises(CaptureError, match="no such checkpoint"):
        stagepack.export(Net, (), weights=tmp_path / "none.bin", out=tmp_path / "m.stagepack")


def test_a_checkpoint_with_several_sets_of_weights_is_refused(tmp_path: Path) -> None:
    """Which of them is meant, nobody but the user knows."""
    path = tmp_path / "c.bin"
    inner = torch.nn.Linear(2, 2).state_dict()
    nested = {
        "weight": inner["weight"],
        "bias": inner["bias"],
        "part.weight": inner["weight"],
        "part.bias": inner["bias"],
    }
    weights = [[name] for name in nested]
    torch.save({"model": nested, "optimizer": {"state": {"step": torch.ones(1)}}}, path)
    found = tensors_by_weight_name(read_checkpoint(path), weights, "c.bin")
    assert found.keys() == nested.keys()
    torch.save({"model": nested, "ema": nested}, path)
    with pytest.raises(CaptureError, match=r"weights of the model 2 times: model\.\*, ema\.\*: pass a checkpoint"):
        tensors_by_weight_name(read_checkpoint(path), weights, "c.bin")


def test_a_damaged_distributed_checkpoint_is_refused(tmp_path: Path) -> None:
    with warnings.catch_warnings(action="ignore"):  # that it is one process
        save({"a": torch.ones(300), "b": torch.ones(300)}, checkpoint_id=tmp_path / "c", no_dist=True)
    tensors = read_checkpoint(tmp_path / "c")
    assert torch.equal(tensors["a"].read(), torch.ones(300))
    data_path = next((tmp_path / "c").glob("*.distcp"))
    content = data_path.read_bytes()
    data_path.write_bytes(content[:100])
    with pytest.raises(CaptureError, match=r"b: torch\.distributed\.checkpoint cannot read it: "):
        tensors["b"].read()
    data_path.write_bytes(content)
    with pytest.raises(CaptureError, match="was changed while it was read"):
        tensors["b"].read()


@pytest.mark.parametrize(
    "tensor", [torch.eye(2).to_sparse(), torch.empty(2, 2, device="meta")], ids=["sparse", "without data"]
)
def test_tensors_that_are_not_dense_are_refused(
    tensor: torch.Tensor, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch.save({"weight": tensor, "bias": torch.ones(2)}, tmp_path / "c.bin")
    with pytest.raises(CaptureError, match=f"weight is {request.node.callspec.id}: expected a dense tensor"):
        stagepack.export(
            lambda: torch.nn.Linear(2, 2), (torch.ones(1, 2),), weights=tmp_path / "c.bin", out=tmp_path / "m.stagepack"
        )


def test_an_index_says_where_each_tensor_is(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(2)}, tmp_path / "2.safetensors")
    index = tmp_path / "model.safetensors.index.json"

    def read(weight_map: object) -> dict[str, list[float]]:
        index.write_text(json.dumps({"weight_map": weight_map}))
        return {name: tensor.read().tolist() for name, tensor in read_checkpoint(tmp_path).items()}

    assert read({"a": "1.safetensors", "b": "2.safetensors"}) == {"a": [1, 1], "b": [0, 0]}
    assert read({"b": "1.safetensors", "a": "1.safetensors"}) == {"b": [1, 1], "a": [1, 1]}
    with pytest.raises(CaptureError, match=r"2\.safetensors: has no tensor 'a', which model"):
        read({"a": "2.safetensors"})
    for outside in ("../1.safetensors", str(tmp_path / "1.safetensors")):
        with pytest.raises(CaptureError, match="expected names of files in its folder"):
            read({"a": outside})
    malformed_maps: list[object] = [[], {"a": 1}, {"a": []}]
    for malformed in malformed_maps:
        with pytest.raises(CaptureError, match="expected an index with a weight_map"):
            read(malformed)
    index.write_text('{"weight_map": {"b": "1.safetensors", "b": "2.safetensors"}}')
    with pytest.raises(CaptureError, match="duplicate key 'b'"):
        read_checkpoint(tmp_path)


def test_a_checkpoint_that_changes_while_it_is_exported_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, path)
    tensors = read_checkpoint(path)
    location = tensors["a"].location
    assert location is not None
    write_pieces(tmp_path / "a", [location])
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, tmp_path / "new.safetensors")
    (tmp_path / "new.safetensors").rename(path)
    with pytest.raises(OSError, match="was changed while it was read"):
        write_pieces(tmp_path / "b", [location])
    with pytest.raises(CaptureError, match="was changed while it was read"):
        tensors["b"].read()


def test_a_function_that_needs_its_parameters_gets_them(tmp_path: Path) -> None:
    def make() -> torch.nn.Module:
        layer = torch.nn.Linear(2, 2)
        with torch.no_grad():
            assert layer.weight.sum().item() != 0
        return layer

    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "c.bin")
    stagepack.export(make, (torch.ones(1, 2),), weights=tmp_path / "c.bin", out=tmp_path / "m.stagepack")


# The weights have 400 MB, the process 256 MB beside what it has when torch is imported.
LIMITED_EXPORT = """
import re, resource, sys
import torch, stagepack
from safetensors.torch import load_file

small_tensors = []

def make():
    layers = []
    for _ in range(24):
        layers.append(torch.nn.Linear(2048, 2048, bias=False))
        small_tensors.extend(torch.ones(1) for _ in range(1000))
    return torch.nn.Sequential(*layers)

torch.export.export(torch.nn.Linear(1, 1), (torch.ones(1, 1),))
used = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (used + 2**28, used + 2**28))
example = (torch.ones(1, 2048),)
if sys.argv[1] == "deferred":
    stagepack.export(make, example, weights=sys.argv[2], out=sys.argv[3], stages=4)
else:
    model = make()
    model.load_state_dict(load_file(sys.argv[2]))
    stagepack.export(model, example, out=sys.argv[3], stages=4)
"""


@pytest.mark.parametrize(
    ("how", "error"),
    [("deferred", None), pytest.param("in memory", "t allocate memory", marks=pytest.mark.slow)],
)
def test_a_model_larger_than_the_memory_is_exported(how: str, error: str | None, tmp_path: Path) -> None:
    weight = torch.ones(2048, 2048)
    save_file({f"{layer}.weight": weight * layer for layer in range(24)}, tmp_path / "c.safetensors")
    command = [
        sys.executable,
        "-c",
        LIMITED_EXPORT,
        how,
        str(tmp_path / "c.safetensors"),
        str(tmp_path / "m.stagepack"),
    ]
    run = subprocess.run(command, capture_output=True, text=True)
    if error is not None:
        assert error in run.stderr
    else:
        assert run.stderr == ""
        assert stagepack.open(tmp_path / "m.stagepack").entry_point.stages[3].weight_bytes == 6 * 2**24


def test_a_folder_that_lacks_weights_is_refused(tmp_path: Path) -> None:
    model, _ = named("decoders-llama")[0].build()
    model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    path = tmp_path / "model" / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}
    del tensors["model.norm.weight"]
    tensors["lm_head.weight"] = torch.zeros(3, 4)
    save_file(tensors, path, metadata={"format": "pt"})
    for deferred in (True, False):
        with pytest.raises(CaptureError, match=r"lm_head.weight is \[3, 4\] .*; model.norm.weight is missing"):
            capture_pretrained(str(tmp_path / "model"), Inputs(), deferred=deferred)
