"""Buffers that a call changes for the next one."""

# Long because each row is a model, and the rows of state share two builders.
from typing import Any

import torch

from tests.zoo.case import Case
from tests.zoo.rows.build import Lambda, Model, given, linear, linears, rows

CASES: list[Case] = []
row = rows(CASES, "state")
_NORM = "BatchNorm in train mode"
_CACHE = "key-value caches by `index_copy_`"
_EARLY = "a buffer read early and written late"
_ZEROS = "buffers that are all zeros cost no bytes in the file"


@row(_NORM)
def batch_norm_that_trains() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.b(self.first(self.a(x)).relu()))

    norms = {"first": torch.nn.BatchNorm1d(4), "second": torch.nn.BatchNorm1d(4)}
    return Lambda(run, **linears("ab"), **norms).train(), given(torch.randn(5, 4))


@row(_NORM)
def batch_norm_that_trains_twice_a_call() -> Model:
    """One layer, called in two stages: its statistics are written twice."""

    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.norm(self.b(self.norm(self.a(x)))) + self.c(x)
        return y, self.norm.running_mean, self.norm.num_batches_tracked

    return Lambda(run, **linears("abc"), norm=torch.nn.BatchNorm1d(4)).train(), given(torch.randn(5, 4))


@row(_NORM)
def statistics_read_after_training() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.norm(self.a(x)))
        return self.c(y) + self.norm.running_mean / self.norm.running_var

    return Lambda(run, **linears("abc"), norm=torch.nn.BatchNorm1d(4)).train(), given(torch.randn(5, 4))


@row(_NORM)
def statistics_read_before_training() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x) - self.norm.running_mean)
        return self.c(self.norm(y))

    return Lambda(run, **linears("abc"), norm=torch.nn.BatchNorm1d(4)).train(), given(torch.randn(5, 4))


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


@row("counters")
def counter_written_and_never_read() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.calls += 1
        return self.c(self.b(y))

    return Lambda(run, **linears("abc"), calls=torch.tensor(0)), given()


@row("counters")
def counter_returned() -> Model:
    """The result is the buffer itself, and a view of it: the next call changes both."""

    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = self.b(self.a(x))
        self.count.add_(1)
        return self.c(y), self.count, self.count[1:]

    return Lambda(run, **linears("abc"), count=torch.zeros(3)), given()


@row("counters")
def position_from_a_counter() -> Model:
    """What every layer uses is cheap to make, but only before the counter is written."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        position = torch.arange(4) + self.count
        x = self.a(x) + position
        self.count.add_(2)
        for layer in (self.b, self.c, self.d):
            x = layer(x) + position.cos()
        return x

    return Lambda(run, **linears("abcd"), count=torch.tensor(0)), given()


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


@row(_CACHE)
def cache_by_index_copy() -> Model:
    def run(self: Any, x: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        self.cache.index_copy_(0, position, self.a(x))
        return self.b(self.cache).sum(0)

    return Lambda(run, **linears("ab"), cache=torch.zeros(6, 4)), given(torch.randn(1, 4), torch.tensor([2]))


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


@row(_CACHE)
def cache_that_rolls() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        self.window.copy_(torch.cat([self.window[1:], y]))
        return self.c(self.b(self.window)).sum(0)

    return Lambda(run, **linears("abc"), window=torch.zeros(5, 4)), given(torch.randn(1, 4))


@row(_EARLY)
def read_early_and_written_late() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x) + self.last)
        z = self.d(self.c(y))
        self.last.copy_(z.mean(0))
        return z

    return Lambda(run, **linears("abcd"), last=torch.zeros(4)), given()


@row(_EARLY)
def two_read_early_and_written_late() -> Model:
    """Recurrent states that go from call to call, one inside the other's reach."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.first
        z = self.b(y) + self.second
        self.second.copy_(z.sum(0))
        out = self.c(z)
        self.first.copy_(out.sum(0))
        return self.d(out)

    return Lambda(run, **linears("abcd"), first=torch.zeros(4), second=torch.ones(4)), given()


@row(_EARLY)
def read_everywhere_and_written_late() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = layer(x) + self.mean
        self.mean.lerp_(x.mean(0), 0.1)
        return self.d(x)

    return Lambda(run, **linears("abcd"), mean=torch.zeros(4)), given()


@row(_EARLY)
def written_early_and_read_late() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.last.copy_(x.sum(0))
        return self.d(self.c(self.b(self.a(x)))) + self.last

    return Lambda(run, **linears("abcd"), last=torch.zeros(4)), given()


@row(_EARLY)
def written_twice() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.a(x)
        self.sum.add_(x.sum(0))
        x = self.c(self.b(x))
        self.sum.mul_(0.5)
        return self.d(x) + self.sum

    return Lambda(run, **linears("abcd"), sum=torch.ones(4)), given()


@row(_EARLY)
def two_buffers_swapped() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) + self.left
        kept = self.left.clone()
        self.left.copy_(self.right)
        self.right.copy_(kept)
        return self.c(self.b(y)) * self.right

    return Lambda(run, **linears("abc"), left=torch.zeros(4), right=torch.ones(4)), given()


@row(_EARLY)
def view_read_early_and_whole_written_late() -> Model:
    """A view taken before the write shows what was written."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        tail = self.table[1:]
        y = self.b(self.a(x))
        self.table.add_(y.sum(0))
        return self.c(y) + tail.sum(0)

    return Lambda(run, **linears("abc"), table=torch.zeros(3, 4)), given()


@row(_EARLY)
def several_buffers_written_at_once() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x) * self.left
        torch._foreach_add_([self.left, self.right], 1.0)
        return self.c(self.b(y)) * self.right

    return Lambda(run, **linears("abc"), left=torch.ones(4), right=torch.zeros(4)), given()


@row(_EARLY)
def written_as_out() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x) + self.last[0])
        torch.mul(y, 2, out=self.last)
        return self.c(y)

    return Lambda(run, **linears("abc"), last=torch.zeros(2, 4)).requires_grad_(False), given()


@row(_EARLY)
def constant_of_the_code_written() -> Model:
    """A tensor that the code makes from numbers is new in every call."""

    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0, 4.0])
        y = self.a(x) * table
        table.add_(1)
        return self.c(self.b(y)) * table

    return Lambda(run, **linears("abc")), given()


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


@row(_EARLY)
def parameter_written_through_a_view() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(x))
        self.c.weight.detach()[1:3].mul_(0.5)
        return self.d(self.c(y)) @ self.c.weight

    return Lambda(run, **linears("abcd")), given()


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


@row("`pipe.reset_state()`")
def state_that_starts_with_numbers() -> Model:
    def run(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.speed.mul_(0.9).add_(self.a(x).sum(0))
        x = self.b(x) + self.speed
        self.place.add_(self.speed)
        return self.c(x) + self.place

    held = {"speed": torch.randn(4), "place": torch.randn(4)}
    return Lambda(run, **linears("abc"), **held), given()


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
