"""The frozen bundles of every release load for ever, and writing them again gives the same bytes."""

from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.format.graph_codec import encode_graph
from stagepack.format.manifest_codec import encode_manifest
from stagepack_loaders.example import replay_example

FROZEN = sorted((Path(__file__).parents[2] / "schema" / "frozen").glob("*/*.stagepack"))


def test_there_are_frozen_bundles() -> None:
    assert FROZEN


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_it_verifies_runs_and_is_written_alike(path: Path) -> None:
    bundle = stagepack.open(path)
    bundle.verify()
    assert replay_example(stagepack.load(bundle)).largest == 0.0
    if bundle.manifest.version == "1.0":
        assert encode_manifest(bundle.manifest) == (path / "manifest.json").read_bytes()
        for number, stage in enumerate(bundle.stages):
            assert encode_graph(bundle.graph_file(number).folded) == (path / stage.graph).read_bytes()


@pytest.mark.parametrize("path", FROZEN, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_it_is_cut_again_into_the_same_graphs(path: Path, tmp_path: Path) -> None:
    bundle = stagepack.open(path)
    whole = stagepack.recut(path, out=tmp_path / "whole.stagepack", stages=1)
    again = stagepack.recut(whole, out=tmp_path / "again.stagepack", plan=bundle.entry_point.plan)
    assert [again.graph(number) for number in range(3)] == [bundle.graph(number) for number in range(3)]
    assert replay_example(stagepack.load(again)).largest == 0.0


def test_the_first_one_answers_at_another_size_and_keeps_its_state() -> None:
    pipe = stagepack.load(FROZEN[0])
    batch = {"ids": torch.arange(20).reshape(4, 5), "flag": torch.tensor(False)}
    first, second = pipe(batch), pipe(batch, scale=2)
    assert first["logits"].dtype == torch.bfloat16
    assert first["logits"].shape == (4, 5, 8)
    assert first["more"][0].shape == (4, 1, 3)
    assert [answer["more"][1].item() for answer in (first, second)] == [1.0, 2.0]
    assert first["more"][2] == "constant"
    assert torch.equal(first["logits"], second["logits"])
    assert pipe.state_dict().keys() == {
        "embed.weight",
        "head.weight",
        "middle.weight",
        "middle.bias",
        "turned",
        "calls",
        *(f"blocks.{number}.shift" for number in range(8)),
    }
