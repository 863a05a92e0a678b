"""What users of `torch.nn.Module` type works on a loaded bundle, or has an answer."""

import copy
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.errors import DeviceError, OptionError
from tests.door.model import EXAMPLE


def test_a_copy_has_weights_of_its_own(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    duplicate = copy.deepcopy(pipeline)
    for parameter in duplicate.parameters():
        parameter.data.zero_()
    assert not duplicate(EXAMPLE).any()
    assert torch.equal(pipeline(EXAMPLE), exported[1])
    with pytest.raises(OptionError, match="only pipelines in PyTorch"):
        copy.deepcopy(stagepack.load(exported[0], runtime="onnxruntime"))


def test_methods_of_modules_work_or_name_what_takes_their_place(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    assert pipeline.eval() is pipeline
    for name, hint in {
        "half": "--dtype",
        "cuda": r"to\('cuda'\)",
        "train": "stagepack.train",
        "named_modules": "stages",
    }.items():
        with pytest.raises(AttributeError, match=f"Pipeline has no attribute '{name}': .*{hint}"):
            getattr(pipeline, name)
    with pytest.raises(AttributeError, match=r"Pipeline has no attribute 'nothing'$"):
        pipeline.nothing  # noqa: B018 - it raises


@pytest.mark.parametrize("stage", ["1", 1.0])
def test_a_stage_that_is_no_number_is_refused(stage: object, exported: tuple[Path, torch.Tensor]) -> None:
    with pytest.raises(OptionError, match="stage: expected a number, found "):
        stagepack.load_stage(exported[0], stage)  # type: ignore[call-overload]


def test_one_device_is_named_as_other_libraries_name_it(exported: tuple[Path, torch.Tensor]) -> None:
    for options in (
        {"device": "cpu"},
        {"devices": "cpu"},
        {"devices": torch.device("cpu")},
        {"devices": ["cpu", "cpu"]},
    ):
        pipeline = stagepack.load(exported[0], **options)
        assert pipeline.devices == ("cpu", "cpu")
        assert torch.equal(pipeline.to(device="cpu")(EXAMPLE), exported[1])
    assert stagepack.load_entry_points(exported[0], device="cpu").forward.devices == ("cpu", "cpu")
    with pytest.raises(OptionError, match="device, devices: expected one of them"):
        stagepack.load(exported[0], "cpu", device="cpu")
    with pytest.raises(DeviceError, match=r"device 'cuda:9'"):
        stagepack.load(exported[0], devices="cuda:9")


def test_the_types_of_a_pipeline_stay_those_of_the_export(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    with pytest.raises(OptionError, match="dtype: a bundle computes in the types of the export"):
        pipeline.to(torch.float16)
    with pytest.raises(OptionError, match="dtype: a bundle computes in the types of the export"):
        pipeline.to(dtype=torch.float16)


def test_each_attribute_of_a_module_works_or_has_an_answer(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    hidden = {"T_destination", "dump_patches", "call_super_init"}
    for name in {name for name in dir(torch.nn.Module) if not name.startswith("_")} - hidden:
        if not hasattr(pipeline, name):
            with pytest.raises(AttributeError, match=f"^Pipeline has no attribute '{name}': ."):
                getattr(pipeline, name)


def test_results_carry_gradients_as_the_documentation_of_load_says(exported: tuple[Path, torch.Tensor]) -> None:
    pipeline = stagepack.load(exported[0])
    pipeline(EXAMPLE).sum().backward()
    assert all(parameter.grad is not None for parameter in pipeline.parameters())
    with torch.no_grad():
        assert not pipeline(EXAMPLE).requires_grad
    with torch.inference_mode():
        assert pipeline(EXAMPLE).is_inference()
