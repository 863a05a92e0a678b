"""Options of `load` and `load_stage` that do not exist or do not go together: one typed error each, before a file is read."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.errors import CompiledError, DeviceError, NotABundleError, OptionError
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.registry import runtime_names
from stagepack_loaders.torch.compilation import compile_ahead

TOWER = Path(__file__).parents[2] / "schema" / "frozen" / "1.0" / "tower.stagepack"
RUNTIMES = " or ".join(map(repr, runtime_names()))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stagepack.load(TOWER, runtime="x"), f"expected the runtime {RUNTIMES}, found 'x'"),
        (lambda: stagepack.load(TOWER, runtime=3), "found 3"),  # type: ignore[call-overload]
        (lambda: stagepack.load_stage(TOWER, 0, runtime="x"), "found 'x'"),
        (lambda: stagepack.load(TOWER, runtime=["torch"]), "a runtime, or one for each of 3 stages, found 1"),
        (lambda: stagepack.load(TOWER, compile="x"), "compile: expected False, True, 'regions' or 'whole', found 'x'"),  # type: ignore[call-overload]
        (lambda: stagepack.load(TOWER, compile=True, compiled="x"), "compile and compiled exclude each other"),
        (lambda: stagepack.load(TOWER, runtime="onnxruntime", compiled="x"), "ONNX Runtime does not compile stages"),
        (
            lambda: stagepack.load(TOWER, runtime=["torch", "torch", "onnxruntime"], compile=True),
            "ONNX Runtime does not compile stages",
        ),
        (lambda: stagepack.load_stage(TOWER, 0, runtime="onnxruntime", modules=True), "ONNX Runtime has no modules"),
        (lambda: stagepack.load_stage(TOWER, 0, modules=True, compile=True), "modules excludes compile and compiled"),
    ],
)
def test_options_that_do_not_go_together_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(OptionError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def test_options_that_exclude_each_other_are_refused_where_they_are_made() -> None:
    with pytest.raises(OptionError, match="compile and compiled exclude each other"):
        LoadOptions(compile=True, compiled="x")


@pytest.mark.parametrize("options", [{"imports": []}, {"max_restarts": False}, {"microbatch_size": 0}])
def test_options_of_processes_that_ask_for_nothing_are_taken(options: dict[str, Any]) -> None:
    assert stagepack.load(TOWER, **options).devices == ("cpu",) * 3


@pytest.mark.parametrize("load", [stagepack.load, lambda path, **options: stagepack.load_stage(path, 0, **options)])
def test_a_bundle_that_does_not_exist_is_named_before_its_options(load: Callable[..., Any], tmp_path: Path) -> None:
    with pytest.raises(NotABundleError):
        load(tmp_path / "missing", device_memory="much")


@pytest.mark.parametrize("stage_number", [-1, 3])
def test_a_stage_number_that_does_not_exist_is_an_index_error(stage_number: int) -> None:
    for runtime in ("torch", "onnxruntime"):
        with pytest.raises(IndexError, match=f"expected a stage from 0 to 2, found {stage_number}"):
            stagepack.load_stage(TOWER, stage_number, runtime=runtime)


@pytest.mark.parametrize("runtime", ["torch", "onnxruntime"])
def test_devices_that_do_not_exist_are_named(runtime: str) -> None:
    for devices in (["tpu"], [None], "nothing:3"):
        with pytest.raises(DeviceError, match="device '"):
            stagepack.load(TOWER, devices, runtime=runtime)  # type: ignore[arg-type]
    with pytest.raises(DeviceError, match="expected 1 to 3 devices for 3 stages, found 0"):
        stagepack.load(TOWER, [], runtime=runtime)


def test_a_folder_that_holds_no_code_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CompiledError, match="expected a folder that stagepack compile wrote"):
        stagepack.load(TOWER, compiled=tmp_path)


def test_a_device_that_does_not_exist_is_named_before_anything_is_compiled(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="device 'nothing'"):
        compile_ahead(TOWER, tmp_path / "out", "nothing")
    assert list(tmp_path.iterdir()) == []
