"""Cutting a bundle again gives the bytes of a direct export, whatever the first cut was."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import CutError, DigestError, OutputExistsError, WriteError
from stagepack.partition.cut_options import CutOptions, PolicyNode
from stagepack.roads.capture_writer import export_capture
from tests.zoo.architectures.decoders import llama
from tests.zoo.case import files
from tests.zoo.cases import named
from tests.zoo.rows.build import Lambda


def test_stages_that_go_back_and_forth_are_joined_in_the_order_of_the_model(tmp_path: Path) -> None:
    def run(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.a(x), self.b(x)
        first, second = self.c(first), self.d(second)
        return first * second, self.a(second)

    def policy(node: PolicyNode) -> int:
        return {"a": 0, "c": 0, "b": 1, "d": 1}[node.scope] if node.scope in {"a", "b", "c", "d"} else 2

    model = Lambda(run, **{layer: torch.nn.Linear(4, 4) for layer in "abcd"})
    x = (torch.randn(2, 4),)
    direct = stagepack.export(model, x, out=tmp_path / "direct.stagepack", stages=2)
    crossed = stagepack.export(model, x, out=tmp_path / "crossed.stagepack", policy=policy)
    assert [stage.places for stage in crossed.stages] == [((0, 1), (2, 1)), ((1, 1), (3, 1)), ((4, 2),)]
    assert files(stagepack.recut(crossed, out=tmp_path / "a.stagepack", stages=2).path) == files(direct.path)
    assert files(stagepack.recut(direct, out=tmp_path / "b.stagepack", policy=policy).path) == files(crossed.path)
    again = stagepack.recut(direct, out=tmp_path / "c.stagepack", plan=crossed.entry_point.plan)
    assert files(again.path) == files(crossed.path)


def test_a_plan_is_written_edited_and_given_back(tmp_path: Path) -> None:
    from stagepack.partition.cut_options import write_plan

    capture = llama(2).capture()
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=2))
    path = tmp_path / "plan.json"
    assert bundle.entry_point.plan is not None
    write_plan(bundle.entry_point.plan, path)
    assert stagepack.read_plan(path) == bundle.entry_point.plan
    same = stagepack.recut(bundle, out=tmp_path / "same.stagepack", plan=stagepack.read_plan(path))
    assert files(same.path) == files(bundle.path)
    fields = json.loads(path.read_text())
    (first,), (second,) = (stage["nodes"] for stage in fields["stages"])
    path.write_text(json.dumps({"stages": [{"nodes": [[0, 30]]}, {"nodes": [[30, first[1] + second[1] - 30]]}]}))
    edited = stagepack.recut(bundle, out=tmp_path / "edited.stagepack", plan=stagepack.read_plan(path))
    assert edited.entry_point.plan is not None
    assert [stage.nodes for stage in edited.entry_point.plan.stages] == [((0, 30),), ((30, first[1] + second[1] - 30),)]
    direct = export_capture(capture, out=tmp_path / "direct", cut_options=CutOptions(plan=stagepack.read_plan(path)))
    assert files(edited.path) == files(direct.path)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([[[0, 3]], [[4, 1]]], "1 nodes are in no stage, the first is node 3"),
        ([[[0, 3]], [[2, 3]]], "node 2 is in stage 0 and in stage 1"),
        ([[[0, 3]], [[3, 9]]], "stage 1 has 9 nodes from node 3 on, but the model has 5 nodes"),
        ([[[0, 3]], [[3, -1]]], "stage 1 has -1 nodes"),
        ([[[2, 3]], [[0, 2]]], "node 2 of stage 0 uses '.*', which node 1 of stage 1 defines"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(stages: list[list[list[int]]], message: str, tmp_path: Path) -> None:
    model = Lambda(lambda _, x: x.sin().cos().tan().exp().neg())
    bundle = stagepack.export(model, (torch.randn(2),), out=tmp_path / "m.stagepack")
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"stages": [{"nodes": nodes} for nodes in stages]}))
    with pytest.raises(CutError, match=message):
        stagepack.recut(bundle, out=tmp_path / "again.stagepack", plan=stagepack.read_plan(path))


@pytest.mark.parametrize("content", ["", "{}", '{"stages": [{}]}', '{"stages": [{"nodes": [[0]]}]}', "\xff"])
def test_a_file_that_is_no_plan_is_refused(content: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(content.encode("latin-1"))
    with pytest.raises(CutError, match="expected a plan, as written by 'stagepack plan --out'"):
        stagepack.read_plan(path)
    with pytest.raises(CutError, match=r"absent\.json: the plan cannot be read: No such file or directory"):
        stagepack.read_plan(tmp_path / "absent.json")


def test_recut_takes_no_output_that_is_there_and_no_damaged_input(tmp_path: Path) -> None:
    bundle = export_capture(
        named("weights-tied-at-both-ends")[0].capture(), out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=2)
    )
    with pytest.raises(OutputExistsError):
        stagepack.recut(bundle, out=bundle.path, stages=3)
    with pytest.raises(WriteError):
        stagepack.recut(bundle, out=tmp_path / "none" / "m.stagepack", stages=3)
    overwritten = stagepack.recut(bundle, out=bundle.path, stages=3, overwrite=True)
    assert len(overwritten.stages) == 3
    stagepack.load(overwritten)
    weights = bundle.path / "shared-0.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DigestError, match=r"shared-0.safetensors.*\[D2\]"):
        stagepack.recut(overwritten, out=tmp_path / "again.stagepack", stages=2)
    assert not (tmp_path / "again.stagepack").exists()


def test_a_transmitted_weight_lives_in_one_stage_and_travels(tmp_path: Path) -> None:
    capture = named("weights-tied-at-both-ends")[0].capture()
    bundle = export_capture(
        capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(split_at=["b", "head"], shared="transmit")
    )
    assert [stage.weights for stage in bundle.stages] == [("stage-0.safetensors",), ("stage-1.safetensors",), ()]
    (edge,) = [edge for edge in bundle.edges if edge.shape == (16, 4)]
    assert (edge.producer, edge.consumers) == (0, (2,))
    pipe = stagepack.load(bundle)
    assert torch.equal(pipe(*capture.inputs.args), capture.program.module()(*capture.inputs.args))


def turned(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x * 2
    flat = doubled.view(-1)
    doubled.t_()
    return flat.exp() + 1, doubled.cos()


def resized(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    doubled = x.flatten() * 2
    further = doubled + 1
    doubled.resize_(4)
    return doubled, further


def windowed(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    rows = (x * 2)[1:]
    return rows.as_strided((2, 2), (1, 2), 0).exp(), rows.cos()


@pytest.mark.parametrize("function", [turned, resized, windowed])
@pytest.mark.parametrize("is_decomposed", [False, True], ids=["program", "decomposed"])
def test_every_cut_through_reshaped_values_is_refused_or_loaded(
    function: Any, is_decomposed: bool, tmp_path: Path
) -> None:
    x = torch.rand(3, 2)
    program = torch.export.export(Lambda(lambda _, x: function(x)), (x,))
    program = program.run_decompositions() if is_decomposed else program
    bundle = stagepack.export(program, out=tmp_path / "1.stagepack")
    expected = function(x)
    loaded_count = 0
    for first_of_second in range(1, bundle.stages[0].nodes):
        positions = iter(range(bundle.stages[0].nodes))

        def policy(_: PolicyNode, positions: Any = positions, first: int = first_of_second) -> int:
            return int(next(positions) >= first)

        try:
            cut = stagepack.recut(bundle, out=tmp_path / f"{first_of_second}-2.stagepack", policy=policy)
        except CutError:  # a value that is written stays in one stage with all that touches it
            continue
        assert all(map(torch.equal, stagepack.load(cut)(x), expected))
        loaded_count += 1
    assert loaded_count or function is resized
