"""What the inputs and results of a model are made of."""

import collections
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

if TYPE_CHECKING:
    from transformers import LlamaForCausalLM

CASES: list[Case] = []
row = Rows(CASES, "containers")


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@dataclasses.dataclass
class Point:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Answer:
    """A dataclass in a dataclass, with a field that is not always there and one that is no tensor."""

    point: Point
    score: torch.Tensor
    rest: torch.Tensor | None = None
    words: str = "none"


for _registered in (Point, Answer):
    torch.export.register_dataclass(_registered, serialized_type_name=f"tests.{_registered.__name__}")


class Nested(torch.nn.Module):
    """Containers of every kind on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = linear(), linear()

    def forward(self, batch: dict[str, list[torch.Tensor]], pair: Pair, *, point: Point, scale: float = 2.0) -> Any:
        x = self.a(batch["x"][0]) + batch["x"][1] + pair.left * pair.right + point.x.sum()
        y = self.b(x) * scale
        result = collections.OrderedDict(pair=Pair(x, y), point=Point(y, x), many=[(x,), {3: y}])
        return result, collections.deque([x, y], maxlen=5)


@row("namedtuples", types=[Pair, Point])
def containers() -> Model:
    batch = {"x": [torch.randn(2, 4), torch.randn(2, 4)]}
    kwargs = {"point": Point(torch.randn(2), torch.randn(2))}
    return Nested(), Inputs(args=(batch, Pair(torch.randn(4), torch.randn(4))), kwargs=kwargs)


@row("dicts")
def dicts_with_odd_keys() -> Model:
    def run(self: Any, batch: dict[Any, Any]) -> dict[Any, Any]:
        y = self.a(batch[1]) + batch["two"][3.5]
        return {7: y, None: self.b(y), "text": {True: self.c(y), -1: batch[1]}, 2.5: {}}

    batch = {1: torch.randn(2, 4), "two": {3.5: torch.randn(4)}}
    return Lambda(run, **linears("abc")), given(batch)


@row("dicts")
def dicts_of_other_kinds() -> Model:
    def run(self: Any, ordered: Any, defaults: Any) -> Any:
        x = self.b(self.a(ordered["x"]))
        found = collections.defaultdict(list, {"x": [x], "y": []})
        found["z"].append(self.c(x) + defaults["y"][0])
        return collections.OrderedDict(z=found, a=defaults)

    ordered = collections.OrderedDict(z=torch.randn(1), x=torch.randn(2, 4))
    defaults = collections.defaultdict(list, {"y": [torch.randn(4)]})
    return Lambda(run, **linears("abc")), given(ordered, defaults)


@row.of("lists", "abc", lambda: ([torch.randn(2, 4), [torch.randn(4), [torch.randn(4)]], []],))
def lists_of_lists(self: Any, many: list[Any]) -> list[Any]:
    x = self.a(many[0]) + many[1][0] + many[1][1][0]
    return [[x, [self.b(x)], ()], [self.c(x)], collections.deque([x, x * 2])]


@row("lists")
def any_number_of_arguments() -> Model:
    class Sum(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = linear(), linear()

        def forward(self, *many: torch.Tensor, bias: torch.Tensor | None = None, **named: torch.Tensor) -> torch.Tensor:
            x = self.a(torch.stack(many).sum(0))
            return self.b(x + named["late"]) * named["self_"] + (0 if bias is None else bias)

    kwargs = {"late": torch.randn(4), "self_": torch.randn(4), "bias": None}
    return Sum(), Inputs(args=(torch.randn(2, 4), torch.randn(2, 4), torch.randn(2, 4)), kwargs=kwargs)


@row.of(
    "dataclasses",
    "abc",
    lambda: (Answer(Point(torch.randn(2, 4), torch.randn(2)), torch.randn(4)),),
    types=[Point, Answer],
)
def dataclasses_in_dataclasses(self: Any, given: Answer) -> Answer:
    x = self.a(given.point.x) + given.score
    y = self.b(x)
    return Answer(Point(x, y), self.c(y).sum())


@row.of("namedtuples", "abc")
def named_results_of_torch(self: Any, x: torch.Tensor) -> Any:
    y = self.b(self.a(x))
    return torch.max(y, dim=1), torch.topk(self.c(y), 2)


def _sizes(**more: Any) -> dict[str, Any]:
    return {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4} | more


def _llama(layers: int = 3) -> "LlamaForCausalLM":
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**_sizes(num_hidden_layers=layers))).eval()


@row("Hugging Face outputs")
def model_output() -> Model:
    import transformers

    config = transformers.BertConfig(**_sizes(num_hidden_layers=3, max_position_embeddings=32))
    kwargs = {"input_ids": torch.randint(0, 64, (2, 6)), "output_hidden_states": True, "output_attentions": False}
    return transformers.BertModel(config).eval(), Inputs(kwargs=kwargs)


_CACHES = [
    f"transformers.cache_utils:{name}" for name in ("DynamicCache", "DynamicLayer", "StaticCache", "StaticLayer")
]


@row("Hugging Face outputs", types=_CACHES)
def model_output_with_a_cache() -> Model:
    """The keys and values of every layer are results."""
    return _llama(), Inputs(kwargs={"input_ids": torch.randint(0, 64, (2, 6)), "use_cache": True})


def _registered_cache(model: "LlamaForCausalLM") -> None:
    from transformers.exporters.exporter_dynamo import register_cache_pytrees_for_model

    register_cache_pytrees_for_model(model)


@row("caches as inputs", types=_CACHES)
def cache_in_and_out() -> Model:
    """One step of decoding: the cache of the steps before goes in, a longer one comes out."""
    import transformers

    model = _llama()
    _registered_cache(model)
    cache = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 64, (1, 5)), past_key_values=cache, use_cache=True)
    kwargs = {"input_ids": torch.tensor([[7]]), "past_key_values": cache, "use_cache": True}
    return model, Inputs(kwargs=kwargs)


@row("caches as inputs", types=_CACHES)
def cache_of_any_length() -> Model:
    model, inputs = cache_in_and_out()
    layers = len(inputs.kwargs["past_key_values"].layers)
    past = {2: Dim("past", min=2, max=31)}
    shapes = {"input_ids": None, "past_key_values": [past] * (2 * layers), "use_cache": None}
    return model, Inputs(kwargs=inputs.kwargs, dynamic_shapes=shapes)


@row("caches as inputs", types=_CACHES)
def static_cache_as_an_input() -> Model:
    """A cache of fixed length: the call writes into it."""
    import transformers

    model = _llama()
    _registered_cache(model)
    cache = transformers.StaticCache(config=model.config, max_cache_len=12)
    with torch.no_grad():
        model(input_ids=torch.randint(0, 64, (1, 5)), past_key_values=cache, use_cache=True)
    kwargs = {"input_ids": torch.tensor([[7]]), "past_key_values": cache, "position_ids": torch.tensor([[5]])}
    return model, Inputs(kwargs=kwargs)


@row("caches as inputs")
def cache_of_pairs() -> Model:
    """The form of caches before transformers had a class for them: a tuple of pairs."""

    def run(self: Any, x: torch.Tensor, past: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> Any:
        present = []
        for layer, (keys, values) in zip((self.a, self.b, self.c), past, strict=True):
            keys, values = torch.cat([keys, layer(x)], dim=1), torch.cat([values, x], dim=1)
            x = x + (x @ keys.mT).softmax(-1) @ values
            present.append((keys, values))
        return {"x": x, "past": tuple(present)}

    past = tuple((torch.randn(2, 3, 4), torch.randn(2, 3, 4)) for _ in range(3))
    length = Dim("length", min=2, max=32)
    return Lambda(run, **linears("abc")), given(
        torch.randn(2, 1, 4), past, dynamic=(None, (({1: length}, {1: length}),) * 3)
    )
