"""The YAML that is written is read as the same data."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from stagepack_serving.kubernetes.objects import to_yaml

PRINTABLE_TEXTS = st.text(st.characters(exclude_categories=["C", "Z"]) | st.just(" "), max_size=6)
DATA = st.recursive(
    PRINTABLE_TEXTS | st.integers() | st.booleans(),
    lambda inner: (
        st.lists(st.dictionaries(PRINTABLE_TEXTS, inner, max_size=3) | PRINTABLE_TEXTS, max_size=3)
        | st.dictionaries(PRINTABLE_TEXTS, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.dictionaries(PRINTABLE_TEXTS, DATA, min_size=1, max_size=3), min_size=1, max_size=3))
def test_yaml_is_read_as_what_was_written(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(to_yaml(documents))) == documents


@pytest.mark.parametrize(
    "text", ["no", "On", "NULL", "~", "1e3", "0x1f", "12:30", "-", "- a", "a: b", "#a", "", " ", "é", "😀"]
)
def test_texts_that_look_like_something_else(text: str) -> None:
    assert yaml.safe_load(to_yaml([{text: text}])) == {text: text}
