"""`generate` takes what a user of transformers gives."""

import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tokenizers import Regex, pre_tokenizers

import stagepack
from stagepack.errors import ExportWarning, InputError, OptionError
from stagepack.roads.assets import exported_assets
from stagepack_text.export.generation import generating_model
from stagepack_text.prompts import Prompts, check_tokens, read_prompts, read_tokenizer
from stagepack_text.settings import GenerationSettings
from tests.bundle_editor import BundleEditor
from tests.text.generating_families import family_bundle, make_model
from tests.text.generating_model import tokenizer

ROWS = [[5, 9, 31, 77, 12], [100, 3], [42, 42, 8]]
TEXTS = ["one two", "a", "longer than the others"]


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A Llama with a tokenizer."""
    return stagepack.load(family_bundle(tmp_path_factory, "llama"))


def padded(rows: list[list[int]], *, on_left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows as a batch, and its mask."""
    length = max(map(len, rows))
    fillers = [[0] * (length - len(row)) for row in rows]
    sides = zip(rows, fillers, strict=True)
    tokens = torch.tensor([filler + row if on_left else row + filler for row, filler in sides])
    ones = [[1] * len(row) for row in rows]
    masks = [filler + one if on_left else one + filler for one, filler in zip(ones, fillers, strict=True)]
    return tokens, torch.tensor(masks)


def test_padding_on_either_side_gives_the_tokens_of_transformers(pipeline: Any) -> None:
    tokens, mask = padded(ROWS, on_left=True)
    model = make_model("llama")
    expected = model.generate(tokens, attention_mask=mask, max_new_tokens=8, do_sample=False)
    assert torch.equal(pipeline.generate(tokens, mask, max_new_tokens=8), expected)
    right_tokens, right_mask = padded(ROWS, on_left=False)
    assert torch.equal(pipeline.generate(right_tokens, right_mask, max_new_tokens=8), expected)
    # The model names its padding token, 0.
    for unmasked in (tokens, right_tokens):
        assert torch.equal(pipeline.generate(unmasked, max_new_tokens=8), expected)


def test_lists_and_one_text_are_batches(pipeline: Any) -> None:
    tokens, mask = padded(ROWS, on_left=True)
    expected = pipeline.generate(tokens, mask, max_new_tokens=8)
    assert torch.equal(pipeline.generate(ROWS, max_new_tokens=8), expected)
    [first] = ([row] for row in ROWS[:1])
    alone = pipeline.generate(torch.tensor(first), max_new_tokens=8)
    for form in (ROWS[0], torch.tensor(ROWS[0]), first):
        assert torch.equal(pipeline.generate(form, max_new_tokens=8), alone)
    assert isinstance(pipeline.generate(numpy.array(ROWS[0]), max_new_tokens=8), numpy.ndarray)


def test_what_a_tokenizer_returns_is_taken_by_names_and_as_a_whole(pipeline: Any) -> None:
    tokens, mask = padded(ROWS, on_left=False)
    expected = pipeline.generate(tokens, mask, max_new_tokens=8)
    encoded = {"input_ids": tokens, "attention_mask": mask}
    assert torch.equal(pipeline.generate(**encoded, max_new_tokens=8), expected)
    assert torch.equal(pipeline.generate(encoded, max_new_tokens=8), expected)
    with pytest.raises(InputError, match=r"expected one of input_ids, .* found input_ids, inputs"):
        pipeline.generate(tokens, input_ids=tokens)
    with pytest.raises(InputError, match="found none"):
        pipeline.generate()


def test_texts_give_texts(pipeline: Any) -> None:
    answers = pipeline.generate(TEXTS, max_new_tokens=8)
    rows = [encoding.ids for encoding in tokenizer().encode_batch(TEXTS)]
    tokens = pipeline.generate(*padded(rows, on_left=True), max_new_tokens=8)
    assert answers == tokenizer().decode_batch(tokens.tolist())
    assert all(answer.startswith(text) for answer, text in zip(answers, TEXTS, strict=True))
    alone = pipeline.generate(TEXTS[0], max_new_tokens=8)
    assert isinstance(alone, str)
    assert alone.startswith(TEXTS[0])


