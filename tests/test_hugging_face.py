"""Hugging Face folders: captured without a word about their inputs, bit-equal, and opened again by stock transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import stagepack
from stagepack.capture.inputs import Inputs
from stagepack.capture.source import ModelSource
from stagepack.capture.transformers import pretrained_model
from stagepack.capture.transformers.hugging_face import capture_pretrained
from stagepack.capture.transformers.pretrained_model import model_files
from stagepack.errors import CaptureError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import ExportOptions, export_capture
from stagepack_loaders.example import replay_example
from tests.zoo.architectures.encoders import minilm_encoder_folder
from tests.zoo.case import Case
from tests.zoo.cases import named
from tools.fork_server import run_forked

CASES = {
    case.name: case
    for case in named(
        "decoders-llama",
        "decoders-llama-tied",
        "decoders-gpt2",
        "encoders-bert",
        "encoder-decoders-t5",
        "vision-vit",
        "vision-resnet",
        "mixture-of-experts-mixtral",
        "audio-whisper",
    )
}


def saved(case: Case, folder: Path) -> torch.nn.Module:
    """The model of a case, saved into a folder."""
    torch.manual_seed(0)
    model, _ = case.build()
    model.save_pretrained(folder)  # type: ignore[operator]
    return model


def same_state(one: torch.nn.Module, other: torch.nn.Module) -> bool:
    """Whether two models have the same parameters and buffers, bit for bit."""
    state = other.state_dict()
    return state.keys() == one.state_dict().keys() and all(
        torch.equal(t, state[n]) for n, t in one.state_dict().items()
    )


# Models of mechanisms that the others have too.
SLOW = (
    "encoder-decoders-t5",
    "decoders-llama-tied",
    "decoders-gpt2",
    "vision-vit",
    "mixture-of-experts-mixtral",
    "audio-whisper",
)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in CASES]
)
def test_a_folder_becomes_a_bundle_that_stock_transformers_opens(name: str, tmp_path: Path) -> None:
    model = saved(CASES[name], tmp_path / "model")
    capture = capture_pretrained(str(tmp_path / "model"), Inputs())
    assert capture.method == "torch.export.export"
    options = ExportOptions(assets=model_files(capture.model))
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3), options=options)
    assert replay_example(stagepack.load(bundle, allow_ops=["transformers"])).largest == 0.0
    assert {symbol.min for symbol in bundle.entry_point.symbols} == {1}
    opened, report = type(model).from_pretrained(tmp_path / "m.stagepack", output_loading_info=True)  # type: ignore[attr-defined]
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    # Between tensors whose sizes are no multiples of 64 bytes.
    assert all(key.startswith("__padding__") for key in report["unexpected_keys"])
    assert same_state(opened, model)


def test_the_real_minilm_equals_the_eager_model_at_other_sizes(tmp_path: Path) -> None:
    capture = capture_pretrained(minilm_encoder_folder(), Inputs())
    original = capture.model
    assert original is not None
    options = ExportOptions(assets=model_files(original))
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3), options=options)
    assert [edge.shape for edge in bundle.edges if edge.producer is None] == [("batch", "sequence")] * 2
    model = transformers.AutoModel.from_pretrained(tmp_path / "m.stagepack").eval()
    assert same_state(model, original)
    pipe = stagepack.load(bundle)
    for batch, length in ((1, 1), (1, 3), (5, 17)):
        ids = torch.randint(0, 30000, (batch, length))
        mask = (torch.arange(length) < max(1, length - 1)).long().expand(batch, length).contiguous()
        with torch.no_grad():
            found, expected = pipe(ids, mask), original(ids, mask)
        assert torch.equal(found["last_hidden_state"], expected.last_hidden_state)
        assert torch.equal(found["pooler_output"], expected.pooler_output)


def test_a_model_in_memory_keeps_its_configuration(tmp_path: Path) -> None:
    model, inputs = CASES["decoders-gpt2"].build()
    bundle = stagepack.export(model, (), inputs.kwargs, out=tmp_path / "m.stagepack")
    fields = json.loads(bundle.read("config.json"))
    assert fields["architectures"] == ["GPT2LMHeadModel"]
    assert fields["model_type"] == "gpt2"
    assert "_name_or_path" not in fields
    assert model_files(model) == model_files(model)
    assert "generation_config.json" in model_files(model)
    assert model_files(torch.nn.Linear(1, 1)) == {}


def test_what_plain_export_cannot_trace_goes_to_the_exporter_of_transformers(tmp_path: Path) -> None:
    saved(CASES["decoders-llama"], tmp_path / "model")
    # In a process that has seen no cache yet: it is the answer's cache that plain export stumbles over, the first time.
    # transformers would import torchao, which is installed and warns of its CUDA libraries.
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch; from stagepack.capture.inputs import Inputs\n"
        "from stagepack.capture.transformers.hugging_face import capture_pretrained\n"
        "print(capture_pretrained(sys.argv[1], Inputs(kwargs={'input_ids': torch.ones(2, 8).long()})).method)\n"
        "print('torchao' in sys.modules)\n"
    )
    done = run_forked(str(tmp_path / "model"), script=script)
    assert done.stdout.split() == ["transformers.exporters.DynamoExporter", "False"]
    assert "torchao" not in done.stderr
    ids = torch.randint(0, 128, (2, 8))
    capture = capture_pretrained(str(tmp_path / "model"), Inputs(kwargs={"input_ids": ids}), deferred=False)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=2))
    answer = stagepack.load(bundle)(input_ids=ids)
    expected = capture.program.module()(input_ids=ids)
    assert torch.equal(answer["logits"], expected.logits)
    assert torch.equal(answer["past_key_values"]["layers"][0]["keys"], expected.past_key_values.layers[0].keys)


@pytest.mark.slow
def test_sizes_that_the_model_fixes_are_left_to_torch(tmp_path: Path) -> None:
    config = transformers.MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=2, state_size=8)
    torch.manual_seed(0)
    transformers.MambaForCausalLM(config).eval().save_pretrained(tmp_path / "model")
    bundle = stagepack.export(tmp_path / "model", out=tmp_path / "m.stagepack", stages=2)
    (ids, mask) = (edge for edge in bundle.edges if edge.producer is None)
    assert isinstance(ids.shape[0], str)
    assert ids.shape[1] == mask.shape[1] == 8
    assert replay_example(stagepack.load(bundle)).largest == 0.0


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda folder: folder / "nowhere", "no such file or folder; expected a folder, a hub name"),
        (lambda folder: folder, "expected a Hugging Face folder with a config.json"),
    ],
)
def test_what_is_no_model_says_so(prepare: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=message):
        stagepack.export(prepare(tmp_path), out=tmp_path / "m.stagepack")


@pytest.mark.parametrize(
    "source", ["./missing", "missing/", "../missing", "a/b/c", "missing.safetensors", "~/missing", "missing.pt2"]
)
def test_a_path_that_is_not_there_makes_no_attempt_at_the_hub(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pretrained_model, "import_transformers", lambda: pytest.fail("transformers was asked"))
    with pytest.raises(CaptureError, match="no such file"):
        stagepack.export(source, out=tmp_path / "m.stagepack")
    with pytest.raises(CaptureError, match="no such file"):
        ModelSource.of(source).load()


def test_a_hub_that_cannot_be_reached_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    done = run_forked("export", "no-such-model", "-o", "m.stagepack")
    assert done.returncode == 1
    assert done.stderr == (
        "stagepack: no-such-model: there is no such folder, and the Hugging Face Hub, where a model of this name may be, cannot be "
        "reached: check the path, or the connection\n"
    )


def test_a_damaged_folder_says_so(tmp_path: Path) -> None:
    saved(CASES["decoders-gpt2"], tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(CaptureError, match="transformers cannot load it: Error no file named"):
        stagepack.export(tmp_path / "model", out=tmp_path / "m.stagepack")


def test_a_speech_model_takes_a_second_of_sound(tmp_path: Path) -> None:
    config = transformers.Wav2Vec2Config(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=[16],
        conv_stride=[5],
        conv_kernel=[10],
    )
    transformers.Wav2Vec2Model(config).save_pretrained(tmp_path / "model")
    bundle = stagepack.export(tmp_path / "model", out=tmp_path / "m.stagepack")
    assert bundle.edges[0].shape == ("batch", 16000)
