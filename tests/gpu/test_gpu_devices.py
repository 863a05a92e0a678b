"""The GPUs that a process may use."""

import pytest
import torch

from stagepack_loaders.torch.own_devices import own_devices

pytestmark = pytest.mark.gpu


def test_each_gpu_is_found_with_its_free_memory(device: torch.device) -> None:
    gpus = [found for found in own_devices() if found.name != "cpu"]
    assert len(gpus) == torch.cuda.device_count()
    for index, gpu in enumerate(gpus):
        assert gpu.name == f"cuda:{index}"
        assert 0 < (gpu.memory_limit or 0) <= torch.cuda.get_device_properties(index).total_memory
    assert device.type == "cpu" or gpus
