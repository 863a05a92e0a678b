"""Models of transformers are exported without a word about their inputs: these come from their names, processor and configuration."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import stagepack
from stagepack.capture.source import pretrained_inputs
from stagepack.capture.transformers.example_inputs import example_inputs, model_examples
from stagepack.capture.transformers.example_tensors import ExampleSizes
from stagepack.capture.transformers.processed_examples import processed_examples
from stagepack.errors import CaptureError
from tests.hostile.attack import run
from tests.zoo.architectures.multimodal import TEXT, VISION


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models") / "clip"
    config = transformers.CLIPConfig(
        text_config={**TEXT, "num_hidden_layers": 1},
        vision_config={**VISION, "num_hidden_layers": 1},
        projection_dim=16,
    )
    transformers.CLIPModel(config).save_pretrained(folder)
    return folder


def test_clip_takes_other_numbers_of_texts_and_of_images(clip: Path, tmp_path: Path) -> None:
    bundle = stagepack.export(clip, out=tmp_path / "m.stagepack")
    inputs = {edge.name: edge.shape for edge in bundle.edges if edge.producer is None}
    assert inputs == {
        "input_ids": ("batch", "sequence"),
        "attention_mask": ("batch", "sequence"),
        "pixel_values": ("images", 3, 32, 32),
    }
    ids, pixels = torch.randint(3, 128, (3, 5)), torch.randn(1, 3, 32, 32)
    # As a copy: weights of a file may be at odd addresses, with which the product of one row is rounded otherwise on some processors.
    model = copy.deepcopy(transformers.CLIPModel.from_pretrained(clip))
    with torch.no_grad():
        expected = model(ids, pixels, torch.ones_like(ids))
    answer = stagepack.load(bundle)(ids, pixels, torch.ones_like(ids))
    assert torch.equal(answer["logits_per_text"], expected.logits_per_text)


def test_parts_of_clip_become_entry_points(clip: Path, tmp_path: Path) -> None:
    out = str(tmp_path / "m.stagepack")
    assert run("export", str(clip), "-o", out, "--part", "text_model", "--part", "vision_model").exit_code == 0
    assert [entry_point.name for entry_point in stagepack.open(out).entry_points] == ["text_model", "vision_model"]


def test_a_model_in_memory_needs_no_inputs_either(tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32}
    bert = transformers.BertModel(transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
    bundle = stagepack.export(bert, out=tmp_path / "bert.stagepack", stages=2)
    ids = torch.randint(0, 64, (3, 5))
    found = stagepack.load(bundle)(input_ids=ids, attention_mask=torch.ones_like(ids))
    with torch.no_grad():
        assert torch.equal(found["last_hidden_state"], bert(ids, torch.ones_like(ids)).last_hidden_state)


def test_the_processor_of_a_folder_says_how_large_images_are(tmp_path: Path) -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    model = transformers.ResNetModel(config).eval()
    assert example_inputs(model).kwargs["pixel_values"].shape == (2, 3, 224, 224)
    transformers.ViTImageProcessor(size={"height": 48, "width": 64}).save_pretrained(tmp_path)
    assert example_inputs(model, str(tmp_path)).kwargs["pixel_values"].shape == (2, 3, 48, 64)


def test_texts_begin_with_the_tokens_that_stand_for_an_image() -> None:
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "llama", "num_key_value_heads": 2, "num_hidden_layers": 1},
        vision_config={**VISION, "model_type": "clip_vision_model", "num_hidden_layers": 2},
        image_token_index=127,
    )
    model = transformers.LlavaForConditionalGeneration(config).eval()
    example, text_alone = model_examples(model)
    assert (example.inputs.kwargs["input_ids"] == 127).sum(dim=1).tolist() == [16, 16]
    assert text_alone.left_out == ("image",)
    with torch.no_grad():
        assert model(**example.inputs.kwargs).logits.shape == (2, 24, 128)


def test_speech_and_spectrograms_have_the_shapes_of_their_feature_extractors() -> None:
    small: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
    }
    spectrogram = transformers.ASTModel(transformers.ASTConfig(**small)).eval()
    assert example_inputs(spectrogram).kwargs["input_values"].shape == (2, 1024, 128)
    bert = transformers.Wav2Vec2BertConfig(**small, feature_projection_input_dim=160, add_adapter=False)
    shape = example_inputs(transformers.Wav2Vec2BertModel(bert).eval()).kwargs["input_features"].shape
    assert (shape[0], shape[2]) == (2, 160)


def test_a_model_whose_inputs_are_not_known_gets_a_file_to_start_from(tmp_path: Path) -> None:
    config = transformers.LukeConfig(
        vocab_size=64, entity_vocab_size=16, hidden_size=16, num_attention_heads=2, num_hidden_layers=1,
        intermediate_size=16, entity_emb_size=16,
    )  # fmt: skip
    transformers.LukeForEntityClassification(config).save_pretrained(tmp_path / "luke")
    failed = run("export", str(tmp_path / "luke"), "-o", str(tmp_path / "m.stagepack"))
    line, _, text = failed.stderr.partition("\n\n")
    assert failed.exit_code == 1
    assert "--inputs inputs.py:inputs" in line
    functions: dict[str, object] = {}
    exec(compile(text, "inputs.py", "exec"), functions)  # noqa: S102 - the file that a user would run
    assert "input_ids" in functions["inputs"]()  # type: ignore[operator]


def test_an_error_in_python_has_the_file_too() -> None:
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=16
    )
    model = transformers.BertModel(config)
    model.main_input_name = "something"
    model.input_modalities = []
    with pytest.raises(CaptureError, match=r"inputs\.py:inputs\n\nimport torch"):
        example_inputs(model)


_SMALL: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
_PATCHES: dict[str, Any] = {
    "depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2, "intermediate_size": 16
}  # fmt: skip


def _runs(model: Any, inputs: stagepack.Inputs) -> bool:
    with torch.no_grad():
        model(**inputs.kwargs)
    return True


@pytest.fixture
def glm_asr() -> Any:
    """A small model of sounds and text: its mask decides how many tokens stand for a sound."""
    torch.manual_seed(0)
    config = transformers.GlmAsrConfig(
        text_config={**_SMALL, "model_type": "llama"},
        audio_config={
            "hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
            "num_mel_bins": 16,
        },
        audio_token_id=150,
    )  # fmt: skip
    return transformers.GlmAsrModel(config).eval()


def _glm4v() -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}
    config = transformers.Glm4vConfig(
        text_config={**_SMALL, "rope_parameters": rope}, vision_config=_PATCHES, image_token_id=150, video_token_id=151,
        image_start_token_id=152, image_end_token_id=153, video_start_token_id=154, video_end_token_id=155,
    )  # fmt: skip
    return transformers.Glm4vModel(config).eval()


def test_sounds_have_the_mel_bins_of_the_model_and_a_mask_that_says_how_many_tokens_stand_for_them(
    glm_asr: Any,
) -> None:
    example = model_examples(glm_asr)[0]
    assert example.inputs.kwargs["input_features"].shape == (2, 16, 3000)
    assert example.inputs.kwargs["input_features_mask"].shape == (2, 3000)
    assert (example.inputs.kwargs["input_ids"] == 150).sum(dim=1).tolist() == [12, 12]
    assert _runs(glm_asr, example.inputs)


def test_deferred_weights_are_loaded_where_the_number_of_tokens_depends_on_data(glm_asr: Any, tmp_path: Path) -> None:
    glm_asr.save_pretrained(tmp_path)
    assert (pretrained_inputs(str(tmp_path)).kwargs["input_ids"] == 150).sum(dim=1).tolist() == [12, 12]


def test_text_alone_is_left_where_no_example_of_a_sound_is_known(glm_asr: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagepack.capture.transformers.example_inputs.family_processor", lambda kind, config: None)
    (example,) = model_examples(glm_asr)
    assert set(example.inputs.kwargs) == {"input_ids", "attention_mask", "use_cache"}
    assert example.left_out == ("audio",)


def test_a_model_that_asks_for_the_data_of_a_grid_of_patches_is_not_refused() -> None:
    model = _glm4v()
    inputs = example_inputs(model)
    assert {"pixel_values", "image_grid_thw", "mm_token_type_ids"} <= set(inputs.kwargs)
    assert _runs(model, inputs)


def test_an_encoder_gets_the_inputs_of_the_processor_of_its_family() -> None:
    encoder = _glm4v().visual
    inputs = example_inputs(encoder)
    assert set(inputs.kwargs) == {"hidden_states", "grid_thw"}
    assert _runs(encoder, inputs)


def test_a_model_of_frames_whose_processor_makes_one_image_gets_the_frames_of_its_configuration() -> None:
    config = transformers.TimesformerConfig(
        image_size=32, patch_size=16, num_frames=3, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16,
    )  # fmt: skip
    model = transformers.TimesformerModel(config).eval()
    inputs = example_inputs(model)
    assert inputs.kwargs["pixel_values"].shape == (2, 3, 3, 32, 32)
    assert _runs(model, inputs)


def test_a_model_of_pairs_of_images_gets_pairs() -> None:
    config = transformers.LightGlueConfig(num_hidden_layers=1, num_attention_heads=2)
    inputs = example_inputs(transformers.LightGlueForKeypointMatching(config).eval())
    assert inputs.kwargs["pixel_values"].shape[:3] == (2, 2, 3)


def test_a_processor_that_names_no_inputs_gives_no_example() -> None:
    config = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1])
    model = transformers.ResNetModel(config)

    def processor(images: Any, return_tensors: str) -> torch.Tensor:
        return torch.zeros(len(images), 3)

    parameters = {"pixel_values": None}
    assert processed_examples(processor, "image", model, ExampleSizes.of(config), parameters) == {}
