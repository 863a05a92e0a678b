"""Reports on constants, state, aliases, results and values."""

import collections
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from tests.public_faults.report import ANY_ROWS, AUTO, ROWS, report, report_of, values


@report("pytorch/pytorch/issues/118922", "a tensor that is a plain attribute cannot be exported", values(4, 4))
class PlainAttribute(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = values(4, seed=1)

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.bias


@report_of("pytorch/pytorch/issues/130975", "a generator is traced wrongly", torch.ones(1, 1))
def generator(self: Any, x: torch.Tensor) -> Any:
    parts = [x]
    parts.extend(parts[-1] + 2 for _ in range(2))
    return torch.cat(parts, 1)


@report_of(
    "pytorch/pytorch/issues/119180",
    "a number given by keyword is lost",
    values(2, 2, 2),
    kwargs={"bias": 3.0},
    holds=lambda: {"linear": torch.nn.Linear(2, 2)},
)
def number_by_keyword(self: Any, x: torch.Tensor, bias: float | None = None) -> Any:
    return self.linear(x) + bias


@report_of("pytorch/pytorch/issues/130379", "a constant under no_grad cannot be exported", torch.ones(4), torch.ones(4))
def constant_without_gradient(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    with torch.no_grad():
        z = torch.tensor(4) + x + y
    return z * z


@report_of(
    "pytorch/pytorch/issues/180354",
    "a constant that a branch of cond makes is lost",
    values(3),
    calls=((torch.ones(3),), (-torch.ones(3),)),
    onnx=False,
)
def constant_in_branch(self: Any, x: torch.Tensor) -> Any:
    return torch.cond(x.sum() > 0, lambda y: y + torch.tensor(5.0), lambda y: y * torch.tensor([1.0, 2.0, 3.0]), (x,))


@report_of(
    "pytorch/executorch/issues/4042",
    "a buffer that is written twice in a call",
    values(3),
    calls=((values(3, seed=1),), (values(3, seed=2),)),
    onnx=False,
    holds=lambda: {"state": torch.tensor([7.0, 5.0, 6.0])},
)
def written_twice(self: Any, x: torch.Tensor) -> Any:
    self.state.mul_(x)
    self.state.add_(torch.tensor([1.0, 2.0, 3.0]))
    return self.state * 9


@report_of("pytorch/executorch/issues/11700", "an in-place activation changes the results", values(3, 4, 5), onnx=False)
def in_place_activation(self: Any, x: torch.Tensor) -> Any:
    y = functional.relu(x, inplace=True)
    return x + y


@report_of("pytorch/executorch/pull/4785", "an input that is written is not written", torch.ones(1, 4), onnx=False)
def writes_input(self: Any, x: torch.Tensor) -> Any:
    x.mul_(0)
    return x + 1


@report_of(
    "pytorch/executorch/issues/5068",
    "a buffer that is written keeps no initial value",
    values(1, 4),
    calls=((values(1, 4, seed=1),), (values(1, 4, seed=2),)),
    onnx=False,
    holds=lambda: {"cache": values(3, 4)},
)
def cache(self: Any, x: torch.Tensor) -> Any:
    self.cache.copy_(torch.cat([self.cache[1:], x]))
    return self.cache.sum(0)


@report_of(
    "pytorch/pytorch/issues/114967",
    "an element of a buffer that is written is not written",
    torch.ones(3, 5),
    calls=((values(3, 5),),),
    onnx=False,
    holds=lambda: {"cache": torch.zeros(1, 2)},
)
def writes_element(self: Any, x: torch.Tensor) -> Any:
    before = self.cache.clone()
    self.cache[0, 1] = x.sum()
    return x + before.sum(), self.cache.clone()


@report_of(
    "pytorch/pytorch/issues/198101",
    "what was read through a view of another dtype is read again after the input is written",
    torch.arange(-12, 12, dtype=torch.int64).reshape(4, 6),
    allow_ops=("aten.view",),
    onnx=False,
)
def dtype_view(self: Any, x: torch.Tensor) -> Any:
    y = x.view(torch.int32) * 2
    y.sub_(-4)
    x[:, 2:5] = 2
    return y.view(torch.int64)


@report_of(
    "pytorch/pytorch/issues/127357",
    "a weight that is used transposed, too, cannot be exported",
    torch.ones(1, 5),
    holds=lambda: {"encoder": torch.nn.Linear(5, 5, bias=False)},
)
def tied_by_transposing(self: Any, x: torch.Tensor) -> Any:
    return functional.linear(self.encoder(x), self.encoder.weight.t())


@report_of(
    "pytorch/executorch/issues/5265",
    "a convolution answers otherwise after save and load",
    values(1, 1, 64),
    holds=lambda: {"operation": torch.nn.Conv1d(1, 1, 32)},
)
def long_kernel(self: Any, x: torch.Tensor) -> Any:
    return self.operation(x)


@report_of("pytorch/pytorch/issues/197104", "named results of torch cannot be packaged", values(3, 4))
def named_result(self: Any, x: torch.Tensor) -> Any:
    largest = x.topk(2)
    return largest.values, largest.indices, *torch.max(x, 0)


class Pair(NamedTuple):
    """Two tensors."""

    a: torch.Tensor
    b: torch.Tensor


@report_of(
    "pytorch/pytorch/issues/116544", "an input that is a named tuple cannot be used", Pair(values(3, 4), values(3, 4))
)
def takes_pair(self: Any, pair: Pair) -> Any:
    return pair.a + pair.b * 2


@report_of(
    "pytorch/pytorch/issues/145785",
    "tuples in while_loop become lists",
    torch.tensor(3),
    values(2, 3),
    values(2, 3),
    onnx=False,
)
def loop(self: Any, count: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
    from torch._higher_order_ops.while_loop import while_loop

    return while_loop(lambda i, x, y: i > 0, lambda i, x, y: (i - 1, x + y, y - x), (count, a, b))


@report_of("jax-ml/jax/pull/24342", "an ordered dict loses its type", values(2))
def ordered_result(self: Any, x: torch.Tensor) -> Any:
    return collections.OrderedDict(b=x + 1, a=x * 2)


@report_of(
    "pytorch/pytorch/issues/125835",
    "scatter_add overwrites in the place of adding",
    values(10, 4),
    torch.arange(40).reshape(10, 4) % 4,
    values(10, 4, seed=1),
)
def scatter_add(self: Any, data: torch.Tensor, indices: torch.Tensor, updates: torch.Tensor) -> Any:
    return torch.scatter_add(data, 0, indices, updates)


@report_of(
    "microsoft/onnxruntime/issues/12119",
    "rows that are gathered and added by index get other sums",
    values(2, 5, 3),
    torch.tensor([0, 1, 1, 3, 0, 2]),
    torch.tensor([0, 4, 1, 2, 3, 0]),
)
def pool_by_index(self: Any, x: torch.Tensor, row: torch.Tensor, column: torch.Tensor) -> Any:
    gathered = torch.index_select(x, 1, column)
    index = row.unsqueeze(0).unsqueeze(-1).expand_as(gathered)
    return torch.scatter_add(torch.zeros(x.size(0), 4, x.size(-1)), 1, index, gathered)


@report_of(
    "onnx/onnx/issues/3192",
    "index -1 is refused where it is the last row",
    values(4, 3),
    torch.tensor([0, -1]),
    calls=((values(4, 3), torch.tensor([-4, 2])),),
)
def negative_indices(self: Any, x: torch.Tensor, indices: torch.Tensor) -> Any:
    written = x.clone()
    written[indices] = 1.5
    return written, x[indices]


@report_of(
    "pytorch/pytorch/issues/186146",
    "masked_scatter writes its values in another order",
    torch.zeros(1, 8, 4),
    torch.tensor([[True] * 4 + [False] * 4]),
    torch.arange(16.0).reshape(4, 4) + 1,
)
def masked_scatter(self: Any, x: torch.Tensor, mask: torch.Tensor, inserted: torch.Tensor) -> Any:
    return x.masked_scatter(mask.unsqueeze(-1), inserted) * torch.arange(1.0, 5.0)


@report_of(
    "microsoft/onnxscript/pull/2479",
    "a row of attention whose mask hides all is NaN in the place of zeros",
    values(2, 2, 4, 8),
    values(2, 2, 4, 8, seed=1),
    torch.ones(2, 1, 4, 4).bool().index_fill(2, torch.tensor([0]), False),
)
def masked_attention(self: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> Any:
    return functional.scaled_dot_product_attention(query, key, key, attn_mask=mask)


@report_of(
    "microsoft/onnxruntime/issues/13798",
    "a mean over what a mask shows is NaN",
    values(2, 5, 3),
    torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 1]]),
    dims=({0: ROWS, 1: AUTO}, {0: ROWS, 1: AUTO}),
    calls=((values(1, 3, 3), torch.tensor([[1, 0, 1]])),),
)
def masked_mean(self: Any, x: torch.Tensor, mask: torch.Tensor) -> Any:
    return (x * mask.unsqueeze(2)).sum(1) / mask.sum(1).unsqueeze(1)


@report(
    "pytorch/pytorch/issues/86120",
    "an encoder layer with padding answers otherwise in evaluation mode",
    values(2, 5, 8),
    kwargs={"src_key_padding_mask": torch.tensor([[False] * 5, [False] * 3 + [True] * 2])},
    onnx=False,
)
def encoder_layer() -> torch.nn.Module:
    """Not frozen, so that the model takes the same path as its capture."""
    torch.manual_seed(0)
    return torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)


@report(
    "pytorch/pytorch/issues/184996",
    "a parameter whose storage is too small is exported, and fails when it is saved",
    torch.ones(1, 4),
    refused="storage",
)
def emptied() -> torch.nn.Module:
    """A linear layer without the memory of its weight."""
    layer = torch.nn.Linear(4, 4)
    layer.weight.data.untyped_storage().resize_(0)
    return layer


@report(
    "pytorch/pytorch/issues/136846",
    "in-place activations behind convolutions cannot be exported",
    values(2, 3, 8, 8),
    dims={"input": {0: ANY_ROWS}},
    calls=((values(3, 3, 8, 8),),),
)
def generator_network() -> torch.nn.Module:
    """Layers of a generator of pictures."""
    torch.manual_seed(0)
    layers = (torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(inplace=True), torch.nn.ConvTranspose2d(4, 3, 3))
    return torch.nn.Sequential(*layers, torch.nn.LeakyReLU(0.2, inplace=True)).eval()
