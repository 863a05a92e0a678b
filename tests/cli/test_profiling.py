"""`profile`, and the times that it writes in `plan`, `recut` and `export`."""

import json
from pathlib import Path

import pytest

import stagepack
from tests.hostile.attack import command_fails, run


@pytest.fixture(scope="module")
def times(sound: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("profile") / "times.json"
    result = run("profile", str(sound), "-o", str(path), "--runs", "2")
    assert result.exit_code == 0, result.output
    assert f"wrote {path}: " in result.stdout
    assert "medians of 2 runs" in result.stdout
    assert "sizes: batch = 2" in result.stdout
    return path


def test_a_profile_says_what_was_measured(sound: Path, tmp_path: Path) -> None:
    result = run("profile", str(sound), "-o", str(tmp_path / "times.json"), "--runs", "1", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    content = json.loads((tmp_path / "times.json").read_text())
    assert facts["measured_nodes"] == len(content["nodes"])
    assert [stage["device"] for stage in facts["stages"]] == ["cpu"] * 3
    total = sum(stage["seconds"] for stage in facts["stages"])
    assert sum(operator["seconds"] for operator in facts["operators"]) == pytest.approx(total, rel=0.5)
    assert sum(operator["nodes"] for operator in facts["operators"]) == len(content["nodes"])


def test_a_plan_shows_measured_times(sound: Path, times: Path) -> None:
    nodes = json.loads(times.read_text())["nodes"]
    facts = json.loads(run("plan", str(sound), "--stages", "1", "--profile", str(times), "--json").stdout)
    measured = round(sum(node["seconds"] for node in nodes) * 1e12)
    (stage,) = facts["stages"]
    assert measured <= stage["picoseconds"] < measured + 1e9  # and what it receives
    assert facts["profile"]["measured_nodes"] == facts["profile"]["nodes"] == len(nodes)
    shown = run("plan", str(sound), "--stages", "2", "--profile", str(times)).stdout
    assert "measured: cpu of " in shown
    assert "not measured" not in shown
    assert shown.endswith("assumed: links of 25 GB/s, 5 µs for each value\n")


def test_the_own_cut_of_a_bundle_is_shown_with_measured_times(sound: Path, times: Path) -> None:
    own = json.loads(run("plan", str(sound), "--json").stdout)
    timed = json.loads(run("plan", str(sound), "--profile", str(times), "--json").stdout)
    assert [stage["nodes"] for stage in timed["stages"]] == [stage["nodes"] for stage in own["stages"]]
    assert [stage["picoseconds"] for stage in timed["stages"]] != [stage["picoseconds"] for stage in own["stages"]]
    assert timed["edges"] == own["edges"]
    assert (own["profile"], timed["profile"]["sizes"]) == (None, {"batch": 2})


def test_a_plan_says_which_times_are_estimates(sound: Path, times: Path, tmp_path: Path) -> None:
    content = json.loads(times.read_text())
    count = len(content["nodes"])
    content["nodes"] = content["nodes"][2:]
    (tmp_path / "times.json").write_text(json.dumps(content))
    shown = run("plan", str(sound), "--stages", "2", "--profile", str(tmp_path / "times.json")).stdout
    assert f"not measured: 2 of {count} nodes; their times are estimates times " in shown


def test_a_plan_says_that_links_were_measured(sound: Path, times: Path, tmp_path: Path) -> None:
    content = json.loads(times.read_text()) | {"link": {"seconds_per_value": 95e-6, "seconds_per_byte": 5e-10}}
    (tmp_path / "times.json").write_text(json.dumps(content))
    shown = run("plan", str(sound), "--stages", "2", "--profile", str(tmp_path / "times.json")).stdout
    assert shown.endswith("measured: links of 2 GB/s, 95.0 µs for each value\n")


def test_recut_and_export_take_a_profile(sound: Path, times: Path, tmp_path: Path) -> None:
    out = tmp_path / "two.stagepack"
    result = run("recut", str(sound), "-o", str(out), "--stages", "2", "--profile", str(times))
    assert result.exit_code == 0, result.output
    planned = json.loads(run("plan", str(sound), "--stages", "2", "--profile", str(times), "--json").stdout)
    plan = stagepack.open(out).entry_point.plan
    assert plan is not None
    node_counts = [sum(count for _, count in stage.nodes) for stage in plan.stages]
    assert [stage["nodes"] for stage in planned["stages"]] == node_counts


def test_a_profile_that_does_not_fit_is_refused(sound: Path, times: Path, tmp_path: Path) -> None:
    content = json.loads(times.read_text())
    (tmp_path / "other.json").write_text(json.dumps(content | {"model": "0" * 64}))
    command_fails(
        "plan", str(sound), "--profile", str(tmp_path / "other.json"), says="profile: expected times of this model"
    )
    command_fails("plan", str(sound), "--profile", str(sound / "manifest.json"), says="expected a profile")
