"""Reports on dynamic sizes: 0, 1, sizes that depend on each other, conditions on sizes."""

from typing import Any

import torch
from torch.export import Dim
from torch.nn import functional

from tests.public_faults.report import ANY_ROWS, AUTO, ROWS, report, report_of, values


@report_of(
    "pytorch/pytorch/issues/126607",
    "view(x.size(1), -1) with one dynamic dimension fails",
    values(8, 6, 4),
    dims={"x": {0: AUTO}},
    calls=((values(3, 6, 4),), (values(1, 6, 4),)),
)
def view_by_size(self: Any, x: torch.Tensor) -> Any:
    return torch.softmax(x.view(x.size(1), -1), dim=0)


@report_of(
    "pytorch/pytorch/issues/171618",
    "a table that is cut to the length and expanded to the batch keeps the sizes of the example",
    values(2, 5),
    dims={"x": {0: ROWS, 1: Dim("length", min=1, max=10)}},
    calls=((values(1, 10),), (values(3, 1),), (values(1, 1),)),
    holds=lambda: {"table": torch.nn.Parameter(values(1, 10, 8)), "scale": torch.nn.Parameter(values(8))},
)
def positions(self: Any, x: torch.Tensor) -> Any:
    return self.table[:, : x.size(1), :].expand(x.size(0), -1, -1) * self.scale


@report_of(
    "pytorch/pytorch/issues/124625",
    "einsum answers at the size of the example only",
    values(3, 2, 4),
    dims={"x": {0: AUTO}},
    calls=((values(7, 2, 4),), (values(1, 2, 4),)),
    holds=lambda: {"weight": torch.nn.Parameter(values(5, 2, 3)), "basis": torch.nn.Parameter(values(3, 4, 4))},
)
def einsum(self: Any, x: torch.Tensor) -> Any:
    return torch.einsum("yxa,aij,bxj->byi", self.weight, self.basis, x)


