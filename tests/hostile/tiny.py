"""The model whose bundles the hostile tests and the tests of the command damage and run: three stages, all kinds of files."""

from pathlib import Path

import torch

import stagepack

BATCH = torch.export.Dim("batch", min=1, max=64)


class Tiny(torch.nn.Module):
    """Embeds, mixes, counts its calls, and reads out with the tied embedding; the middle has text among its arguments."""

    calls: torch.Tensor
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.first = torch.nn.Linear(4, 8)
        self.second = torch.nn.Linear(8, 4)
        self.head = torch.nn.Linear(4, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("scale", torch.full((4,), 0.5), persistent=False)

    def forward(self, ids: torch.Tensor, temperature: float = 2.0) -> dict[str, torch.Tensor]:
        """Return the logits and the number of calls so far."""
        hidden = torch.nn.functional.gelu(self.first(self.embed(ids)), approximate="tanh")
        hidden = self.second(hidden) * self.scale
        self.calls.add_(1)
        return {"logits": self.head(hidden) / temperature, "calls": self.calls * 1}


def tiny() -> tuple[Tiny, stagepack.Inputs]:
    """The model with its example; the same weights each time, whatever the caller's random state is."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Tiny().eval()
    ids = torch.arange(6).reshape(2, 3)
    return model, stagepack.Inputs(args=(ids,), dynamic_shapes={"ids": {0: BATCH}})


def write_tiny(out: Path, *, overwrite: bool = False) -> Path:
    """Export the model to `out` in three stages."""
    model, inputs = tiny()
    stagepack.export(
        model,
        tuple(inputs.args),
        out=out,
        split_at=["first", "second"],
        dynamic_shapes=inputs.dynamic_shapes,
        overwrite=overwrite,
    )
    return out
