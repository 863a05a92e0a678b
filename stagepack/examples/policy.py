"""A policy that learns by REINFORCE, and ships each step to the server that answers its rollouts.

The policy is a small causal language model, which is rewarded for counting: each token should be the one before plus one. Run
``stagepack export stagepack.examples.policy:make --inputs stagepack.examples.policy:inputs -o policy.stagepack --stages 2``, then
``stagepack serve policy.stagepack --processes 2 --update-folder deltas --model-control explicit``, and beside it
``python -m stagepack.examples.policy policy.stagepack deltas``.
"""

import argparse
import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import stagepack

TOKENS, LENGTH, WIDTH = 12, 8, 32
ROWS = 64  # of a rollout
# A chain has at most 64 deltas. The bundle that runs is written before, and later deltas are on it.
CHAIN = 16
_SHOWN_STEPS = 8


class Layer(torch.nn.Module):
    """Causal attention of two heads, and a feed-forward part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mixed = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = torch.nn.Sequential(
            torch.nn.LayerNorm(WIDTH),
            torch.nn.Linear(WIDTH, 2 * WIDTH),
            torch.nn.GELU(),
            torch.nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Take and return `[rows, length, WIDTH]`."""
        heads = self.mixed(self.norm(x)).unflatten(-1, (3, 2, WIDTH // 2)).transpose(1, 3)
        query, key, value = heads.unbind(2)
        attended = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + attended.transpose(1, 2).flatten(2)
        result: torch.Tensor = x + self.feed(x)
        return result


class Policy(torch.nn.Module):
    """A causal language model."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = torch.nn.Embedding(TOKENS, WIDTH), torch.nn.Embedding(LENGTH, WIDTH)
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take `[rows, length]`; return the logits of each next token, `[rows, length, TOKENS]`."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def make() -> torch.nn.Module:
    """The policy. Its weights are random."""
    torch.manual_seed(0)
    return Policy()


def inputs() -> stagepack.Inputs:
    """Tokens: 4 rows of 3, of any number up to 512 and up to `LENGTH`."""
    shapes = {0: torch.export.Dim("rows", min=1, max=512), 1: torch.export.Dim("length", min=1, max=LENGTH)}
    return stagepack.Inputs(args=(torch.zeros(4, 3, dtype=torch.int64),), dynamic_shapes={"tokens": shapes})


@dataclass(frozen=True)
class Server:
    """A model of a server, by the Open Inference Protocol.

    Attributes:
        address: ``HOST:PORT`` of its REST endpoint.
        model: the name of the model.
    """

    address: str
    model: str

    def logits(self, tokens: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Return what the policy of the server answers, and the version of its weights."""
        given = {"name": "tokens", "shape": list(tokens.shape), "datatype": "INT64", "data": tokens.flatten().tolist()}
        answer = self._post(f"models/{self.model}/infer", {"inputs": [given]})
        [output] = answer["outputs"]
        return torch.tensor(output["data"]).reshape(output["shape"]), answer["parameters"]["weight_version"]

    def update(self, source: str, version: str) -> None:
        """Let the server go on with a delta or a bundle of its folder."""
        parameters = {"source": source, "weight_version": version}
        self._post(f"repository/models/{self.model}/update", {"parameters": parameters})

    def _post(self, path: str, content: object) -> Any:
        request = urllib.request.Request(f"http://{self.address}/v2/{path}", json.dumps(content).encode())
        with urllib.request.urlopen(request) as answer:  # noqa: S310 - its scheme is http
            return json.load(answer)


def roll_out(server: Server, version: str, random: torch.Generator) -> torch.Tensor:
    """Sample texts from the server, which must answer with the weights of one version; return `[ROWS, LENGTH]`."""
    tokens = torch.randint(TOKENS, (ROWS, 1), generator=random)
    while tokens.shape[1] < LENGTH:
        logits, found = server.logits(tokens)
        if found != version:
            raise RuntimeError(f"expected an answer of the version {version}, found one of {found}")
        drawn = torch.multinomial(logits[:, -1].softmax(-1), 1, generator=random)
        tokens = torch.cat([tokens, drawn], 1)
    return tokens


def learn(model: torch.nn.Module, optimizer: torch.optim.Optimizer, tokens: torch.Tensor) -> float:
    """Take a step of REINFORCE on texts, with the entropy of the policy; return the mean reward of their tokens."""
    rewards = (tokens[:, 1:] == (tokens[:, :-1] + 1) % TOKENS).float()
    likelihoods = model(tokens[:, :-1]).log_softmax(-1)
    entropy = -(likelihoods.exp() * likelihoods).sum(-1).mean()
    chosen = likelihoods.gather(-1, tokens[:, 1:, None])[..., 0]
    loss = -(chosen * (rewards - rewards.mean())).mean() - 0.1 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(rewards.mean())


def train_policy(bundle: Path, folder: Path, server: Server, steps: int) -> list[float]:
    """Train, and ship each step to the server; return the mean reward of each rollout.

    bundle: the bundle that the server runs.
    folder: the folder of its updates.
    """
    model, random = make(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    base, deltas = stagepack.open(bundle), list[stagepack.Delta]()
    version, rewards = base.digest, list[float]()
    for step in range(steps):
        tokens = roll_out(server, version, random)
        rewards.append(learn(model, optimizer, tokens))
        version = f"step-{step}"
        deltas.append(stagepack.delta(base, model.state_dict(), out=folder / version, version=version))
        server.update(version, version)
        if len(deltas) == CHAIN:
            bundle = stagepack.apply_deltas(bundle, deltas, out=folder / f"{version}.stagepack").path
            server.update(bundle.name, version)
            deltas = []
        base = stagepack.open(bundle, deltas=deltas)
        check(server, version, model, tokens)
        if (step + 1) % _SHOWN_STEPS == 0:
            print(f"{version}: mean reward {rewards[-1]:.1f}")
    return rewards


def check(server: Server, version: str, model: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Compare an answer of the server with that of the model that was shipped, bit for bit."""
    with torch.no_grad():
        expected = model(tokens)
    logits, found = server.logits(tokens)
    if found != version or not torch.equal(logits, expected):
        raise RuntimeError(f"expected the answer of the version {version}, found another one, of {found}")


def main() -> None:
    """Train the policy of a server."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("bundle", type=Path, help="bundle that the server runs")
    parser.add_argument("folder", type=Path, help="its --update-folder")
    parser.add_argument("--address", default="127.0.0.1:8000", help="of its REST endpoint")
    parser.add_argument("--steps", type=int, default=48)
    options = parser.parse_args()
    # The operators are small. Beside other programs, threads wait for each other: 16 steps took 20 s, and 6.3 s with one thread.
    torch.set_num_threads(1)
    rewards = train_policy(options.bundle, options.folder, Server(options.address, options.bundle.stem), options.steps)
    print(
        f"{options.steps} steps, each answered by its own weights, bit for bit: mean reward {rewards[0]:.1f} to {rewards[-1]:.1f}"
    )


if __name__ == "__main__":
    main()
