"""Names in an adapter find their weights: alike, or with one prefix more or less before all of them."""

import pytest

from stagepack.adapter.names import place_names
from stagepack.errors import AdapterError
from stagepack.format.graph import Weight


def weights(*names: str) -> dict[str, Weight]:
    return {name: Weight(value="w", names=(name,), kind="parameter", dtype="float32") for name in names}


@pytest.mark.parametrize(
    ("given", "known", "placed"),
    [
        (["a.q.weight"], ["a.q.weight", "b.q.weight"], ["a.q.weight"]),
        (["q.weight"], ["model.q.weight", "head.weight"], ["model.q.weight"]),
        (["bert.q.weight", "bert.k.weight"], ["q.weight", "k.weight"], ["q.weight", "k.weight"]),
        (["q.weight", "a.q.weight"], ["m.q.weight", "m.a.q.weight"], ["m.q.weight", "m.a.q.weight"]),
    ],
)
def test_names_find_their_weights(given: list[str], known: list[str], placed: list[str]) -> None:
    assert place_names(given, weights(*known), "lora") == dict(zip(given, placed, strict=True))


@pytest.mark.parametrize(
    ("given", "known", "says"),
    [
        (
            ["q.weight"],
            ["a.q.weight", "b.q.weight"],
            r"q\.weight fits several weights of the bundle: a\.q\.weight, b\.",
        ),
        (["q.weight", "x.weight"], ["q.weight"], r"which has no weights x\.weight: give the bundle of the model"),
        (["a.q.weight", "k.weight"], ["q.weight", "k.weight"], r"which has no weights a\.q\.weight:"),
        ([f"{n}.weight" for n in range(9)], ["q.weight"], r"4\.weight and 4 more"),
    ],
)
def test_names_without_a_place_are_named(given: list[str], known: list[str], says: str) -> None:
    with pytest.raises(AdapterError, match=says):
        place_names(given, weights(*known), "lora")
