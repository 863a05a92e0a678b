"""`plan --device`: the stages of a bundle are placed on devices, without torch and without opening a graph."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec import structs

import stagepack
from stagepack.format.reader import Bundle
from stagepack.partition.profile import NodeTime, Profile, model_digest, write_profile
from stagepack.roads.recut import whole_graph
from tests.hostile.attack import command_fails, run

DEVICES = ["--device", "cuda:0", "--device", "worker/cuda:0", "--device", "cpu"]


def test_the_parts_and_what_would_help_are_shown(sound: Path) -> None:
    result = run("plan", str(sound), *DEVICES, "--speed", "1", "--speed", "1", "--speed", "0.001")
    assert result.exit_code == 0, result.output
    assert re.search(r"^  cuda:0 +0-2 ", result.stdout, re.MULTILINE)
    assert "not used: cpu: each stage takes it " in result.stdout
    assert "bottleneck: cuda:0, " in result.stdout
    assert re.search(
        r"^expected: .* for one call, .* calls/s when all parts work at a time$", result.stdout, re.MULTILINE
    )
    assert "with cuda:0 twice as fast: " in result.stdout
    assert "--placement 3,0,0" in result.stdout
    assert "example sizes: batch = 2" in result.stdout
    assert "links: device=25GB/s,rtt=0.01ms; host=1.25GB/s,rtt=0.1ms" in result.stdout


def test_the_facts_are_printed_as_json(sound: Path) -> None:
    arguments = [
        "--placement",
        "1,2,0",
        "--link",
        "host=1GB/s,rtt=2ms",
        "--memory",
        "1GB",
        "--memory",
        "2GB",
        "--memory",
        "3GB",
    ]
    facts = json.loads(run("plan", str(sound), *DEVICES, *arguments, "--json").stdout)
    assert facts["stages_per_device"] == [1, 2, 0]
    assert [(part["host"], part["device"], part["stages"]) for part in facts["parts"]] == [
        ("", "cuda:0", [0]),
        ("worker", "cuda:0", [1, 2]),
    ]
    assert [part["memory_limit"] for part in facts["parts"]] == [10**9, 2 * 10**9]
    assert facts["parts"][1]["receiving_picoseconds"] >= 10**9
    assert facts["left_out"] == [{"device": "cpu", "reason": "stages_per_device gives it none"}]
    assert facts["interval_picoseconds"] == facts["parts"][facts["bottleneck"]]["picoseconds"]
    assert facts["call_picoseconds"] == sum(part["picoseconds"] for part in facts["parts"])
    assert facts["improvements"][0]["change"] == "the placement 2,0,1"  # past the slow link
    assert facts["links"]["host"] == "1GB/s,rtt=2ms"


def measured(bundle: Bundle) -> Profile:
    graph = whole_graph(bundle)
    nodes = tuple(NodeTime(node=node, op="", module="", seconds=0.01) for node in range(len(graph.nodes)))
    return Profile(
        model=model_digest(graph),
        bundle=bundle.digest,
        machine="m",
        torch="2",
        threads=1,
        runs=1,
        sizes={},
        stages=(),
        nodes=nodes,
    )


def test_each_kind_of_device_has_a_profile_of_its_own(sound: Path, tmp_path: Path) -> None:
    bundle, file = stagepack.open(sound), tmp_path / "times.json"
    write_profile(measured(bundle), file)
    profiles = ["--profile", f"cpu={file}", "--profile", "worker/cuda:0=h100", "--profile", "a100"]
    facts = json.loads(run("plan", str(sound), *DEVICES, *profiles, "--placement", "1,1,1", "--json").stdout)
    first, second, third = (part["profile"] for part in facts["parts"])
    assert (first["device"], second["device"], third["machine"]) == ("a100", "h100", "m")
    nodes = bundle.stages[2].nodes
    assert facts["parts"][2]["computing_picoseconds"] == pytest.approx(nodes * 10**10, rel=0.5)
    shown = run("plan", str(sound), *DEVICES, *profiles, "--placement", "1,1,1").stdout
    assert "assumed: the speed of h100 (worker/cuda:0)" in shown
    assert "measured:  of m, torch 2, 1 thread (cpu)" in shown


def test_measured_times_are_those_of_the_model_in_any_cut(sound: Path, tmp_path: Path) -> None:
    bundle, file = stagepack.open(sound), tmp_path / "times.json"
    write_profile(structs.replace(measured(bundle), bundle="of another cut"), file)
    assert run("plan", str(sound), "--device", "cpu", "--profile", str(file)).exit_code == 0
    write_profile(structs.replace(measured(bundle), bundle="of another cut", model="another"), file)
    command_fails("plan", str(sound), "--device", "cpu", "--profile", str(file), says="expected times of this model")


def test_the_devices_of_this_machine_are_found(sound: Path) -> None:
    facts = json.loads(run("plan", str(sound), "--device", "auto", "--json").stdout)
    names = [part["device"] for part in facts["parts"]] + [device["device"] for device in facts["left_out"]]
    assert "cpu" in names


def test_memory_and_speeds_are_said_of_the_devices_of_this_machine_too(sound: Path) -> None:
    found = json.loads(run("plan", str(sound), "--device", "auto", "--json").stdout)
    count = len(found["stages_per_device"])
    limits = [argument for _ in range(count) for argument in ("--memory", "1GB", "--speed", "2")]
    facts = json.loads(run("plan", str(sound), "--device", "auto", *limits, "--json").stdout)
    assert {(part["memory_limit"], part["speed"]) for part in facts["parts"]} == {(10**9, 2.0)}
    says = f"memory: expected {count} values, one for each device, found {count + 1}"
    command_fails("plan", str(sound), "--device", "auto", *["--memory", "1GB"] * (count + 1), says=says)


def test_the_cpu_of_this_machine_may_have_measured_times(sound: Path, tmp_path: Path) -> None:
    file = tmp_path / "times.json"
    write_profile(measured(stagepack.open(sound)), file)
    facts = json.loads(run("plan", str(sound), "--device", "auto", "--profile", f"cpu={file}", "--json").stdout)
    assert [part["profile"]["machine"] for part in facts["parts"] if part["device"] == "cpu"] in (["m"], [])


def test_a_device_of_any_speed_has_a_rate(sound: Path) -> None:
    result = run("plan", str(sound), "--device", "a", "--speed", "1e6", "--link", "device=1000TB/s,rtt=0s")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--device a --memory 10B", r"no placement fits: .* too little"),
        ("--device a --memory much", "expected a number of bytes"),
        (
            "--device a --memory 1GB --memory 1GB",
            "memory: expected 1 values, one for each device, found 2",
        ),
        ("--device a --speed 1 --speed 1", "speeds: expected 1 values, one for each device, found 2"),
        ("--device a --speed 0", "expected a number from 0.000001 to 1000000"),
        ("--device a --link host=25GB", "expected NAME=BANDWIDTH"),
        ("--device a --link host=1GB/s --link host=1GB/s", "expected one of the name host, found two"),
        ("--device a --placement 1,2", "expected 1 numbers, one for each device"),
        ("--device a --placement 2", "with the sum 3"),
        ("--device a --profile b=h100", "expected a device"),
        ("--device a --profile h100 --profile t4", "expected one for all devices, found two"),
        ("--device w/", "found an empty one"),
    ],
)
def test_what_cannot_be_placed_says_why(arguments: str, says: str, sound: Path) -> None:
    command_fails("plan", str(sound), *arguments.split(), says=says)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--device a --stages 2", "--device cannot be used with --stages, --split-at and --plan"),
        ("--device a -o plan.json", "--device cannot be used with --out"),
        ("--device a --dot", "--device cannot be used with --dot and --mermaid"),
        ("--device a --shared transmit", "--device cannot be used with --shared"),
        ("--device a --eval", "--device cannot be used with --inputs"),
        ("--device auto --device a", "--device auto cannot be used with"),
        ("--link host=1GB/s", "--link requires --device"),
        ("--placement 3", "--placement requires --device"),
        ("--device a --placement 1,x", "expected numbers of stages such as 4,3,1"),
        ("--device a --placement 1_0", "expected numbers of stages such as 4,3,1"),
        ("--device a --placement -3", "expected numbers of stages such as 4,3,1"),
        ("--device a --placement 3,", "expected numbers of stages such as 4,3,1"),
        ("--one-at-a-time", "--one-at-a-time requires --device"),
        ("--memory 1GB", "--memory requires --stages or --device"),
        ("--profile h100 --profile t4", "--profile: expected one, found several"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: str, says: str, sound: Path) -> None:
    result = run("plan", str(sound), *arguments.split())
    assert result.exit_code == 2
    assert says in result.stderr


def test_a_model_is_exported_before_it_is_placed() -> None:
    result = run("plan", "net.py:make", "--device", "cpu")
    assert result.exit_code == 2
    assert "export it first" in result.stderr


@pytest.mark.process
def test_neither_torch_nor_a_graph_is_read(sound: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from stagepack.cli import main; from stagepack.format.reader import Bundle\n"
        "Bundle.graph = Bundle.graph_file = lambda *_: sys.exit('a graph was opened')\n"
        "main(sys.argv[1:], standalone_mode=False); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, "plan", str(sound), *DEVICES], check=True, capture_output=True)
