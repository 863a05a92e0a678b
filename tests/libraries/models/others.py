"""Graph networks of torch_geometric, recommendation, recurrent layers of torch, quantized models of torchao."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from stagepack.capture.inputs import Inputs
from tests.libraries.case import Make, MakeInputs, batch_of, made, table
from tests.zoo.architectures.build import BATCH

_NODES, _EDGES = Dim("nodes", min=4, max=200), Dim("edges", min=2, max=1000)


def _graph(**more: Callable[[], torch.Tensor]) -> MakeInputs:
    """Features of 6 nodes, and 10 edges between them, any number of both."""

    def make_inputs() -> Inputs:
        kwargs = {"x": torch.randn(6, 8), "edge_index": torch.randint(0, 6, (2, 10))}
        edges = {name: make() for name, make in more.items()}
        shapes: dict[str, Any] = {"x": {0: _NODES}, "edge_index": {1: _EDGES}, **{name: {0: _EDGES} for name in edges}}
        return Inputs(kwargs={**kwargs, **edges}, dynamic_shapes=shapes)

    return make_inputs


def _model(name: str, **more: Any) -> Make:
    return made(f"torch_geometric.nn:{name}", in_channels=8, hidden_channels=16, num_layers=3, out_channels=4, **more)


def _sequential(signature: str, *layers: Any) -> Make:
    def make() -> Any:
        from torch_geometric import nn as geometric

        return geometric.Sequential(signature, [*layers])

    return make


class Dlrm(nn.Module):
    """The recommendation model of Naumov et al., https://arxiv.org/abs/1906.00091: embedding bags, and the products of all pairs."""

    def __init__(self, rows: Sequence[int] = (30, 20, 50, 10), width: int = 8, dense: int = 6) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(count, width, mode="sum") for count in rows)
        self.bottom = nn.Sequential(nn.Linear(dense, 16), nn.ReLU(), nn.Linear(16, width), nn.ReLU())
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 16), nn.ReLU(), nn.Linear(16, 1), nn.Sigmoid())

    def forward(self, dense: torch.Tensor, sparse: list[torch.Tensor]) -> torch.Tensor:
        x = self.bottom(dense)
        features = [x, *(bag(ids) for bag, ids in zip(self.bags, sparse, strict=True))]
        stacked = torch.stack(features, dim=1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(len(features), len(features), offset=-1)
        click: torch.Tensor = self.top(torch.cat([x, products[:, row, column]], dim=1))
        return click


def _clicks() -> Inputs:
    """Any batch; each row has as many ids of each table."""
    counts = [Dim(f"ids_{number}", min=1, max=100) for number in range(4)]
    kwargs = {"dense": torch.randn(2, 6), "sparse": [torch.randint(0, 10, (2, 3 + number)) for number in range(4)]}
    shapes = {"dense": {0: BATCH}, "sparse": [{0: BATCH, 1: count} for count in counts]}
    return Inputs(kwargs=kwargs, dynamic_shapes=shapes)


class Recurrent(nn.Module):
    """Token ids, a recurrent layer, and a projection of what it gives."""

    def __init__(self, layer: nn.Module, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layer = layer
        self.project = nn.Linear(width, 64)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.layer(self.embed(tokens))
        logits: torch.Tensor = self.project(hidden)
        return logits


def _recurrent(layer: Any, **sizes: Any) -> Make:
    return lambda: Recurrent(layer(8, 16, batch_first=True, **sizes), 32 if sizes.get("bidirectional") else 16)


def _any_batch() -> Inputs:
    return Inputs(args=(torch.randint(0, 64, (2, 9)),), dynamic_shapes=({0: BATCH},))


def _any_length() -> Inputs:
    shapes = ({0: BATCH, 1: Dim("length", min=2, max=100)},)
    return Inputs(args=(torch.randint(0, 64, (2, 9)),), dynamic_shapes=shapes)


_INT4 = torch.int4  # type: ignore[attr-defined]


class Feed(nn.Module):
    """Layers that torchao quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64)) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


def _quantized(config: str, **options: Any) -> Make:
    def make() -> nn.Module:
        from torchao import quantization

        model = Feed().eval().to(options.pop("of", torch.float32))
        values = {name: value() if callable(value) else value for name, value in options.items()}
        quantization.quantize_(model, getattr(quantization, config)(**values))
        return model

    return make


CASES = table(
    "torch_geometric",
    {
        "gcn": (_model("GCN"), _graph()),
        "gcn-weighted": (_model("GCN"), _graph(edge_weight=lambda: torch.rand(10))),
        "gat": (_model("GAT", heads=2), _graph()),
        "gatv2": (_model("GAT", heads=2, v2=True), _graph()),
        "graphsage": (_model("GraphSAGE"), _graph()),
        "gin": (_model("GIN"), _graph()),
        "pna": (
            _model(
                "PNA",
                aggregators=["mean", "max", "std"],
                scalers=["identity", "amplification"],
                deg=torch.tensor([1, 2, 3]),
            ),
            _graph(),
        ),
        "edge-cnn": (_model("EdgeCNN"), _graph()),
    },
)
CASES += table(
    "torch",
    {
        "dlrm": (Dlrm, _clicks),
        "lstm": (_recurrent(nn.LSTM, num_layers=2), _any_batch),
        "lstm-bidirectional": (_recurrent(nn.LSTM, bidirectional=True), _any_batch),
        "gru": (_recurrent(nn.GRU, num_layers=2), _any_batch),
        "lstm-any-length": (_recurrent(nn.LSTM), _any_length),
        "gru-any-length": (_recurrent(nn.GRU), _any_length),
    },
)
CASES += table(
    "torchao",
    {
        "int8-weight-only": (_quantized("Int8WeightOnlyConfig"), batch_of((64,))),
        "int8-dynamic": (_quantized("Int8DynamicActivationInt8WeightConfig"), batch_of((64,))),
        "float8-weight-only": (_quantized("Float8WeightOnlyConfig"), batch_of((64,))),
        "int4-weight-only": (_quantized("IntxWeightOnlyConfig", weight_dtype=_INT4), batch_of((64,))),
        "int8-dynamic-int4-weight": (
            _quantized("Int8DynamicActivationIntxWeightConfig", weight_dtype=_INT4),
            batch_of((64,)),
        ),
    },
    operators="torchao.quantization",
)
