"""A model of two functions, as the user of `stagepack export` writes it."""

import torch

import stagepack


class Translator(torch.nn.Module):
    """Encodes and decodes with one embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, 8)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4))

    def encode(self, ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layers[1](self.layers[0](self.embed(ids)).relu())
        return hidden

    def decode(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.layers[3](self.layers[2](hidden).relu()) @ self.embed.weight.T
        return logits


def translator() -> tuple["Translator", dict[str, stagepack.Inputs]]:
    torch.manual_seed(0)
    rows = torch.export.Dim("rows", min=1, max=64)
    return Translator(), {
        "encode": stagepack.Inputs(args=(torch.arange(6).reshape(2, 3),), dynamic_shapes={"ids": {0: rows}}),
        "decode": stagepack.Inputs(args=(torch.randn(2, 3, 8),), dynamic_shapes={"hidden": {0: rows}}),
    }
