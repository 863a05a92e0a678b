"""Small models over operators whose shapes depend on the sizes of their inputs, for tests at the ends of ranges."""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional

# A model, an example, and for each input the dimensions that change together.
SizedModel = tuple[nn.Module, tuple[Any, ...], tuple[Any, ...]]


class Function(nn.Module):
    """A function of submodules and inputs, between two layers with weights, so that there is something to cut."""

    def __init__(self, function: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: torch.Tensor) -> Any:
        return self.function(self, *args)


class Recurrent(nn.Module):
    """A recurrent layer, and a linear layer on its outputs."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0])


class Attention(nn.Module):
    """Self-attention with a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x, need_weights=False)[0])


class Counter(nn.Module):
    """Writes a buffer at each call."""

    total: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.total += x.sum(0)
        return self.linear(x) + self.total[:3]


def _linears(*sizes: int) -> dict[str, nn.Module]:
    return {f"l{index}": nn.Linear(first, second) for index, (first, second) in enumerate(itertools.pairwise(sizes))}


def _batch(function: Callable[..., Any], *shape: int, **modules: nn.Module) -> SizedModel:
    return Function(function, **modules), (torch.randn(3, *shape),), ({0: "AUTO"},)


def sized_models() -> Mapping[str, SizedModel]:
    """Return the models by name, seeded."""
    torch.manual_seed(0)
    auto, both = {0: "AUTO"}, {0: "AUTO", 1: "AUTO"}
    x34, x348 = torch.randn(3, 4), torch.randn(3, 4, 8)
    image = torch.randn(2, 3, 9, 10)
    ids = torch.randint(0, 7, (3, 5))
    models: dict[str, SizedModel] = {
        "linear": _batch(lambda m, x: m.l1(torch.relu(m.l0(x))), 4, **_linears(4, 8, 2)),
        "conv2d": (
            Function(lambda m, x: m.b(torch.relu(m.a(x))), a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1)),
            (image,),
            ({0: "AUTO", 2: "AUTO", 3: "AUTO"},),
        ),
        "conv2d-padded": (
            Function(lambda m, x: m.b(m.a(x)), a=nn.Conv2d(3, 4, 3, padding=1, stride=2), b=nn.Conv2d(4, 2, 1)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "conv1d-same": (
            Function(lambda m, x: m.a(x), a=nn.Conv1d(4, 2, 3, padding="same")),
            (x348,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "conv-transpose": (
            Function(lambda m, x: m.a(x), a=nn.ConvTranspose2d(3, 2, 2, stride=2)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "max-pool": _batch(lambda m, x: functional.max_pool2d(m.a(x), 2), 3, 8, 8, a=nn.Conv2d(3, 4, 1)),
        "avg-pool-ceil": (
            Function(lambda m, x: functional.avg_pool2d(m.a(x), 2, ceil_mode=True), a=nn.Conv2d(3, 4, 1)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "adaptive-pool": (
            Function(lambda m, x: m.a(functional.adaptive_avg_pool2d(x, 1).flatten(1)), a=nn.Linear(3, 2)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "batch-norm": _batch(lambda m, x: m.b(m.a(x)), 4, a=nn.BatchNorm1d(4), b=nn.Linear(4, 2)),
        "layer-norm": (Function(lambda m, x: m.b(m.a(x)), a=nn.LayerNorm(8), b=nn.Linear(8, 2)), (x348,), (both,)),
        "group-norm": _batch(lambda m, x: m.a(x), 4, 5, a=nn.GroupNorm(2, 4)),
        "rms-norm": (Function(lambda m, x: m.a(x), a=nn.RMSNorm(8)), (x348,), (both,)),
        "attention": (Attention(), (x348,), (both,)),
        "scaled-dot": (
            Function(
                lambda m, x: m.a(functional.scaled_dot_product_attention(x, x, x, is_causal=True)), a=nn.Linear(8, 2)
            ),
            (torch.randn(2, 2, 5, 8),),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "encoder-layer": (nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=True), (x348,), (both,)),
        "encoder": (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
            ),
            (x348,),
            (both,),
        ),
        "lstm": (Recurrent(nn.LSTM(8, 6, batch_first=True)), (x348,), (auto,)),
        "gru": (Recurrent(nn.GRU(8, 6, batch_first=True)), (x348,), (auto,)),
        "rnn-time-first": (Recurrent(nn.RNN(8, 6)), (torch.randn(4, 3, 8),), ({1: "AUTO"},)),
        "embedding": (Function(lambda m, x: m.b(m.a(x)), a=nn.Embedding(7, 4), b=nn.Linear(4, 2)), (ids,), (both,)),
        "embedding-bag": (
            Function(lambda m, x: m.b(m.a(x)), a=nn.EmbeddingBag(7, 4), b=nn.Linear(4, 2)),
            (ids,),
            (both,),
        ),
        "gather": (
            Function(lambda m, x, i: m.a(x).gather(1, i), a=nn.Linear(4, 5)),
            (x34, torch.randint(0, 4, (3, 2))),
            (auto, auto),
        ),
        "scatter": (
            Function(lambda m, x, i: m.a(x).scatter_add(1, i, x), a=nn.Linear(4, 5)),
            (x34, torch.randint(0, 4, (3, 4))),
            (auto, auto),
        ),
        "index-select": (
            Function(lambda m, x, i: m.a(x).index_select(1, i), a=nn.Linear(4, 5)),
            (x34, torch.tensor([0, 2, 1])),
            (auto, auto),
        ),
        "index": (Function(lambda m, x, i: m.a(x)[i], a=nn.Linear(4, 5)), (x34, torch.tensor([0, 2])), (auto, auto)),
        "cumsum": (Function(lambda m, x: m.a(x).cumsum(0), a=nn.Linear(4, 5)), (x34,), (auto,)),
        "flatten": (Function(lambda m, x: m.a(x).flatten(), a=nn.Linear(8, 2)), (x348,), (both,)),
        "reshape-merge": (Function(lambda m, x: m.a(x).reshape(-1, 2), a=nn.Linear(8, 2)), (x348,), (both,)),
        "reshape-split": (
            Function(lambda m, x: m.a(x).reshape(x.shape[0], x.shape[1], 2, -1), a=nn.Linear(8, 4)),
            (x348,),
            (both,),
        ),
        "view-transposed": (
            Function(lambda m, x: m.a(x).transpose(0, 1).reshape(x.shape[1], -1), a=nn.Linear(8, 2)),
            (x348,),
            (both,),
        ),
        "unflatten": (Function(lambda m, x: m.a(x).unflatten(1, (2, 2)), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "cat": (
            Function(lambda m, x, y: torch.cat([m.a(x), m.a(y)]), a=nn.Linear(4, 2)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "stack": (Function(lambda m, x: torch.stack([m.a(x), m.a(x) * 2], 1), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "split": (Function(lambda m, x: m.a(x).split(2, 1), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "chunk": (Function(lambda m, x: m.a(x).chunk(2, -1), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "unfold": (Function(lambda m, x: m.a(x).unfold(1, 2, 1), a=nn.Linear(4, 6)), (x34,), (auto,)),
        "im2col": (
            Function(lambda m, x: m.a(functional.unfold(x, 2).mT), a=nn.Linear(12, 3)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "einsum": (
            Function(lambda m, x: torch.einsum("bij,bkj->bik", m.a(x), m.a(x)), a=nn.Linear(8, 4)),
            (x348,),
            (both,),
        ),
        "interpolate": (
            Function(lambda m, x: functional.interpolate(m.a(x), scale_factor=2), a=nn.Conv2d(3, 2, 1)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "interpolate-half": (
            Function(
                lambda m, x: functional.interpolate(m.a(x), scale_factor=0.5, mode="bilinear"), a=nn.Conv2d(3, 2, 1)
            ),
            (image,),
            ({0: "AUTO"},),
        ),
        "softmax": (Function(lambda m, x: m.a(x).softmax(0), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "topk": (Function(lambda m, x: tuple(m.a(x).topk(2, 1)), a=nn.Linear(4, 5)), (x34,), (auto,)),
        "sort": (Function(lambda m, x: tuple(m.a(x).sort(0)), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "where": (Function(lambda m, x: torch.where(m.a(x) > 0, m.a(x), x), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "pad": (Function(lambda m, x: functional.pad(m.a(x), (1, 2, 1, 0)), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "pad-reflect": (
            Function(lambda m, x: functional.pad(m.a(x), (1, 1), mode="reflect"), a=nn.Linear(8, 4)),
            (x348,),
            (auto,),
        ),
        "masked-fill": (Function(lambda m, x: m.a(x).masked_fill(x > 0, 0.0), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "masked-select": (Function(lambda m, x: m.a(x)[m.a(x) > 0], a=nn.Linear(4, 4)), (x34,), (auto,)),
        "matmul-broadcast": (Function(lambda m, x: m.a(x) @ torch.ones(1, 4, 3), a=nn.Linear(8, 4)), (x348,), (both,)),
        "bmm": (Function(lambda m, x: torch.bmm(m.a(x), m.a(x).mT), a=nn.Linear(8, 4)), (x348,), (both,)),
        "sum-rows": (Function(lambda m, x: m.a(x).sum(0), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "mean-all": (Function(lambda m, x: m.a(x).mean(), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "max-rows": (Function(lambda m, x: m.a(x).amax(0), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "std": (Function(lambda m, x: m.a(x).std(1), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "argmax": (Function(lambda m, x: m.a(x).argmax(-1), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "broadcast-rows": (
            Function(lambda m, x, y: m.a(x) + m.a(y).unsqueeze(1), a=nn.Linear(4, 2)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "expand": (Function(lambda m, x: m.a(x).unsqueeze(0).expand(2, -1, -1), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "repeat": (Function(lambda m, x: m.a(x).repeat(2, 3), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "repeat-interleave": (
            Function(lambda m, x: m.a(x).repeat_interleave(2, 0), a=nn.Linear(4, 2)),
            (x34,),
            (auto,),
        ),
        "roll": (Function(lambda m, x: m.a(x).roll(1, 0), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "flip": (Function(lambda m, x: m.a(x).flip(0), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "arange": (
            Function(lambda m, x: m.a(x) + torch.arange(x.shape[0]).unsqueeze(1), a=nn.Linear(4, 2)),
            (x34,),
            (auto,),
        ),
        "positions": (
            Function(lambda m, x: m.b(m.a(x) + m.a.weight[: x.shape[1]]), a=nn.Embedding(7, 4), b=nn.Linear(4, 2)),
            (ids,),
            (both,),
        ),
        "tril": (Function(lambda m, x: (m.a(x) @ m.a(x).T).tril(), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "squeeze": (Function(lambda m, x: m.a(x).unsqueeze(1).squeeze(1), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "last-row": (Function(lambda m, x: m.a(x)[:, -1], a=nn.Linear(8, 2)), (x348,), (auto,)),
        "from-second": (Function(lambda m, x: m.a(x)[1:], a=nn.Linear(4, 2)), (torch.randn(5, 4),), (auto,)),
        "half": (Function(lambda m, x: m.a(x)[: x.shape[0] // 2], a=nn.Linear(4, 2)), (torch.randn(6, 4),), (auto,)),
        "pixel-shuffle": (
            Function(lambda m, x: functional.pixel_shuffle(m.a(x), 2), a=nn.Conv2d(3, 4, 1)),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "cosine": (Function(lambda m, x: functional.cosine_similarity(m.a(x), x), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "cdist": (
            Function(lambda m, x, y: torch.cdist(m.a(x), m.a(y)), a=nn.Linear(4, 3)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "one-hot": (Function(lambda m, x: m.a(functional.one_hot(x, 7).float()), a=nn.Linear(7, 2)), (ids,), (both,)),
        "glu": (Function(lambda m, x: functional.glu(m.a(x)), a=nn.Linear(4, 4)), (x34,), (auto,)),
        "bilinear": (Function(lambda m, x: m.a(x, x), a=nn.Bilinear(4, 4, 2)), (x34,), (auto,)),
        "grid-sample": (
            Function(
                lambda m, x: functional.grid_sample(m.a(x), x.permute(0, 2, 3, 1)[..., :2], align_corners=False),
                a=nn.Conv2d(3, 2, 1),
            ),
            (image,),
            (auto,),
        ),
        "contiguous": (
            Function(lambda m, x: m.a(x).transpose(0, 1).contiguous().view(-1), a=nn.Linear(8, 2)),
            (x348,),
            (both,),
        ),
        "in-place-view": (
            Function(lambda m, x: m.b(m.a(x).T.reshape(2, -1).add_(1).T), a=nn.Linear(4, 2), b=nn.Linear(2, 2)),
            (x34,),
            (auto,),
        ),
        "dropout-train": (
            Function(lambda m, x: functional.dropout(m.a(x), 0.5, training=True), a=nn.Linear(4, 2)),
            (x34,),
            (auto,),
        ),
        "counter": (Counter(), (x34,), (auto,)),
        "branch-on-one": (
            Function(lambda m, x: m.a(x) * 2 if x.shape[0] == 1 else m.a(x), a=nn.Linear(4, 2)),
            (x34,),
            (auto,),
        ),
        "squeeze-all": (Function(lambda m, x: m.a(x).squeeze(), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "nonzero": (Function(lambda m, x: m.a(x).nonzero(), a=nn.Linear(4, 2)), (x34,), (auto,)),
        "channel-shuffle": (
            Function(
                lambda m, x: m.a(x).view(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2),
                a=nn.Conv2d(3, 4, 1),
            ),
            (image,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
    }
    return {name: (model.eval(), args, dims) for name, (model, args, dims) in models.items()}
