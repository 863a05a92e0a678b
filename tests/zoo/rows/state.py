"""Buffers that a call changes for the next one."""

# Long because each row is a model, and the rows of state share two builders.
from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, Rows, given, linear, linears

CASES: list[Case] = []
row = Rows(CASES, "state")
_NORM = "BatchNorm in train mode"
_CACHE = "key-value caches by `index_copy_`"
_EARLY = "a buffer read early and written late"
_ZEROS = "buffers that are all zeros cost no bytes in the file"


@row.of(
    _NORM,
    "ab",
    lambda: (torch.randn(5, 4),),
    held=lambda: {"first": torch.nn.BatchNorm1d(4), "second": torch.nn.BatchNorm1d(4)},
)
def batch_norm_that_trains(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.second(self.b(self.first(self.a(x)).relu()))


@row.of(_NORM, "abc", lambda: (torch.randn(5, 4),), held=lambda: {"norm": torch.nn.BatchNorm1d(4)})
def batch_norm_that_trains_twice_a_call(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """One layer, called in two stages: its statistics are written twice."""
    y = self.norm(self.b(self.norm(self.a(x)))) + self.c(x)
    return y, self.norm.running_mean, self.norm.num_batches_tracked


@row.of(_NORM, "abc", lambda: (torch.randn(5, 4),), held=lambda: {"norm": torch.nn.BatchNorm1d(4)})
def statistics_read_after_training(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.norm(self.a(x)))
    return self.c(y) + self.norm.running_mean / self.norm.running_var


@row.of(_NORM, "abc", lambda: (torch.randn(5, 4),), held=lambda: {"norm": torch.nn.BatchNorm1d(4)})
def statistics_read_before_training(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x) - self.norm.running_mean)
    return self.c(self.norm(y))


@row(_NORM)
def instance_norm_that_trains() -> Model:
    norm = torch.nn.InstanceNorm1d(3, track_running_stats=True)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x))) + self.norm.running_mean.sum()

    return Lambda(run, **linears("ab"), norm=norm).train(), given(torch.randn(2, 3, 4))


def _counting(place: int) -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate((self.a, self.b, self.c)):
            x = layer(x)
            if number == place:
                self.count.add_(1)
                x = x * self.count
        return x

    return Lambda(run, **linears("abc"), count=torch.zeros((), dtype=torch.int64)), given()


@row("counters")
def counter_in_the_first_layer() -> Model:
    return _counting(0)


@row("counters")
def counter_in_the_middle() -> Model:
    return _counting(1)


@row("counters")
def counter_in_the_last_layer() -> Model:
    return _counting(2)


