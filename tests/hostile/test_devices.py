"""Devices that are not there are refused before anything is read, by name and with what this machine has."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import DeviceError
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails, run

ABSENT = ["gpu", "cuda:99", "cpu,cpu", "", " ", "cpu:x", "CPU ", "mps:7", "xla", "cpu\ncpu", "'; import os"]


@pytest.mark.parametrize("name", ABSENT)
def test_a_device_that_is_not_there_is_named(name: str, editor: BundleEditor) -> None:
    for path in editor.path.glob("stage-*"):
        path.unlink()
    says = "expected a device of this machine, such as cpu or cuda:0"
    for devices in ([name], ["cpu", name], name):
        with pytest.raises(DeviceError, match=says):
            stagepack.load(editor.path, devices)
    with pytest.raises(DeviceError, match=says):
        stagepack.load_stage(editor.path, 1, name)
    if name:  # the command has a message of its own for an empty value of any option
        command_fails("load", str(editor.path), "--device", name, says=says)
        command_fails("load", str(editor.path), "--stage", "1", "--device", name, says=says)


@pytest.mark.parametrize("devices", [["cpu"] * 4, ["cpu"] * 100, []])
def test_the_devices_must_fit_the_stages(devices: Sequence[str], sound: Path) -> None:
    says = f"expected 1 to 3 devices for 3 stages, found {len(devices)}"
    with pytest.raises(DeviceError, match=says):
        stagepack.load(sound, devices)
    if devices:
        command_fails("load", str(sound), *(part for device in devices for part in ("--device", device)), says=says)


@pytest.mark.parametrize(
    "devices", ["cpu", torch.device("cpu"), ["cpu"], ["cpu", "cpu"], ("cpu", torch.device("cpu"), "cpu")]
)
def test_one_device_or_as_many_as_stages_will_do(devices: Sequence[str], sound: Path) -> None:
    assert {stage.device for stage in stagepack.load(sound, devices).stages} == {torch.device("cpu")}


@pytest.mark.parametrize("number", [-1, 3, 99])
def test_a_stage_that_is_not_there_is_refused_with_the_range(number: int, sound: Path) -> None:
    with pytest.raises(IndexError, match=f"expected a stage from 0 to 2, found {number}"):
        stagepack.load_stage(sound, number)
    for command in ("load", "inspect"):
        command_fails(
            command, str(sound), "--stage", str(number), says=f"--stage: expected a stage from 0 to 2, found {number}"
        )
    assert run("load", str(sound), "--stage", "one").exit_code == 2


def test_a_graph_makes_no_tensors_without_data(tmp_path: Path) -> None:
    class Offset(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.ones(4, device="cpu")

    editor = BundleEditor(stagepack.export(Offset(), (torch.ones(2, 4),), out=tmp_path / "m.stagepack").path)

    def name_meta(graph: dict[str, Any]) -> None:
        [node] = [node for node in graph["nodes"] if "ones" in graph["ops"][node["op"]]["name"]]
        node["kwargs"] = [[name, ["device", "meta"] if name == "device" else item] for name, item in node["kwargs"]]

    editor.edit_graph(0, name_meta)
    with pytest.raises(DeviceError, match="the graph makes tensors on the device meta"):
        stagepack.load(editor.path)
