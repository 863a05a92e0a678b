"""PyTorch as a runtime. Imports torch when it is used."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from stagepack.extras import install_command
from stagepack.format.reader import Bundle
from stagepack.partition.target_devices import TargetDevice
from stagepack_loaders.base import ArrayOps, Loading, Runtime
from stagepack_loaders.options import LoadOptions
from stagepack_loaders.update_report import UpdateReport
from stagepack_loaders.weight_changes import WeightChanges

if TYPE_CHECKING:
    import torch

    from stagepack_loaders.torch.prepare import PreparedTorchStage
    from stagepack_loaders.torch.stage import TorchStage


class TorchRuntime(Runtime):
    """Runs the graph of a stage as a `torch.nn.Module`."""

    name = "torch"
    title = "PyTorch"
    packages = ("torch",)
    install = install_command("torch")
    keeps_strides = True
    runs_modules = True
    compiles = True
    streams = True
    moves = True
    joins = True
    adapts = True

    @property
    def arrays(self) -> ArrayOps:
        """See `Runtime`."""
        from stagepack_loaders.torch.arrays import TORCH_ARRAYS

        return TORCH_ARRAYS

    def takes(self, value: object) -> bool:
        """See `Runtime`."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(value, torch.Tensor)

    def parse_device(self, device: object) -> "torch.device":
        """See `Runtime`."""
        from stagepack_loaders.torch.devices import parse_device

        return parse_device(device)

    def own_devices(self) -> list[TargetDevice]:
        """See `Runtime`."""
        from stagepack_loaders.torch.own_devices import own_devices

        return own_devices()

    def stage_files(self, bundle: Bundle, stage_number: int) -> tuple[str, ...]:
        """See `Runtime`."""
        stage = bundle.stages[stage_number]
        return (*stage.graph_files, *stage.weights)

    def prepare(
        self, bundle: Bundle, placement: "Mapping[int, torch.device]", loading: Loading
    ) -> "Mapping[int, PreparedTorchStage]":
        """See `Runtime`."""
        from stagepack_loaders.torch.prepare import prepare_stages

        return prepare_stages(bundle, placement, loading)

    def finish_stages(self, bundle: Bundle, stages: Mapping[int, Any], *, verify: bool) -> "dict[int, TorchStage]":
        """See `Runtime`. Threads bring the weights of all stages at a time."""
        from stagepack_loaders.torch.prepare import finish_prepared_stages

        return finish_prepared_stages(stages, verify=verify)

    def compile_stages(
        self, bundle: Bundle, stages: Mapping[int, Any], options: LoadOptions
    ) -> "dict[int, PreparedTorchStage]":
        """See `Runtime`."""
        from stagepack_loaders.torch.compilation import compile_stages

        return compile_stages(bundle, stages, options)

    def move_stages(self, bundle: Bundle, stages: Mapping[int, Any], placement: "Mapping[int, torch.device]") -> None:
        """See `Runtime`. Stages that are moved to one device share the tensors that they shared before."""
        from stagepack_loaders.torch.prepare import move_stages

        move_stages(bundle, stages, placement)

    def check_update(self, stages: Mapping[int, Any]) -> None:
        """See `Runtime`."""
        from stagepack_loaders.torch.staged_weights import check_update

        check_update(stages)

    def stage_version(
        self,
        bundle: Bundle,
        running: Mapping[int, Any],
        changes: WeightChanges,
        loading: Loading,
        report: UpdateReport,
    ) -> "dict[int, TorchStage]":
        """See `Runtime`. Stages of all versions run the same code, and share the weights that are the same."""
        from stagepack_loaders.torch.staged_weights import stage_version

        return stage_version(bundle, running, changes, loading, report)

    def adapt_stages(self, bundle: Bundle, running: Mapping[int, Any], loading: Loading) -> "dict[int, TorchStage]":
        """See `Runtime`."""
        from stagepack_loaders.torch.prepare import adapt_stages

        return adapt_stages(bundle, running, loading)

    def compile_seconds(self) -> float:
        """See `Runtime`."""
        from stagepack.torch_internals import torch_compile_seconds

        return torch_compile_seconds()

    def seed(self, seed: int) -> None:
        """See `Runtime`."""
        import torch

        torch.manual_seed(seed)

    def inference(self, *, for_autograd: bool = True) -> AbstractContextManager[Any]:
        """See `Runtime`. A step of a decoder takes 4 % less without what autograd needs to know."""
        import torch

        return torch.no_grad() if for_autograd else torch.inference_mode()

    def wait(self, device: "torch.device") -> None:
        """See `Runtime`."""
        import torch

        if device.type not in ("cpu", "meta"):
            torch.accelerator.synchronize(device)
