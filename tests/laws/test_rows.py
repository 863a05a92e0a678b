"""Whether a model keeps the rows of a batch apart: the verdict of the graph beside runs of the model."""

import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.export import Dim
from torch.nn import functional

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import capture_program
from stagepack.format.graph import Graph
from stagepack.format.tree import value_names
from stagepack.graph.rows.row_analysis import mixed_rows
from stagepack.linearize import linearize_program
from tests.laws.function_model import Calls
from tests.modules import module_of

Function = Callable[[torch.Tensor], Any]

WEIGHT = torch.linspace(-1, 1, 36).reshape(6, 6)
TABLE = torch.linspace(-1, 1, 64 * 6).reshape(64, 6)
KERNEL = torch.linspace(-1, 1, 81).reshape(3, 3, 3, 3)


class Captured:
    """A function captured with a dynamic number of rows in one dimension."""

    def __init__(self, function: Function, example: torch.Tensor, dim: int, *, decompose: bool = False) -> None:
        self.example, self.dim = example, dim
        model = Calls(function).eval()
        program = torch.export.export(
            model, (example,), dynamic_shapes=(({dim: Dim("rows", min=2, max=64)},),), strict=False
        )
        program = program.run_decompositions() if decompose else program
        linearized = linearize_program(capture_program(program, Inputs()))
        self.graph: Graph = linearized.graph
        self.results = list(value_names(linearized.signature.result))
        self.run = program.module()

    def reason(self, *, allow_random: bool = False) -> str | None:
        """Why rows do not keep apart, by the graph."""
        row_dims = {self.graph.inputs[0].name: self.dim}
        return mixed_rows([self.graph], row_dims, self.results, allow_random=allow_random)

    def result_dim(self) -> int | None:
        """The dimension of the result that holds the rows; None if there is none."""
        values = {value.name: value for node in self.graph.nodes for value in node.outputs if value is not None}
        symbol, result = self.graph.inputs[0].shape[self.dim], values.get(self.results[0])
        dims = [] if result is None else [dim for dim, size in enumerate(result.shape) if size == symbol]
        return dims[0] if len(dims) == 1 else None

    def keeps_apart(self) -> bool:
        """Whether runs show no influence of other rows, of their order, or of their number."""
        dim = self.result_dim()
        if dim is None:
            return False
        count, expected = self.example.shape[self.dim], self._rows(self.run(self.example), dim, None)
        order = [*range(1, count), 0]
        if not self._agree(self._select(order), list(range(count)), expected[order]):
            return False
        if not self._agree(self._select([1, 2]), [0, 1], expected[[1, 2]]):
            return False
        return all(
            self._agree(batch, list(range(1, count + 1)), expected) for batch in self._with_neighbours([0, count - 1])
        )

    def _with_neighbours(self, positions: Sequence[int]) -> Iterator[torch.Tensor]:
        for factor in (1e3, 1e-3, -1.0, float("nan"), float("inf")):
            first, last = (self._select([position]) * factor for position in positions)
            yield torch.cat([first, self.example, last], self.dim)

    def _select(self, positions: Sequence[int]) -> torch.Tensor:
        return self.example.index_select(self.dim, torch.tensor(positions))

    def _rows(self, result: Any, dim: int, positions: Sequence[int] | None) -> torch.Tensor:
        rows: torch.Tensor = result.movedim(dim, 0)
        return rows if positions is None else rows[list(positions)]

    def _agree(self, batch: torch.Tensor, positions: Sequence[int], expected: torch.Tensor) -> bool:
        try:
            rows = self._rows(self.run(batch), self.result_dim() or 0, positions)
        except RuntimeError:  # such as a factorization that NaN fails: calls of a batch that fails run alone
            return True
        return torch.allclose(rows, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def image(*, rows: int = 4) -> torch.Tensor:
    return torch.linspace(-2, 2, rows * 3 * 64).sin().reshape(rows, 3, 8, 8)


def sequence(dim: int) -> torch.Tensor:
    """A tensor of 4 rows in one of its three dimensions."""
    shape = [4 if position == dim else size for position, size in enumerate((4, 5, 6))]
    return torch.linspace(-3, 3, torch.Size(shape).numel()).mul(1.7).sin().reshape(shape)


def write_columns(x: torch.Tensor) -> torch.Tensor:
    result = torch.zeros(x.shape[0], 6)
    result[:, :2] = x[:, 0, :2]
    return result


def write_masked(x: torch.Tensor) -> torch.Tensor:
    result = x.clone()
    result[result > 0] = 0.5
    return result


def guided(x: torch.Tensor) -> torch.Tensor:
    """Classifier-free guidance: the batch twice, behind each other."""
    both = torch.cat([x * 0, x]) @ WEIGHT
    return both[: x.shape[0]] + 2 * (both[x.shape[0] :] - both[: x.shape[0]])


def heads(x: torch.Tensor) -> torch.Tensor:
    """Attention heads merged with the batch, as in ``bmm`` of three-dimensional tensors."""
    split = x.view(x.shape[0], x.shape[1], 2, 3).transpose(1, 2).reshape(x.shape[0] * 2, x.shape[1], 3)
    mixed = torch.bmm(torch.bmm(split, split.mT).softmax(-1), split)
    return mixed.view(x.shape[0], 2, x.shape[1], 3).transpose(1, 2).reshape(x.shape[0], x.shape[1], 6)


def looped(x: torch.Tensor) -> Any:
    return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


def looped_by_sum(x: torch.Tensor) -> Any:
    return torch.while_loop(lambda i, y: y.sum() < 90, lambda i, y: (i + 1, y.abs() * 2), (torch.tensor(0), x))[1]


def branched(condition: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    return lambda x: torch.cond(condition(x), lambda y: y * 2, lambda y: y.sin(), (x,))


class Recurrent(torch.nn.Module):
    """The sequence that a recurrent layer returns."""

    def __init__(self, layer: Callable[..., torch.nn.Module], *, batch_first: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = layer(6, 3, 2, batch_first=batch_first, bidirectional=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)[0]


APART: dict[str, tuple[Function, int]] = {
    "linear": (lambda x: functional.linear(x, WEIGHT), 0),
    "linear, rows second": (lambda x: functional.linear(x, WEIGHT), 1),
    "matrix product from the left": (lambda x: torch.ones(3, 5) @ x, 2),
    "attention": (lambda x: functional.scaled_dot_product_attention(x, x, x, is_causal=True), 0),
    "heads merged with the batch": (heads, 0),
    "flattened and back": (lambda x: (x.flatten(0, 1) @ WEIGHT).view(x.shape), 0),
    "time first, flattened and back": (
        lambda x: x.flatten(0, 1).tanh().unflatten(0, (x.shape[0], x.shape[1])).transpose(0, 1),
        1,
    ),
    "guidance": (guided, 0),
    "copies beside each other": (lambda x: x.repeat_interleave(3, 0).view(-1, 3, *x.shape[1:]).mean(1), 0),
    "layer norm": (lambda x: functional.layer_norm(x, (6,)), 0),
    "layer norm, rows second": (lambda x: functional.layer_norm(x, (6,)), 1),
    "group norm": (lambda x: functional.group_norm(x, 5), 0),
    "batch norm of running statistics": (lambda x: functional.batch_norm(x, torch.zeros(5), torch.ones(5)), 0),
    "softmax along the sequence": (lambda x: x.softmax(1), 0),
    "sum along the sequence": (lambda x: x.cumsum(1), 0),
    "top of each row": (lambda x: x.topk(2, dim=1).values, 0),
    "scale of each row": (lambda x: torch.round(x / x.abs().amax((1, 2), keepdim=True) * 127), 0),
    "positions in the sequence": (lambda x: x + torch.arange(x.shape[1])[:, None], 0),
    "zeros of the size of the batch": (lambda x: torch.cat([torch.zeros(x.shape[0], 1, 6), x], 1), 0),
    "a token for each row": (lambda x: torch.cat([WEIGHT[:1].expand(x.shape[0], 1, 6), x], 1), 0),
    "writes into columns": (write_columns, 0),
    "writes by a mask": (write_masked, 0),
    "the last token of each row": (lambda x: x[torch.arange(x.shape[0]), (x[:, :, 0] > 0).sum(1).clamp(max=4)], 0),
    "embedding": (lambda x: functional.embedding((x > 0).long(), TABLE), 0),
    "bags": (lambda x: functional.embedding_bag((x[:, 0] > 0).long(), TABLE), 0),
    "gather along the sequence": (lambda x: x.gather(1, (x > 0).long()), 0),
    "einsum": (lambda x: torch.einsum("bsd,btd->bst", x, x), 0),
    "distances in a row": (lambda x: torch.cdist(x, x), 0),
    "matrix exponential": (lambda x: torch.linalg.matrix_exp(x @ x.mT / 10), 0),
    "a loop of a fixed length": (looped, 0),
    "a branch on a weight": (branched(lambda _: WEIGHT.sum() > 0), 0),
    "dropout in eval mode": (lambda x: functional.dropout(x, training=False), 0),
    "LSTM, batch first": (Recurrent(torch.nn.LSTM, batch_first=True), 0),
    "GRU, time first": (Recurrent(torch.nn.GRU, batch_first=False), 1),
    "convolution": (lambda x: functional.conv2d(x, KERNEL, padding=1), -1),
    "pooling and resizing": (lambda x: functional.interpolate(functional.max_pool2d(x, 2), size=(5, 5)), -1),
    "padding of images": (lambda x: functional.pad(x, (1, 1, 1, 1), mode="reflect"), -1),
    "patches": (lambda x: functional.unfold(x, 2, stride=2), -1),
}


MIXED: dict[str, tuple[Function, int, str]] = {
    "the largest of the batch": (lambda x: x / x.abs().amax(), 0, "amax"),
    "a mean over rows": (lambda x: x - x.mean(0), 0, "mean"),
    "a mean over rows that are second": (lambda x: x - x.mean(1, keepdim=True), 1, "mean"),
    "a sum along rows": (lambda x: x.cumsum(0), 0, "cumsum"),
    "the first of a sorted batch": (lambda x: x.sort(0).values, 0, "sort"),
    "the top of the batch": (lambda x: x - x.topk(2, dim=0).values[1], 0, "topk"),
    "softmax over rows": (lambda x: x.softmax(0), 0, "softmax"),
    "rows in reverse": (lambda x: x.flip(0), 0, "flip"),
    "rows moved on": (lambda x: x.roll(1, 0), 0, "roll"),
    "rows moved on in a flat batch": (lambda x: x.roll(1), 0, "roll"),
    "the first row": (lambda x: x - x[0], 0, "select"),
    "the last row": (lambda x: x + x[-1:], 0, "slice"),
    "a product of rows": (lambda x: x[:, 0] @ x[:, 0].T, 0, "matmul"),
    "a product that sums over rows": (lambda x: torch.einsum("bsd,bsd->sd", x, x) + x, 0, "einsum"),
    "attention between rows": (
        lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None])[0],
        1,
        "dot",
    ),
    "batch norm of the batch": (lambda x: functional.batch_norm(x, None, None, training=True), 0, "batch_norm"),
    "copies that are taken for neighbours": (
        lambda x: x.repeat(3, 1, 1).view(-1, 3, *x.shape[1:]).mean(1),
        0,
        "moves parts of rows",
    ),
    "the number of rows": (lambda x: x / x.shape[0], 0, "number of rows"),
    "the place of a row": (lambda x: x + torch.arange(x.shape[0])[:, None, None], 0, "places of rows"),
    "a table by the place of a row": (lambda x: x[:, 0] + TABLE[torch.arange(x.shape[0])], 0, "position of the row"),
    "rows in an order of their values": (lambda x: x[x[:, 0, 0].argsort()], 0, "argsort"),
    "rows by their values": (lambda x: x[(x[:, 0, 0] > 0).long()], 0, "selects rows by values"),
    "elements by a mask": (lambda x: x - x[x > 0].mean(), 0, "selects elements"),
    "a number of all rows": (lambda x: x * x[0, 0, 0].item(), 0, "select"),
    "a branch on the batch": (branched(lambda x: x.sum() > 0), 0, "sum"),
    "a loop as long as the batch needs": (looped_by_sum, 0, "sum"),
    "a histogram": (lambda x: x * torch.histc(x, 3)[0], 0, "histc"),
    "one size of codes for all rows": (lambda x: x - x.unique().numel(), 0, "is not known to keep rows apart"),
    "random numbers": (lambda x: x + torch.rand_like(x), 0, "random"),
    "dropout in training": (lambda x: functional.dropout(x, training=True), 0, "random"),
    "a signal without a batch": (lambda x: functional.conv1d(x[0, :, :], torch.ones(2, 5, 1)), 2, "conv1d"),
}


def example_of(dim: int) -> tuple[torch.Tensor, int]:
    """An example with the rows in a dimension; -1 for images."""
    return (image(), 0) if dim < 0 else (sequence(dim), dim)


@pytest.mark.parametrize("name", APART)
def test_operators_that_keep_rows_apart_are_known(name: str) -> None:
    function, dim = APART[name]
    captured = Captured(function, *example_of(dim))
    assert captured.keeps_apart()
    assert captured.reason() is None


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if number % 9 else [])
        for number, name in enumerate(APART)
        if number % 3 == 0
    ],
)
def test_operators_of_a_decomposed_program_are_known(name: str) -> None:
    function, dim = APART[name]
    assert Captured(function, *example_of(dim), decompose=True).reason() is None


