"""ONNX Runtime as a runtime. Imports onnxruntime when it is used, and never torch."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from stagepack.errors import OperatorError
from stagepack.extras import install_command
from stagepack.format.reader import Bundle
from stagepack_loaders.base import ArrayOps, Loading, Runtime

if TYPE_CHECKING:
    from stagepack_loaders.onnxruntime.prepare import PreparedOnnxRuntimeStage
    from stagepack_loaders.onnxruntime.stage import OnnxRuntimeStage
    from stagepack_loaders.onnxruntime.values import ProviderDevice


def no_onnx_error(bundle: Bundle, stage_numbers: Sequence[int]) -> OperatorError:
    """The error for stages that have no ONNX model."""
    advice = "add ONNX models (stagepack onnx), or choose another runtime (--runtime torch; in Python runtime='torch')"
    if bundle.is_replaced():
        advice = "the bundle was written again after it was opened: open it again"
    return OperatorError(f"{bundle.location}: no ONNX model of stage {', '.join(map(str, stage_numbers))}: {advice}")


class OnnxRuntime(Runtime):
    """Runs the ONNX file of a stage in a session."""

    name = "onnxruntime"
    title = "ONNX Runtime"
    packages = ("onnxruntime", "ml_dtypes")
    install = install_command("onnxruntime")
    adapts = True

    @property
    def arrays(self) -> ArrayOps:
        """See `Runtime`."""
        from stagepack_loaders.onnxruntime.arrays import ONNX_RUNTIME_ARRAYS

        return ONNX_RUNTIME_ARRAYS

    def takes(self, value: object) -> bool:
        """See `Runtime`. Numpy arrays, into whose memory a stage writes, and values of ONNX Runtime, which stages return."""
        numpy, onnxruntime = sys.modules.get("numpy"), sys.modules.get("onnxruntime")
        is_numpy = numpy is not None and isinstance(value, numpy.ndarray)
        return is_numpy or (onnxruntime is not None and isinstance(value, onnxruntime.OrtValue))

    def parse_device(self, device: object) -> "ProviderDevice":
        """See `Runtime`."""
        from stagepack_loaders.onnxruntime.values import parse_provider_device

        return parse_provider_device(device)

    def stage_files(self, bundle: Bundle, stage_number: int) -> tuple[str, ...]:
        """See `Runtime`. The graph file says what the weights of the ONNX file are."""
        stage = bundle.stages[stage_number]
        if stage.onnx is None:
            raise no_onnx_error(bundle, [stage_number])
        return (stage.onnx.model, stage.graph, *stage.weights, *stage.onnx.weights)

    def prepare(
        self, bundle: Bundle, placement: "Mapping[int, ProviderDevice]", loading: Loading
    ) -> "dict[int, PreparedOnnxRuntimeStage]":
        """See `Runtime`. A session runs the operators of ONNX alone, and copies values into dense memory: of the options, `copy` counts."""
        from stagepack_loaders.onnxruntime.prepare import prepare_onnx_stages

        if stages_without_onnx := [
            stage_number for stage_number in placement if bundle.stages[stage_number].onnx is None
        ]:
            raise no_onnx_error(bundle, stages_without_onnx)
        return prepare_onnx_stages(bundle, placement, loading)

    def finish_stages(
        self, bundle: Bundle, stages: Mapping[int, Any], *, verify: bool
    ) -> "dict[int, OnnxRuntimeStage]":
        """See `Runtime`. The sessions are made in threads."""
        from stagepack_loaders.onnxruntime.prepare import finish_stages

        return finish_stages(bundle, stages, verify=verify)
