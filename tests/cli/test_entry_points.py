"""The command line on models and bundles with several entry points."""

import json
from pathlib import Path

import pytest

import stagepack
from tests.cli.entry_point_model import translator
from tests.hostile.attack import command_fails, run

SOURCE = f"{Path(__file__).parent / 'entry_point_model.py'}:translator"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("entry_points") / "translator.stagepack"
    done = run("export", SOURCE, "-o", str(out), "--stages", "2", "--json")
    assert done.exit_code == 0, done.output
    facts = json.loads(done.stdout)
    assert [entry_point["entry_point"] for entry_point in facts["entry_points"]] == ["encode", "decode"]
    assert facts["difference"] == 0
    return out


def test_export_and_inspect_show_each_entry_point(path: Path) -> None:
    shown = run("inspect", str(path)).stdout
    assert shown.index("entry point encode") < shown.index("entry point decode")
    one = json.loads(run("inspect", f"{path}#decode", "--json").stdout)
    assert (one["entry_point"], len(one["stages"]), one["path"]) == ("decode", 2, f"{path}#decode")
    assert "decode-stage-1.msgpack" in shown + json.dumps(one)


@pytest.mark.parametrize("command", ["load", "plan", "recut --stages 2 -o out", "inspect --stage 0"])
def test_commands_on_one_cut_ask_for_an_entry_point(
    path: Path, command: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command.split()
    command_fails(name, str(path), *options, says=r"the entry points encode, decode: choose one, as in .*#encode")
    done = run(name, f"{path}#encode", *options)
    assert done.exit_code == 0, done.output


def test_listing_report_and_profile_show_each_entry_point(path: Path, tmp_path: Path) -> None:
    listing = run("inspect", str(path), "--graph").stdout
    assert listing.index("def encode_stage_0(") < listing.index("def decode_stage_1(")
    page = tmp_path / "page.html"
    assert run("report", str(path), "-o", str(page)).exit_code == 0
    html = page.read_text()
    assert html.index("Entry point encode") < html.index("Entry point decode")
    assert "<summary>encode, stage 0: " in html
    assert "<summary>decode, stage 1: " in html
    done = run("profile", str(path), "-o", str(tmp_path / "times.json"), "--runs", "1", "--json")
    assert [facts["entry_point"] for facts in json.loads(done.stdout)["entry_points"]] == ["encode", "decode"]
    profile = str(tmp_path / "times.decode.json")
    assert run("plan", f"{path}#decode", "--stages", "2", "--profile", profile).exit_code == 0


def test_verify_and_diff_are_of_all_entry_points(path: Path, tmp_path: Path) -> None:
    assert run("verify", str(path)).exit_code == 0
    assert run("verify", str(path), "--run").exit_code == 0
    recut = stagepack.recut(f"{path}#encode", out=tmp_path / "recut.stagepack", stages=1)
    found = json.loads(run("diff", str(path), str(recut.path), "--json").stdout)
    assert found["plan"][0] == "encode: stages: 2 and 1"
    assert not found["graph"]
    model, inputs = translator()
    alone = stagepack.export(model, entry_points={"encode": inputs["encode"]}, out=tmp_path / "alone.stagepack")
    assert "stage-0.msgpack" in alone.files
    found = json.loads(run("diff", str(path), str(alone.path), "--json").stdout)
    assert "entry point decode: only in A" in found["graph"]


def test_an_unknown_entry_point_is_named(path: Path) -> None:
    command_fails("inspect", f"{path}#other", says="expected one of the entry points encode, decode, found 'other'")