@pytest.mark.parametrize("name", MIXED)
def test_operators_that_mix_rows_are_named(name: str) -> None:
    function, dim, text = MIXED[name]
    captured = Captured(function, *example_of(dim))
    assert text in str(captured.reason())


def drawn_function(seed: int) -> tuple[Function, torch.Tensor, int]:
    """A function of a few operators along drawn dimensions, an example, and the dimension of its rows."""
    choice = random.Random(seed)  # noqa: S311 - no secret
    rank = choice.randint(2, 4)
    dim = choice.randrange(rank)
    shape = [4 if position == dim else choice.choice([2, 3, 5, 6]) for position in range(rank)]
    draws = [(choice.choice(STEPS), choice.random(), choice.random()) for _ in range(choice.randint(2, 6))]

    def function(x: torch.Tensor) -> torch.Tensor:
        for step, first, second in draws:
            x = step(x, int(first * x.dim()), int(second * x.dim()))
        return x

    return function, torch.linspace(-3, 3, torch.Size(shape).numel()).mul(1.7).sin().reshape(shape), dim


STEPS: list[Callable[[torch.Tensor, int, int], torch.Tensor]] = [
    lambda x, d, e: x.transpose(d, e),
    lambda x, d, e: x.movedim(d, e),
    lambda x, d, e: x.flatten(min(d, e), max(d, e)),
    lambda x, d, e: x.reshape(x.shape[0], -1),
    lambda x, d, e: x.reshape(-1, x.shape[-1]),
    lambda x, d, e: x.unsqueeze(d),
    lambda x, d, e: x.mean(d, keepdim=d != e),
    lambda x, d, e: x.softmax(d),
    lambda x, d, e: x.cumsum(d),
    lambda x, d, e: x.flip(d),
    lambda x, d, e: x.narrow(d, 0, 1),
    lambda x, d, e: torch.cat([x, x * 2], d),
    lambda x, d, e: torch.cat([x, -x], d).chunk(2, d)[1],
    lambda x, d, e: torch.stack([x, x.exp()], d),
    lambda x, d, e: x + x.amax(d, keepdim=True),
    lambda x, d, e: x.sort(d).values,
    lambda x, d, e: x.gather(d, (x > 0).long()),
    lambda x, d, e: x.repeat_interleave(2, d),
    lambda x, d, e: x @ x.mT,
    lambda x, d, e: x[torch.arange(x.shape[0])],
    lambda x, d, e: torch.zeros_like(x).index_add(d, torch.tensor([0]), x.narrow(d, 0, 1)),
]