def test_what_cannot_be_continued_is_refused(pipeline: Any) -> None:
    tokens, mask = padded(ROWS, on_left=False)
    with pytest.raises(InputError, match=r"export with a larger cache \(--generate 204; "):
        pipeline.generate(tokens, mask, max_new_tokens=200)
    with pytest.raises(InputError, match="expected a token in each text"):
        pipeline.generate(tokens, mask * 0)
    with pytest.raises(InputError, match=r"attention_mask: expected the shape \[3, 5\], found \[3, 4\]"):
        pipeline.generate(tokens, mask[:, 1:])
    with pytest.raises(InputError, match="expected integers"):
        pipeline.generate(tokens.float())


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ([], "generate: the list is empty: give a text, a list of texts, or tokens [batch, length]"),
        ([[]], "generate: expected 1 text or more with tokens, found the shape [1, 0]"),
        (torch.ones(0, 3).long(), "generate: expected 1 text or more with tokens, found the shape [0, 3]"),
        ("", "generate: the text has no tokens: give a text"),
        (["a", ""], "generate: the text at position 1 has no tokens: give a text"),
        ([[5], [], [7]], "generate: the text at position 1 has no tokens: give a text"),
        ([[5, 4000]], "input_ids: expected tokens from 0 to 257, found 4000"),
        ([[5, -1]], "input_ids: expected tokens from 0 to 257, found -1"),
    ],
)
def test_wrong_inputs_are_named(pipeline: Any, inputs: Any, says: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(says)}"):
        pipeline.generate(inputs, max_new_tokens=2)


def test_tokens_without_logits_are_those_of_the_tokenizer(pipeline: Any, tmp_path: Path) -> None:
    made = tokenizer()
    made.add_special_tokens(["<image>"])
    assert made.token_to_id("<image>") == 258
    editor = BundleEditor.copy(Path(pipeline.bundle.location), tmp_path / "m.stagepack")
    editor.write_file("tokenizer.json", made.to_str().encode())
    bundle = stagepack.open(editor.path)
    prompts = Prompts(tokens=numpy.array([[5, 258, 259]]), mask=numpy.array([[1, 1, 0]]))
    check_tokens(bundle, prompts, 258)
    with pytest.raises(InputError, match="expected tokens from 0 to 258, found 259"):
        check_tokens(bundle, Prompts(tokens=prompts.tokens, mask=None), 258)


def test_texts_beyond_the_rows_of_a_cache_take_turns(tmp_path_factory: pytest.TempPathFactory) -> None:
    texts = ["one", "two", *TEXTS, "six"]  # of caches with four rows
    for family in ("llama", "t5"):
        pipelines = stagepack.load_entry_points(family_bundle(tmp_path_factory, family))
        alone = [pipelines.generate([text], max_new_tokens=5)[0] for text in texts]
        assert list(pipelines.generate(texts, max_new_tokens=5)) == alone


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens: expected 1 or more, found 0"),
        ({"max_new_tokens": -1}, "max_new_tokens: expected 1 or more, found -1"),
        ({"do_sample": True, "temperature": 0}, "temperature: expected more than 0 (do_sample=False takes the"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: expected 0 to 1, found 1.5"),
    ],
)
def test_settings_out_of_range_are_named(pipeline: Any, settings: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(says)}"):
        pipeline.generate("a", **settings)


def test_more_positions_than_the_model_has_are_refused_before_the_capture() -> None:
    for family in ("gpt2", "llama"):
        model = make_model(family)
        limit = model.config.max_position_embeddings
        with pytest.raises(OptionError, match=f"expected at most the {limit} positions .*, found {limit + 1}"):
            generating_model(model, limit + 1, 1)


def test_a_folder_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    says = f"{tmp_path}: has no tokenizer.json: .* tokens and no texts: .*stagepack asset add"
    with pytest.warns(ExportWarning, match=says):
        exported_assets(str(tmp_path), {}, generates=True)


def test_a_tokenizer_that_fails_is_an_input_error(exported: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    made = tokenizer()
    made.pre_tokenizer = pre_tokenizers.Split(Regex("(a|aa)+$"), "isolated")
    editor = BundleEditor.copy(exported[0], tmp_path / "m.stagepack")
    editor.write_file("tokenizer.json", made.to_str().encode())
    with pytest.raises(InputError, match=r"the tokenizer of the bundle fails on the text: .*retry-limit"):
        read_prompts(stagepack.open(editor.path), "a" * 40 + "b", None, GenerationSettings(), continues=True)
    editor.write_file("tokenizer.json", b"{}")
    with pytest.raises(InputError, match=r"tokenizer\.json: "):
        read_tokenizer(stagepack.open(editor.path))
