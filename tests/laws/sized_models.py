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


def _rows(function: Callable[..., Any], size: int = 0, **modules: nn.Module) -> SizedModel:
    """A function of rows of 4 numbers, with a layer ``a`` of a size, or other modules."""
    return Function(function, **(modules or {"a": nn.Linear(4, size)})), (torch.randn(3, 4),), ({0: "AUTO"},)


def _tokens(function: Callable[..., Any], size: int = 0, **modules: nn.Module) -> SizedModel:
    """A function of a batch of sequences of 8 numbers, with a layer ``a`` of a size, or other modules."""
    model = Function(function, **(modules or {"a": nn.Linear(8, size)}))
    return model, (torch.randn(3, 4, 8),), ({0: "AUTO", 1: "AUTO"},)


def _images(function: Callable[..., Any], *further_axes: int, **modules: nn.Module) -> SizedModel:
    """A function of a batch of images, whose height and perhaps width may change."""
    axes = dict.fromkeys((0, 2, *further_axes), "AUTO")
    return Function(function, **modules), (torch.randn(2, 3, 9, 10),), (axes,)


def sized_models() -> Mapping[str, SizedModel]:
    """Return the models by name, seeded."""
    torch.manual_seed(0)
    auto, both = {0: "AUTO"}, {0: "AUTO", 1: "AUTO"}
    x34, x348 = torch.randn(3, 4), torch.randn(3, 4, 8)
    image = torch.randn(2, 3, 9, 10)
    ids = torch.randint(0, 7, (3, 5))
    models: dict[str, SizedModel] = {
        "linear": _batch(lambda m, x: m.l1(torch.relu(m.l0(x))), 4, **_linears(4, 8, 2)),
        "conv2d": _images(lambda m, x: m.b(torch.relu(m.a(x))), 3, a=nn.Conv2d(3, 4, 3), b=nn.Conv2d(4, 2, 1)),
        "conv2d-padded": _images(
            lambda m, x: m.b(m.a(x)), a=nn.Conv2d(3, 4, 3, padding=1, stride=2), b=nn.Conv2d(4, 2, 1)
        ),
        "conv1d-same": (
            Function(lambda m, x: m.a(x), a=nn.Conv1d(4, 2, 3, padding="same")),
            (x348,),
            ({0: "AUTO", 2: "AUTO"},),
        ),
        "conv-transpose": _images(lambda m, x: m.a(x), a=nn.ConvTranspose2d(3, 2, 2, stride=2)),
        "max-pool": _batch(lambda m, x: functional.max_pool2d(m.a(x), 2), 3, 8, 8, a=nn.Conv2d(3, 4, 1)),
        "avg-pool-ceil": _images(lambda m, x: functional.avg_pool2d(m.a(x), 2, ceil_mode=True), a=nn.Conv2d(3, 4, 1)),
        "adaptive-pool": _images(lambda m, x: m.a(functional.adaptive_avg_pool2d(x, 1).flatten(1)), a=nn.Linear(3, 2)),
        "batch-norm": _batch(lambda m, x: m.b(m.a(x)), 4, a=nn.BatchNorm1d(4), b=nn.Linear(4, 2)),
        "layer-norm": _tokens(lambda m, x: m.b(m.a(x)), a=nn.LayerNorm(8), b=nn.Linear(8, 2)),
        "group-norm": _batch(lambda m, x: m.a(x), 4, 5, a=nn.GroupNorm(2, 4)),
        "rms-norm": _tokens(lambda m, x: m.a(x), a=nn.RMSNorm(8)),
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
        "cumsum": _rows(lambda m, x: m.a(x).cumsum(0), 5),
        "flatten": _tokens(lambda m, x: m.a(x).flatten(), 2),
        "reshape-merge": _tokens(lambda m, x: m.a(x).reshape(-1, 2), 2),
        "reshape-split": _tokens(lambda m, x: m.a(x).reshape(x.shape[0], x.shape[1], 2, -1), 4),
        "view-transposed": _tokens(lambda m, x: m.a(x).transpose(0, 1).reshape(x.shape[1], -1), 2),
        "unflatten": _rows(lambda m, x: m.a(x).unflatten(1, (2, 2)), 4),
        "cat": (
            Function(lambda m, x, y: torch.cat([m.a(x), m.a(y)]), a=nn.Linear(4, 2)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "stack": _rows(lambda m, x: torch.stack([m.a(x), m.a(x) * 2], 1), 2),
        "split": _rows(lambda m, x: m.a(x).split(2, 1), 4),
        "chunk": _rows(lambda m, x: m.a(x).chunk(2, -1), 4),
        "unfold": _rows(lambda m, x: m.a(x).unfold(1, 2, 1), 6),
        "im2col": _images(lambda m, x: m.a(functional.unfold(x, 2).mT), a=nn.Linear(12, 3)),
        "einsum": _tokens(lambda m, x: torch.einsum("bij,bkj->bik", m.a(x), m.a(x)), 4),
        "interpolate": _images(lambda m, x: functional.interpolate(m.a(x), scale_factor=2), a=nn.Conv2d(3, 2, 1)),
        "interpolate-half": (
            Function(
                lambda m, x: functional.interpolate(m.a(x), scale_factor=0.5, mode="bilinear"), a=nn.Conv2d(3, 2, 1)
            ),
            (image,),
            ({0: "AUTO"},),
        ),
        "softmax": _rows(lambda m, x: m.a(x).softmax(0), 2),
        "topk": _rows(lambda m, x: tuple(m.a(x).topk(2, 1)), 5),
        "sort": _rows(lambda m, x: tuple(m.a(x).sort(0)), 2),
        "where": _rows(lambda m, x: torch.where(m.a(x) > 0, m.a(x), x), 4),
        "pad": _rows(lambda m, x: functional.pad(m.a(x), (1, 2, 1, 0)), 4),
        "pad-reflect": (
            Function(lambda m, x: functional.pad(m.a(x), (1, 1), mode="reflect"), a=nn.Linear(8, 4)),
            (x348,),
            (auto,),
        ),
        "masked-fill": _rows(lambda m, x: m.a(x).masked_fill(x > 0, 0.0), 4),
        "masked-select": _rows(lambda m, x: m.a(x)[m.a(x) > 0], 4),
        "matmul-broadcast": _tokens(lambda m, x: m.a(x) @ torch.ones(1, 4, 3), 4),
        "bmm": _tokens(lambda m, x: torch.bmm(m.a(x), m.a(x).mT), 4),
        "sum-rows": _rows(lambda m, x: m.a(x).sum(0), 4),
        "mean-all": _rows(lambda m, x: m.a(x).mean(), 4),
        "max-rows": _rows(lambda m, x: m.a(x).amax(0), 4),
        "std": _rows(lambda m, x: m.a(x).std(1), 4),
        "argmax": _rows(lambda m, x: m.a(x).argmax(-1), 4),
        "broadcast-rows": (
            Function(lambda m, x, y: m.a(x) + m.a(y).unsqueeze(1), a=nn.Linear(4, 2)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "expand": _rows(lambda m, x: m.a(x).unsqueeze(0).expand(2, -1, -1), 2),
        "repeat": _rows(lambda m, x: m.a(x).repeat(2, 3), 2),
        "repeat-interleave": _rows(lambda m, x: m.a(x).repeat_interleave(2, 0), 2),
        "roll": _rows(lambda m, x: m.a(x).roll(1, 0), 2),
        "flip": _rows(lambda m, x: m.a(x).flip(0), 2),
        "arange": _rows(lambda m, x: m.a(x) + torch.arange(x.shape[0]).unsqueeze(1), 2),
        "positions": (
            Function(lambda m, x: m.b(m.a(x) + m.a.weight[: x.shape[1]]), a=nn.Embedding(7, 4), b=nn.Linear(4, 2)),
            (ids,),
            (both,),
        ),
        "tril": _rows(lambda m, x: (m.a(x) @ m.a(x).T).tril(), 2),
        "squeeze": _rows(lambda m, x: m.a(x).unsqueeze(1).squeeze(1), 2),
        "last-row": (Function(lambda m, x: m.a(x)[:, -1], a=nn.Linear(8, 2)), (x348,), (auto,)),
        "from-second": (Function(lambda m, x: m.a(x)[1:], a=nn.Linear(4, 2)), (torch.randn(5, 4),), (auto,)),
        "half": (Function(lambda m, x: m.a(x)[: x.shape[0] // 2], a=nn.Linear(4, 2)), (torch.randn(6, 4),), (auto,)),
        "pixel-shuffle": _images(lambda m, x: functional.pixel_shuffle(m.a(x), 2), a=nn.Conv2d(3, 4, 1)),
        "cosine": _rows(lambda m, x: functional.cosine_similarity(m.a(x), x), 4),
        "cdist": (
            Function(lambda m, x, y: torch.cdist(m.a(x), m.a(y)), a=nn.Linear(4, 3)),
            (x34, torch.randn(5, 4)),
            (auto, auto),
        ),
        "one-hot": (Function(lambda m, x: m.a(functional.one_hot(x, 7).float()), a=nn.Linear(7, 2)), (ids,), (both,)),
        "glu": _rows(lambda m, x: functional.glu(m.a(x)), 4),
        "bilinear": _rows(lambda m, x: m.a(x, x), a=nn.Bilinear(4, 4, 2)),
        "grid-sample": (
            Function(
                lambda m, x: functional.grid_sample(m.a(x), x.permute(0, 2, 3, 1)[..., :2], align_corners=False),
                a=nn.Conv2d(3, 2, 1),
            ),
            (image,),
            (auto,),
        ),
        "contiguous": _tokens(lambda m, x: m.a(x).transpose(0, 1).contiguous().view(-1), 2),
        "in-place-view": _rows(
            lambda m, x: m.b(m.a(x).T.reshape(2, -1).add_(1).T), a=nn.Linear(4, 2), b=nn.Linear(2, 2)
        ),
        "dropout-train": _rows(lambda m, x: functional.dropout(m.a(x), 0.5, training=True), 2),
        "counter": (Counter(), (x34,), (auto,)),
        "branch-on-one": _rows(lambda m, x: m.a(x) * 2 if x.shape[0] == 1 else m.a(x), 2),
        "squeeze-all": _rows(lambda m, x: m.a(x).squeeze(), 2),
        "nonzero": _rows(lambda m, x: m.a(x).nonzero(), 2),
        "channel-shuffle": _images(
            lambda m, x: m.a(x).view(x.shape[0], 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2), a=nn.Conv2d(3, 4, 1)
        ),
    }
    return {name: (model.eval(), args, dims) for name, (model, args, dims) in models.items()}