@pytest.mark.parametrize("seed", range(12))
def test_what_the_graph_says_runs_confirm(seed: int) -> None:
    function, example, dim = drawn_function(seed)
    try:
        captured = Captured(function, example, dim)
    except (RuntimeError, IndexError, ValueError):  # the drawn dimensions do not fit
        return
    if captured.reason() is None and captured.result_dim() is not None:
        assert captured.keeps_apart()


def test_dropout_is_no_reason_where_random_operators_are_allowed() -> None:
    captured = Captured(lambda x: functional.dropout(x, training=True), sequence(0), 0)
    assert captured.reason(allow_random=True) is None
    captured = Captured(lambda x: functional.dropout(x, training=True).sum(0), sequence(0), 0)
    assert "sum" in str(captured.reason(allow_random=True))


def test_rows_are_followed_in_any_dimension() -> None:
    captured = Captured(lambda x: x.mean(0), sequence(1), 1)
    graph = captured.graph
    assert mixed_rows([graph], {graph.inputs[0].name: 1}, captured.results) is None
    # Dimension 0 has a fixed size here: a dimension need not be a symbol.
    assert "mean" in str(mixed_rows([graph], {graph.inputs[0].name: 0}, captured.results))


def test_reason_names_the_module() -> None:
    scaled = module_of(lambda self, x: x / x.abs().amax())
    captured = Captured(torch.nn.Sequential(torch.nn.Tanh(), scaled), sequence(0), 0)
    assert captured.reason() == "aten.amax.default in function.1 computes one result from several rows"
