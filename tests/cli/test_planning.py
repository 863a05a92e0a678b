"""`plan` and `recut`: a cut is shown, written, edited and given back, without torch."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.hostile.attack import command_fails, run
from tests.zoo.cases import named


def test_the_plan_of_a_bundle_is_the_one_it_was_cut_by(sound: Path) -> None:
    facts = json.loads(run("plan", str(sound), "--json").stdout)
    plan = stagepack.open(sound).entry_point.plan
    assert plan is not None
    assert [stage["weight_bytes"] for stage in facts["stages"]] == [stage.weight_bytes for stage in plan.stages]
    assert [stage["starts_at"] for stage in facts["stages"]] == ["embed", "first", "second"]
    assert facts["sizes"] == {"batch": 2}
    assert facts["bubble"]["1"] > facts["bubble"]["32"] > 0


def test_the_tables_name_stages_and_what_crosses(sound: Path) -> None:
    shown = run("plan", str(sound)).stdout
    assert "embedding_0  float32[batch, 3, 4]     0  1    96 B" in shown
    assert "balance: slowest stage " in shown
    assert "bubble by number of microbatches: 1: " in shown


def test_operators_whose_cost_is_estimated_are_named(tmp_path: Path) -> None:
    out = tmp_path / "loop.stagepack"
    export_capture(named("regions-while-loop")[0].capture(), out=out, cut_options=CutOptions(stages=1))
    assert (
        "operators without a cost formula, estimated from shapes: higher_order.while_loop (1 node)"
        in run("plan", str(out)).stdout
    )
    facts = json.loads(run("plan", str(out), "--stages", "2", "--json").stdout)
    assert facts["estimated_operators"] == {"higher_order.while_loop": 1}


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("--dot", ["digraph stages {", "  stage0 -> stage1 [label=", "  stage2 -> result [label=", "}"]),
        ("--mermaid", ["flowchart LR", '  stage0 -->|"embedding_0<br/>96 B"| stage1', '  stage2 -->|"']),
    ],
)
def test_the_graph_of_the_stages_is_printed(form: str, says: list[str], sound: Path) -> None:
    lines = run("plan", str(sound), form).stdout.splitlines()
    assert all(any(line.startswith(part) for line in lines) for part in says)


def test_a_plan_is_written_edited_and_given_back(sound: Path, tmp_path: Path) -> None:
    file, out = tmp_path / "plan.json", tmp_path / "again.stagepack"
    assert run("plan", str(sound), "--stages", "2", "-o", str(file)).exit_code == 0
    plan = json.loads(file.read_text())
    assert len(plan["stages"]) == 2
    plan["stages"] = [{"nodes": [run for stage in plan["stages"] for run in stage["nodes"]]}]
    file.write_text(json.dumps(plan))
    result = run("recut", str(sound), "--plan", str(file), "-o", str(out))
    assert result.exit_code == 0, result.output
    assert ": 1 stage, " in result.stdout
    assert len(stagepack.open(out).stages) == 1


def test_recut_gives_the_same_bytes_again(sound: Path, tmp_path: Path) -> None:
    one_stage, back = tmp_path / "one.stagepack", tmp_path / "back.stagepack"
    assert run("recut", str(sound), "--stages", "1", "-o", str(one_stage)).exit_code == 0
    result = run("recut", str(one_stage), "--split-at", "first", "--split-at", "second", "-o", str(back), "--json")
    assert json.loads(result.stdout)["digest"] == stagepack.open(sound).digest


def test_a_stage_for_each_layer_is_shown_and_written(tmp_path: Path) -> None:
    source, out = tmp_path / "one.stagepack", tmp_path / "layers.stagepack"
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    stagepack.export(model.eval(), (torch.ones(1, 4),), out=source)
    facts = json.loads(run("plan", str(source), "--stages", "layers", "--json").stdout)
    assert [stage["starts_at"] for stage in facts["stages"]] == ["0", "2", "3"]
    written = json.loads(run("recut", str(source), "--stages", "layers", "-o", str(out), "--json").stdout)
    again = stagepack.recut(source, out=tmp_path / "again.stagepack", stages="layers")
    assert written["digest"] == again.digest


@pytest.mark.parametrize("arguments", [["plan"], ["recut", "-o", "{out}"]])
def test_more_stages_than_operators_are_refused(arguments: list[str], sound: Path, tmp_path: Path) -> None:
    command, *options = (argument.format(out=tmp_path / "out.stagepack") for argument in arguments)
    result = run(command, str(sound), *options, "--stages", "40")
    assert result.exit_code == 1
    line = re.fullmatch(r"stagepack: .*: expected at most (\d+), found 40: the model has .*\n", result.stderr)
    assert line is not None, result.output
    result = run(command, str(sound), *options, "--stages", line[1])
    assert result.exit_code == 0, result.output
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("plan {sound} --stages 2 --memory 10B --memory 10B", r"no cut fits: .* stage \d needs [\d.]+ k?B "),
        ("plan {sound} --stages 2 --memory much --memory 10B", "expected a number of bytes"),
        ("plan {sound} --stages 2 --memory 9999999999999999999 --memory 1", r"fewer than 2 \*\* 63 bytes"),
        (f"plan {{sound}} --stages 2 --memory {'9' * 400}.5 --memory 1", r"fewer than 2 \*\* 63 bytes"),
        ("plan {sound} --stages 2 --speed 1e308 --speed 1", "expected numbers from 0.000001 to 1000000"),
        ("plan {sound} --stages 2 --speed nan --speed 1", "expected numbers from 0.000001 to 1000000"),
        ("plan {sound} --stages 2 --speed 1", "expected 2 numbers, one for each stage, found 1"),
        ("plan {sound} --stages layers", "the model has no layers for 'layers'"),
        ("plan {sound} --split-at nowhere", "no operator comes from a module 'nowhere'"),
        ("recut {sound} --stages 2 -o {sound}", "exists"),
    ],
)
def test_what_cannot_be_done_says_why(arguments: str, says: str, sound: Path) -> None:
    command_fails(*arguments.format(sound=sound).split(), says=says)


@pytest.mark.process
@pytest.mark.parametrize(
    "command",
    [["plan", "--stages", "2"], ["recut", "--stages", "2", "-o", "OUT", "--overwrite"], ["report", "-o", "OUT.html"]],
)
def test_neither_torch_nor_its_loader_is_imported(command: list[str], sound: Path, tmp_path: Path) -> None:
    arguments = [command[0], str(sound), *(word.replace("OUT", str(tmp_path / "out")) for word in command[1:])]
    code = "import sys; from stagepack.cli import main; main(sys.argv[1:], standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True)