@row.of("counters", "abc", held=lambda: {"calls": torch.tensor(0)})
def counter_written_and_never_read(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.calls += 1
    return self.c(self.b(y))


@row.of("counters", "abc", held=lambda: {"count": torch.zeros(3)})
def counter_returned(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The result is the buffer itself, and a view of it: the next call changes both."""
    y = self.b(self.a(x))
    self.count.add_(1)
    return self.c(y), self.count, self.count[1:]


@row.of("counters", "abcd", held=lambda: {"count": torch.tensor(0)})
def position_from_a_counter(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What every layer uses is cheap to make, but only before the counter is written."""
    position = torch.arange(4) + self.count
    x = self.a(x) + position
    self.count.add_(2)
    for layer in (self.b, self.c, self.d):
        x = layer(x) + position.cos()
    return x


class CachedLayer(torch.nn.Module):
    """Attention over all that the calls so far have put into the layer's cache."""

    keys: torch.Tensor
    values: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(), linear(), linear()
        self.register_buffer("keys", torch.zeros(6, 4), persistent=False)
        self.register_buffer("values", torch.zeros(6, 4), persistent=False)

    def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.keys.index_copy_(0, position, self.key(x))
        self.values.index_copy_(0, position, self.value(x))
        mask = torch.arange(6) <= position
        scores = (self.query(x) @ self.keys.t()).masked_fill(~mask, float("-inf"))
        return x + scores.softmax(-1) @ self.values


class CachedLayers(torch.nn.Module):
    """Layers with a cache each, and the position in a buffer."""

    position: torch.Tensor

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(CachedLayer() for _ in range(layers))
        self.register_buffer("position", torch.zeros(1, dtype=torch.int64))


class CachedDecoder(CachedLayers):
    """Each call is one position further; a buffer counts them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.position)
        self.position.add_(1)
        return x


@row.of(_CACHE, "ab", lambda: (torch.randn(1, 4), torch.tensor([2])), held=lambda: {"cache": torch.zeros(6, 4)})
def cache_by_index_copy(self: Any, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    self.cache.index_copy_(0, position, self.a(x))
    return self.b(self.cache).sum(0)


@row(_CACHE)
def caches_of_several_layers() -> Model:
    class Given(CachedLayers):
        def forward(self, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, position)
            return x

    return Given(), given(torch.randn(1, 4), torch.tensor([2]))


@row(_CACHE)
def caches_and_a_counted_position() -> Model:
    return CachedDecoder(), given(torch.randn(1, 4))


@row.of(_CACHE, "abc", lambda: (torch.randn(1, 4),), held=lambda: {"window": torch.zeros(5, 4)})
def cache_that_rolls(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x)
    self.window.copy_(torch.cat([self.window[1:], y]))
    return self.c(self.b(self.window)).sum(0)


@row.of(_EARLY, "abcd", held=lambda: {"last": torch.zeros(4)})
def read_early_and_written_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x) + self.last)
    z = self.d(self.c(y))
    self.last.copy_(z.mean(0))
    return z


@row.of(_EARLY, "abcd", held=lambda: {"first": torch.zeros(4), "second": torch.ones(4)})
def two_read_early_and_written_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Recurrent states that go from call to call, one inside the other's reach."""
    y = self.a(x) + self.first
    z = self.b(y) + self.second
    self.second.copy_(z.sum(0))
    out = self.c(z)
    self.first.copy_(out.sum(0))
    return self.d(out)


@row.of(_EARLY, "abcd", held=lambda: {"mean": torch.zeros(4)})
def read_everywhere_and_written_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in (self.a, self.b, self.c):
        x = layer(x) + self.mean
    self.mean.lerp_(x.mean(0), 0.1)
    return self.d(x)


@row.of(_EARLY, "abcd", held=lambda: {"last": torch.zeros(4)})
def written_early_and_read_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.last.copy_(x.sum(0))
    return self.d(self.c(self.b(self.a(x)))) + self.last


@row.of(_EARLY, "abcd", held=lambda: {"sum": torch.ones(4)})
def written_twice(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = self.a(x)
    self.sum.add_(x.sum(0))
    x = self.c(self.b(x))
    self.sum.mul_(0.5)
    return self.d(x) + self.sum


@row.of(_EARLY, "abc", held=lambda: {"left": torch.zeros(4), "right": torch.ones(4)})
def two_buffers_swapped(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x) + self.left
    kept = self.left.clone()
    self.left.copy_(self.right)
    self.right.copy_(kept)
    return self.c(self.b(y)) * self.right


@row.of(_EARLY, "abc", held=lambda: {"table": torch.zeros(3, 4)})
def view_read_early_and_whole_written_late(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A view taken before the write shows what was written."""
    tail = self.table[1:]
    y = self.b(self.a(x))
    self.table.add_(y.sum(0))
    return self.c(y) + tail.sum(0)


@row.of(_EARLY, "abc", held=lambda: {"left": torch.ones(4), "right": torch.zeros(4)})
def several_buffers_written_at_once(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.a(x) * self.left
    torch._foreach_add_([self.left, self.right], 1.0)
    return self.c(self.b(y)) * self.right


@row.of(_EARLY, "abc", held=lambda: {"last": torch.zeros(2, 4)}, frozen=True)
def written_as_out(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x) + self.last[0])
    torch.mul(y, 2, out=self.last)
    return self.c(y)


@row.of(_EARLY, "abc")
def constant_of_the_code_written(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A tensor that the code makes from numbers is new in every call."""
    table = torch.tensor([1.0, 2.0, 3.0, 4.0])
    y = self.a(x) * table
    table.add_(1)
    return self.c(self.b(y)) * table


@row(_EARLY)
def tensor_that_is_no_buffer() -> Model:
    """A tensor that hangs on the module as a plain attribute is a constant; layers in several stages use it."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = layer(x) * self.plain
        return x

    model = Lambda(run, **linears("abc"))
    model.plain = torch.randn(4)
    return model, given()


@row(_EARLY)
def tensor_that_is_no_buffer_written() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x) * self.plain)
        self.plain.add_(1)
        return self.c(y) * self.plain

    model = Lambda(run, **linears("abc"))
    model.plain = torch.ones(4)
    return model, given()


@row.of(_EARLY, "abcd")
def parameter_written_through_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.b(self.a(x))
    self.c.weight.detach()[1:3].mul_(0.5)
    return self.d(self.c(y)) @ self.c.weight


@row(_ZEROS)
def zeros() -> Model:
    """Two caches, a view of one, and a zero that is negative: all zeros, and none may stand for another."""
    whole = torch.zeros(4, 4)

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.cache.add_(y.sum(0))
        return self.b(y) + self.other + self.tail.sum() + (1 / self.negative).clamp(-9, 9)

    held = {"cache": whole, "other": torch.zeros(4), "tail": whole[2:], "negative": -torch.zeros(4)}
    return Lambda(run, **linears("ab"), **held), given()


@row.of("`pipe.reset_state()`", "abc", held=lambda: {"speed": torch.randn(4), "place": torch.randn(4)})
def state_that_starts_with_numbers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.speed.mul_(0.9).add_(self.a(x).sum(0))
    x = self.b(x) + self.speed
    self.place.add_(self.speed)
    return self.c(x) + self.place


_STATIC = "A static-cache decoder of transformers, cut in three, gives the same 32 greedy tokens as transformers does"


@row(_STATIC)
def static_cache_decoder() -> Model:
    """A Llama with the cache in its buffers: one token a call."""
    import transformers
    from transformers.integrations.executorch import TorchExportableModuleWithStaticCache

    sizes: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, num_hidden_layers=4, num_key_value_heads=2)
    config._attn_implementation = "sdpa"
    model = transformers.LlamaForCausalLM(config).eval()
    cache = {"batch_size": 1, "max_cache_len": 40, "device": "cpu"}
    model.generation_config = transformers.GenerationConfig(
        use_cache=True, cache_implementation="static", max_length=40, cache_config=cache
    )
    decoder = TorchExportableModuleWithStaticCache(model)
    return decoder, given(torch.tensor([[5]]), None, torch.tensor([0]))
