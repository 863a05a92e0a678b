"""What the runtime says of itself."""

from collections.abc import Mapping

import numpy

from stagepack.errors import DeviceError
from stagepack.format.reader import Bundle
from stagepack_loaders.base import Loading, Runtime
from stagepack_loaders.numpy_arrays import NUMPY_ARRAYS, NumpyArrays
from tests.runtimes.numpy_runtime.stage import PreparedNumpyStage, prepare_stage


class NumpyRuntime(Runtime):
    """Interprets the graph of a stage with numpy."""

    name = "numpy"
    title = "numpy"
    packages: tuple[str, ...] = ("numpy",)
    install = "pip install numpy"

    @property
    def arrays(self) -> NumpyArrays:
        return NUMPY_ARRAYS

    def takes(self, value: object) -> bool:
        return isinstance(value, numpy.ndarray)

    def parse_device(self, device: object) -> str:
        if str(device) != "cpu":
            raise DeviceError(f"device {str(device)!r}: numpy runs stages on cpu")
        return "cpu"

    def stage_files(self, bundle: Bundle, stage_number: int) -> tuple[str, ...]:
        stage = bundle.stages[stage_number]
        return (stage.graph, *stage.weights)

    def prepare(self, bundle: Bundle, placement: Mapping[int, str], loading: Loading) -> dict[int, PreparedNumpyStage]:
        return {stage_number: prepare_stage(bundle, stage_number) for stage_number in placement}