@report(
    "pytorch/pytorch/issues/133653",
    "a dynamic batch of a convolution is inferred to be the constant of the example",
    values(2, 3, 8, 8),
    dims={"x": {0: AUTO}},
    calls=((values(1, 3, 8, 8),), (values(11, 3, 8, 8),)),
)
class Convolutions(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = torch.nn.Conv2d(3, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
        self.eval()

    def forward(self, x: torch.Tensor) -> Any:
        return functional.adaptive_avg_pool2d(torch.relu(self.norm(self.first(x))), 1).flatten(1)


@report_of(
    "pytorch/pytorch/issues/118289",
    "kernels of the CPU limit a dynamic batch to less than 16",
    values(3, 3, 8, 8),
    dims={"x": {0: ROWS}},
    calls=((values(1, 3, 8, 8),), (values(16, 3, 8, 8),), (values(40, 3, 8, 8),)),
    holds=lambda: {"convolution": torch.nn.Conv2d(3, 4, 3)},
)
def one_convolution(self: Any, x: torch.Tensor) -> Any:
    return self.convolution(x)


@report_of(
    "pytorch/pytorch/issues/151094",
    "reshape([batch, -1]) adds a condition that fails at other sizes",
    values(4, 8, 5),
    dims={"x": {0: AUTO, 1: AUTO}},
    calls=((values(2, 8, 5),), (values(4, 3, 5),), (values(1, 1, 5),)),
)
def reshape_to_rows(self: Any, x: torch.Tensor) -> Any:
    return x.reshape([x.shape[0], -1]) * 2


@report_of(
    "pytorch/pytorch/issues/181097",
    "a size that is five times another one refuses size 1",
    values(20),
    values(4),
    dims=({0: 5 * Dim("parts", min=1, max=8)}, {0: Dim("parts", min=1, max=8)}),
    calls=((values(10), values(2)), (values(40), values(8))),
)
def five_parts(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    parts = x.view(5, -1)
    return [parts[index] - y for index in range(5)]


@report_of(
    "pytorch/pytorch/issues/146315",
    "x + y[::2] fails with sizes that are declared",
    values(4),
    values(8),
    dims=({0: AUTO}, {0: AUTO}),
    calls=((values(3), values(6)), (values(3), values(5)), (values(5), values(10))),
)
def each_second(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + y[::2]


@report_of(
    "pytorch/pytorch/issues/139408",
    "y.reshape(x.shape) ignores the condition on the number of elements",
    values(4, 4),
    values(2, 8),
    dims=({0: None, 1: None}, {0: AUTO, 1: AUTO}),
    calls=((values(4, 4), values(2, 8)), (values(4, 4), values(8, 2)), (values(4, 4), values(2, 7))),
)
def reshape_as_other(self: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
    return x + y.reshape(x.shape)


@report_of(
    "pytorch/pytorch/issues/157621",
    "a model exported at one size is used at batches of 1 to 10",
    values(2, 3, 6, 6),
    dims={"x": {0: Dim("rows", min=1, max=10)}},
    calls=tuple((values(rows, 3, 6, 6),) for rows in (1, 2, 3, 10)),
    holds=lambda: {"first": torch.nn.Conv2d(3, 3, 3, padding=1), "second": torch.nn.Conv2d(3, 3, 3, padding=1)},
)
def residual(self: Any, x: torch.Tensor) -> Any:
    return torch.relu(x + self.second(torch.relu(self.first(x)))).mean((2, 3))


@report_of(
    "microsoft/onnxruntime/issues/1879",
    "a batch of nothing between two stages ends the process",
    values(3, 4),
    dims={"x": {0: ANY_ROWS}},
    calls=((values(0, 4),), (values(1, 4),)),
    holds=lambda: {"first": torch.nn.Linear(4, 8), "second": torch.nn.Linear(8, 2)},
)
def two_layers(self: Any, x: torch.Tensor) -> Any:
    return self.second(torch.relu(self.first(x)))


@report_of(
    "microsoft/onnxruntime/issues/4559",
    "a linear layer on no boxes ends the process",
    values(1, 19, 10),
    dims={"features": {1: Dim("boxes", min=0, max=64)}},
    calls=((values(1, 0, 10),), (values(1, 1, 10),)),
    holds=lambda: {"embedding": torch.nn.Linear(10, 6)},
)
def box_features(self: Any, features: torch.Tensor) -> Any:
    return self.embedding(features)


@report_of(
    "microsoft/onnxruntime/issues/20026",
    "Reshape beside ReduceMax fails for an input of [0, 1]",
    values(3, 2),
    dims={"x": {0: ANY_ROWS}},
    calls=((values(0, 2),), (values(5, 2),)),
)
def largest_of_row(self: Any, x: torch.Tensor) -> Any:
    return x.reshape(x.shape[0], 1, 2).amax(2).reshape(-1)


@report_of(
    "microsoft/onnxruntime/issues/187",
    "Tile with 0 repeats ends the process",
    values(2, 3),
    values(4),
    dims=(None, {0: Dim("times", min=0, max=8)}),
    calls=((values(2, 3), values(0)), (values(2, 3), values(1))),
)
def repeat_by_size(self: Any, x: torch.Tensor, like: torch.Tensor) -> Any:
    return x.repeat(like.shape[0], 1)


@report_of(
    "microsoft/onnxruntime/issues/1360",
    "sequences of other lengths get the sizes of the example",
    values(3, 6, 4),
    dims={"x": {0: ROWS, 1: Dim("length", min=1, max=16)}},
    calls=((values(1, 14, 4),), (values(5, 1, 4),)),
    holds=lambda: {"recurrent": torch.nn.LSTM(4, 3, batch_first=True)},
)
def sequences(self: Any, x: torch.Tensor) -> Any:
    return self.recurrent(x.reshape(x.shape[0], -1, 4))[0]


@report_of(
    "onnx/onnx/issues/4673",
    "a bidirectional LSTM below a linear layer changes its shape",
    values(2, 5, 3),
    dims={"x": {0: ROWS}},
    calls=((values(1, 5, 3),), (values(4, 5, 3),)),
    holds=lambda: {
        "recurrent": torch.nn.LSTM(3, 4, bidirectional=True, batch_first=True),
        "linear": torch.nn.Linear(8, 4),
    },
)
def bidirectional(self: Any, x: torch.Tensor) -> Any:
    return self.linear(self.recurrent(x)[0])


@report_of(
    "pytorch/pytorch/issues/42653",
    "adaptive pooling fails where the output is no factor of the input",
    values(1, 2, 12, 12),
    dims={"x": {2: Dim("height", min=1, max=32), 3: Dim("width", min=1, max=32)}},
    calls=((values(1, 2, 14, 9),), (values(1, 2, 5, 32),), (values(1, 2, 1, 1),)),
)
def adaptive_pooling(self: Any, x: torch.Tensor) -> Any:
    return functional.adaptive_avg_pool2d(x, (7, 5))


@report(
    "pytorch/pytorch/issues/140011",
    "a causal mask that is cut to the length makes the length a constant",
    values(2, 6, 8),
    # The whole buffer is a length of its own: torch refuses a range up to 16.
    dims={"x": {0: ROWS, 1: Dim("length", min=1, max=15)}},
    calls=((values(1, 15, 8),), (values(3, 1, 8),)),
)
class CausalMask(torch.nn.Module):
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.full((16, 16), float("-inf")).triu(1), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        length = x.shape[-2]
        return torch.softmax(x @ x.transpose(1, 2) + self.mask[:length, :length], -1) @ x
