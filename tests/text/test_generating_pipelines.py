"""What `generate` of a pipeline takes and gives; the tokens of each family are compared in `tests/text/test_generation_families.py`."""

import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from transformers import PreTrainedTokenizerFast

import stagepack
from stagepack.errors import InputError
from tests.text.generating_families import (
    POSITIONS,
    family_bundle,
    fragile_onnx_bundle,
    generated_by_transformers,
    make_model,
    make_prompts,
)
from tests.text.generating_model import tokenizer

SETTINGS: tuple[dict[str, Any], ...] = ({}, {"do_sample": True, "top_p": 0.9, "temperature": 1.2})


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """The bundles of a decoder alone, and of one with an encoder."""
    return {family: family_bundle(tmp_path_factory, family) for family in ("llama", "t5")}


@pytest.fixture
def llama(paths: Mapping[str, Path]) -> Path:
    return paths["llama"]


def test_arrays_are_continued_to_arrays_and_each_token_is_told(llama: Path) -> None:
    pipeline = stagepack.load(llama)
    tokens, mask = make_prompts("llama", 4).values()
    expected = pipeline.generate(tokens, mask, max_new_tokens=5)
    seen: list[Any] = []
    arrays = pipeline.generate(tokens.numpy(), mask.numpy(), max_new_tokens=5, on_tokens=seen.append)
    assert isinstance(arrays, numpy.ndarray)
    assert arrays.tolist() == expected.tolist()
    assert numpy.array_equal(numpy.stack(seen, 1), arrays[:, tokens.shape[1] :])


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_stop_strings_end_texts_where_they_do_in_transformers(family: str, paths: Mapping[str, Path]) -> None:
    pipeline, model, prompts = stagepack.load_entry_points(paths[family]), make_model(family), make_prompts(family, 4)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 1.2}
    drawn = generated_by_transformers(family, model, prompts, 5, **options)
    pairs = [tokenizer().decode(row[start : start + 2].tolist()) for row in drawn for start in range(2, 12)]
    # No characters that are torn apart.
    pairs = [pair for pair in pairs if len(pair) == 2 and pair.isascii()]
    assert len(pairs) > 3
    stops: tuple[str | list[str], ...] = (pairs[0], pairs[-1][0], pairs[:3], ["not there", *pairs])
    fast_tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    for stop in stops:
        expected = generated_by_transformers(
            family, model, prompts, 5, stop_strings=stop, tokenizer=fast_tokenizer, **options
        )
        tokens = pipeline.generate(*prompts.values(), stop_strings=stop, seed=5, **options)
        assert torch.equal(tokens[:, -expected.shape[1] :], expected), stop
        assert not torch.equal(expected, drawn)


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_a_prompt_is_continued_to_several_texts_as_in_transformers(family: str, paths: Mapping[str, Path]) -> None:
    pipeline, model = stagepack.load_entry_points(paths[family]), make_model(family)
    for batch_size, count in ((1, 4), (2, 2)):
        prompts = {name: array[:batch_size] for name, array in make_prompts(family, 4).items()}
        options = {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": count}
        expected = generated_by_transformers(family, model, prompts, 5, **options)
        tokens = pipeline.generate(*prompts.values(), seed=5, **options)
        assert torch.equal(tokens[:, -expected.shape[1] :], expected)


@pytest.mark.parametrize("family", ["llama", "t5"])
@pytest.mark.parametrize("settings", SETTINGS)
def test_texts_beyond_the_rows_of_the_cache_take_turns(
    family: str, settings: dict[str, Any], paths: Mapping[str, Path]
) -> None:
    pipeline, model = stagepack.load_entry_points(paths[family]), make_model(family)
    prompts = {name: array.repeat(3, 1)[:10] for name, array in make_prompts(family, 4).items()}
    count = 2 if settings else 1
    options = {"max_new_tokens": 20, "num_return_sequences": count, **settings}
    expected = generated_by_transformers(family, model, prompts, 5, **options)
    seen: list[Any] = []
    tokens = pipeline.generate(*prompts.values(), seed=5, on_tokens=seen.append, **options)
    assert torch.equal(tokens[:, -expected.shape[1] :], expected)
    assert {len(new_tokens) for new_tokens in seen} == {10 * count}


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_logprobs_are_the_transition_scores_of_transformers(family: str, paths: Mapping[str, Path]) -> None:
    pipeline, model, prompts = stagepack.load_entry_points(paths[family]), make_model(family), make_prompts(family, 4)
    options: dict[str, Any] = {"max_new_tokens": 20, "do_sample": True, "temperature": 2.0, "top_k": 7}
    # One of the texts ends in the middle.
    options["eos_token_id"] = int(generated_by_transformers(family, model, prompts, 5, **options)[0, 9])
    torch.manual_seed(5)
    expected = model.generate(**prompts, **options, return_dict_in_generate=True, output_logits=True)
    scores = model.compute_transition_scores(expected.sequences, expected.logits, normalize_logits=True)
    tokens, logprobs = pipeline.generate(*prompts.values(), seed=5, return_logprobs=True, **options)
    assert torch.equal(tokens, expected.sequences)
    is_end = tokens[:, -scores.shape[1] :] == options["eos_token_id"]
    is_after_end = is_end.cumsum(1) > is_end.long()
    assert is_after_end.any()
    torch.testing.assert_close(logprobs, scores.masked_fill(is_after_end, 0))
    arrays = [prompt.numpy() for prompt in prompts.values()]
    _, logprob_array = pipeline.generate(*arrays, seed=5, return_logprobs=True, **options)
    assert isinstance(logprob_array, numpy.ndarray)
    assert logprob_array.tolist() == logprobs.tolist()


def test_a_text_has_logprobs(llama: Path) -> None:
    pipeline = stagepack.load(llama)
    tokens, expected = pipeline.generate(tokenizer().encode("Once").ids, max_new_tokens=3, return_logprobs=True)
    text, logprobs = pipeline.generate("Once", max_new_tokens=3, return_logprobs=True)
    assert text == tokenizer().decode(tokens[0].tolist())
    assert logprobs.shape == (1, 3)
    assert torch.equal(logprobs, expected)


def test_one_text_is_continued_to_a_list_of_texts(llama: Path) -> None:
    pipeline = stagepack.load(llama)
    options: dict[str, Any] = {"max_new_tokens": 6, "do_sample": True, "seed": 3, "num_return_sequences": 2}
    tokens = pipeline.generate([tokenizer().encode("Once").ids], **options)
    assert pipeline.generate("Once", **options) == tokenizer().decode_batch(tokens.tolist())


def test_threads_generate_at_the_same_time(llama: Path) -> None:
    pipeline = stagepack.load(llama)
    prompts = [make_prompts("llama", batch_size) for batch_size in (1, 2, 3, 4)]
    alone = [pipeline.generate(*prompt.values(), max_new_tokens=9) for prompt in prompts]
    with ThreadPoolExecutor(4) as threads:
        together = threads.map(lambda prompt: pipeline.generate(*prompt.values(), max_new_tokens=9), prompts)
        assert all(map(torch.equal, together, alone))


def test_wrong_calls_are_refused(llama: Path) -> None:
    pipeline = stagepack.load(llama)
    calls: list[tuple[tuple[int, int], dict[str, Any], str]] = [
        ((1, 60), {"max_new_tokens": 6}, "the cache has 64 positions"),
        ((1, 2), {"num_beams": 2}, r"num_beams: expected 1 .* beam search are not supported"),
        ((1, 2), {"num_groups": 2}, "unknown setting 'num_groups'"),
        ((1, 2), {"num_return_sequences": 3}, "num_return_sequences: expected 1 .*, found 3: pass do_sample=True"),
        ((1, 2), {"stop_strings": ""}, "settings of generation: .* of length >= 1"),
        ((1, 2), {"encoder": pipeline}, "expected no encoder="),
    ]
    for shape, options, says in calls:
        with pytest.raises(InputError, match=says):
            pipeline.generate(torch.ones(shape, dtype=torch.int64), **options)


def test_stop_strings_need_a_tokenizer(llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "m.stagepack"
    shutil.copytree(llama, path)
    stagepack.remove_assets(path, ["tokenizer.json"])
    says = r"stop_strings: expected a bundle with tokenizer.json, found none: stagepack asset add"
    with pytest.raises(InputError, match=says):
        stagepack.load(path).generate([1, 2], stop_strings="a")


@pytest.mark.parametrize("name", ["decoder", pytest.param("t5", marks=pytest.mark.slow)])
def test_negative_indices_are_refused_in_each_runtime(
    name: str, paths: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    valid = {"input_ids": torch.tensor([[5, 6]]), "attention_mask": torch.ones(1, 2, dtype=torch.int64)}
    if name == "decoder":
        path = fragile_onnx_bundle(tmp_path_factory)
        valid |= {"cache_position": torch.tensor([[0, 1]]), "cache_moves": torch.tensor([[0, 0, 1, 0]])}
    else:
        path = shutil.copytree(paths["t5"], tmp_path / "m.stagepack")
        for entry_point in ("encode", "decode"):
            assert stagepack.add_onnx(stagepack.open(path).select(entry_point)).torch_only == {}
        valid |= {
            "cache_position": torch.tensor([0, 1]),
            "encoder_hidden_states": torch.zeros(1, 5, 32),
            "encoder_attention_mask": torch.ones(1, POSITIONS, dtype=torch.int64),
        }
    for runtime in ("torch", "onnxruntime"):
        pipelines = stagepack.load_entry_points(path, runtime=runtime)
        decoder = pipelines["forward" if name == "decoder" else "decode"]
        decoder(**valid)
        for input_name in valid.keys() & {"input_ids", "cache_position", "cache_moves"}:
            wrong = valid[input_name].clone()
            wrong[..., 0] = -1
            with pytest.raises(InputError, match="an input value is out of range"):
                decoder(**valid | {input_name: wrong})
        if name == "t5":
            with pytest.raises(InputError, match="an input value is out of range"):
                pipelines["encode"](input_ids=torch.tensor([[-1, 3]]), attention_mask=valid["attention_mask"])


def test_other_models_do_not_generate(tmp_path: Path) -> None:
    stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "linear.stagepack")
    says = "expected a decoder with the inputs input_ids, cache_position and attention_mask"
    with pytest.raises(InputError, match=says):
        stagepack.load(tmp_path / "linear.stagepack").generate(torch.ones(1, 2))
    with pytest.raises(InputError, match="no entry point is a decoder"):
        stagepack.load_entry_points(tmp_path / "linear.stagepack").generate(torch.ones(1, 2))
