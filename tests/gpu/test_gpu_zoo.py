"""The sample of the zoo that CI runs, on a GPU: whole, and with stages on it and on the CPU in turns."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.export.passes import move_to_device_pass

import stagepack
from stagepack.capture.programs import Capture
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import export_capture
from tests.gpu.answers import (
    assert_close,
    assert_same_form,
    calls_on,
    draws_random_numbers,
    has_autocast,
    inputs_on,
)
from tests.zoo.case import Case, answers, assert_equal, captured_answers, other_size
from tests.zoo.cases import SAMPLE
from tests.zoo.test_zoo import name_of, namespaces

pytestmark = pytest.mark.gpu

# Models that name a device on purpose, or `cpu` in a place that torch does not change when it moves a program.
NAMED_DEVICES = {"operators-factories-with-a-device", "operators-moves-to-a-device"}
# When torch moves a program, views of one storage get memory of their own, so that a write is not seen through another view.
WRITTEN_VIEWS = {
    "weights-parameter-and-a-buffer-that-writes-it",
    "weights-types-on-one-storage",
    "weights-view-written-and-another-read",
}


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_whole(
    case: Case, device: torch.device, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    """Bit for bit what the captured program answers that is moved to the device, at all sizes."""
    capture = case.capture()
    calls, sizes = [capture.inputs] * 3, [other_size(capture.program, capture.inputs), capture.inputs]
    on_cpu, sizes_on_cpu = captured_answers(capture, calls), captured_answers(capture, sizes)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3))
    pipeline = stagepack.load(bundle, [str(device)], types=case.classes(), allow_ops=namespaces(bundle))
    found = answers(pipeline, calls_on(calls, device))
    pipeline.reset_state()
    sizes_found = answers(pipeline, calls_on(sizes, device))
    assert_same_form([found, sizes_found], [on_cpu, sizes_on_cpu])
    if not draws_random_numbers(bundle):
        assert_close([found, sizes_found], [on_cpu, sizes_on_cpu])
    if has_autocast(bundle) or case.name in NAMED_DEVICES | WRITTEN_VIEWS:
        record_property("compared", "with the CPU")
        return
    reason = move_program(capture, device)
    if reason:
        assert not draws_random_numbers(bundle), f"compared with nothing: {reason}"
        record_property("compared", f"with the CPU, since torch does not move the program: {reason}")
        return
    assert_equal(found, captured_answers(capture, calls_on(calls, device)))
    assert_equal(sizes_found, captured_answers(capture, calls_on(sizes, device)))
    record_property("compared", "bit for bit")


def move_program(capture: Capture, device: torch.device) -> str:
    """Move a captured program to a device; return why that is not possible, or empty text."""
    try:
        move_to_device_pass(capture.program, str(device))
        captured_answers(capture, [inputs_on(capture.inputs, device)])
    except Exception as error:  # noqa: BLE001 - errors of torch of any class
        return f"{type(error).__name__}: {error}"[:300]
    return ""


@pytest.mark.parametrize("case", SAMPLE, ids=name_of)
def test_in_turns(case: Case, turns: list[str], tmp_path: Path) -> None:
    """Stages on the CPU and the device in turns, called with tensors of the CPU, which are written as the model writes them."""
    capture = case.capture()
    calls = [capture.inputs] * 3
    expected = captured_answers(capture, calls)
    bundle = export_capture(capture, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=3))
    for first in range(2):
        devices = [turns[(first + number) % 2] for number in range(len(bundle.stages))]
        pipeline = stagepack.load(bundle, devices, types=case.classes(), allow_ops=namespaces(bundle))
        assert pipeline.devices == tuple(str(torch.device(device)) for device in devices)
        found = answers(pipeline, calls)
        assert_same_form(found, expected)
        if not draws_random_numbers(bundle):
            assert_close(found, expected)
