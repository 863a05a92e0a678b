"""Schemas of operators are read by our own parser, and compared by the rules of torch."""

import tracemalloc
from collections.abc import Iterator

import pytest
import torch

from stagepack.format import limits
from stagepack.format.operator_schema import is_backward_compatible, parse_schema, schema_effects


def torch_schemas() -> Iterator[torch._C.FunctionSchema]:
    """The schemas of all operators of this torch, without those of TorchScript that take any number of arguments."""
    for namespace in ("aten", "prims"):
        operators = getattr(torch.ops, namespace)
        for packet in (getattr(operators, name) for name in dir(operators)):
            for overload_name in getattr(packet, "overloads", list)():
                schema = getattr(packet, overload_name)._schema
                if "..." not in str(schema):
                    yield schema


def test_schemas_of_torch_are_read() -> None:
    for schema in torch_schemas():
        parsed = parse_schema(str(schema))
        assert parsed is not None, schema
        assert [
            (parameter.name, parameter.default is not None, parameter.keyword_only) for parameter in parsed.parameters
        ] == [(argument.name, argument.has_default_value(), argument.kwarg_only) for argument in schema.arguments], (
            schema
        )
        assert len(parsed.results) == len(schema.returns), schema
        assert is_backward_compatible(parsed, parsed), schema


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(",
        "a::b",
        "a::b(",
        "a::b()",
        "a::b() ->",
        "a::b(Tensor) -> Tensor",
        "a::b(Tensor x,) -> Tensor",
        "a::b(Tensor x, ) -> Tensor",
        "a::b(Tensor x=) -> Tensor",
        "a::b(*, *) -> Tensor",
        'a::b(str x=") -> Tensor',
        "a::b(Tensor x] -> Tensor",
        "b(Tensor x) -> Tensor",
        "a::b(" + "(" * 100_000,
        "a::b(Tensor x) -> (",
        "a::b(Tensor x) -> Tensor[",
        "a::b(Tensor x) -> (Tensor, Tensor))(",
        'a::b(Tensor x) -> "',
        "a::b(Tensor x) -> " + "(" * 4000,
        "a::b(Tensor x, int[" + "8" * 4096 + "] y) -> Tensor",
    ],
)
def test_other_texts_are_no_schemas(text: str) -> None:
    assert parse_schema(text) is None


@pytest.mark.parametrize(
    ("schema", "earlier", "expected"),
    [
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x) -> Tensor", True),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x) -> Tensor", True),
        ("a::f(Tensor x, *, int n=1) -> Tensor", "a::f(Tensor x) -> Tensor", True),
        ("a::f(Tensor x, int n) -> Tensor", "a::f(Tensor x) -> Tensor", False),
        ("a::f(Tensor x) -> Tensor", "a::f(Tensor x, int n=1) -> Tensor", False),
        ("a::f(Tensor x, SymInt[2] n=1) -> Tensor", "a::f(Tensor x, int[2] n=1) -> Tensor", True),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x, SymInt n=1) -> Tensor", False),
        ("a::f(Tensor x, int? n=None) -> Tensor", "a::f(Tensor x, int n) -> Tensor", True),
        ("a::f(Tensor x, int n) -> Tensor", "a::f(Tensor x, int? n=None) -> Tensor", False),
        ("a::f(Tensor x, int n=2) -> Tensor", "a::f(Tensor x, int n=1) -> Tensor", False),
        ("a::f(Tensor x, *, int n=1) -> Tensor", "a::f(Tensor x, int n=1) -> Tensor", False),
        ("a::f(Tensor x, int n=1) -> Tensor", "a::f(Tensor x, *, int n=1) -> Tensor", True),
        ("a::f(Tensor y) -> Tensor", "a::f(Tensor x) -> Tensor", False),
        ("a::f(Tensor(a!) x) -> Tensor(a!)", "a::f(Tensor x) -> Tensor", False),
        ("a::f.out(Tensor x) -> Tensor", "a::f(Tensor x) -> Tensor", False),
        ("a::f(Tensor x) -> (Tensor, Tensor)", "a::f(Tensor x) -> Tensor", False),
    ],
)
def test_a_later_schema_takes_earlier_calls(schema: str, earlier: str, expected: bool) -> None:
    later_schema, earlier_schema = parse_schema(schema), parse_schema(earlier)
    assert later_schema is not None
    assert earlier_schema is not None
    assert is_backward_compatible(later_schema, earlier_schema) is expected
    torch_rule = torch._C.parse_schema(schema).is_backward_compatible_with(torch._C.parse_schema(earlier))  # type: ignore[attr-defined]
    assert torch_rule or not expected, "torch refuses what is accepted here"


def test_effects_are_those_of_torch() -> None:
    for schema in torch_schemas():
        effects = schema_effects(str(schema))
        assert effects is not None, schema
        assert effects.mutates == {
            argument.name for argument in schema.arguments if argument.alias_info and argument.alias_info.is_write
        }, schema


def test_alias_names_of_custom_operators_have_digits() -> None:
    effects = schema_effects("mylib::step(Tensor(a0!) count, Tensor x, Tensor(a2!)? more) -> Tensor(a0!)")
    assert effects is not None
    assert effects.mutates == {"count", "more"}
    assert set(effects.aliases()) == {(0, "count")}


def test_the_longest_schema_takes_little_memory() -> None:
    """All results may share memory with all parameters: the pairs are more than the characters."""
    parameters = ", ".join(f"T(a) p{number}" for number in range(200))
    text = f"a::b({parameters}) -> ({', '.join(['T(a)'] * 300)})"
    assert limits.SCHEMA_CHARACTERS / 2 < len(text) <= limits.SCHEMA_CHARACTERS
    tracemalloc.start()
    try:
        effects = schema_effects(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert effects is not None
    assert peak < 2**20
    assert len(set(effects.aliases())) == 200 * 300


def test_a_text_over_the_limit_has_no_effects() -> None:
    assert schema_effects("a::b(Tensor(a!) x) -> " + "Tensor, " * 1000) is None
