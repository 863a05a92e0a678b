"""How the models of a repository run."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from stagepack_loaders.registry import TORCH_RUNTIME

# Backends of Triton that run a stage. ``python`` runs any runtime of stagepack; ``onnxruntime`` runs the ONNX file without stagepack.
BACKENDS: Final = ("python", "onnxruntime")


@dataclass(frozen=True, slots=True, kw_only=True)
class RepositoryOptions:
    """How the models of a repository run.

    Attributes:
        model_name: the name of the ensemble; the names of the other models begin with it.
        devices: the device of each stage, in order: ``cpu``, ``cuda`` or ``cuda:N``; with fewer devices, consecutive stages share one.
        runtime: the runtime of the stages in the Python backend.
        backend: one of `BACKENDS`.
        max_batch_size: the largest batch that Triton joins requests to; 0 runs each request alone. Only 0 is valid where
            `batching_obstacle` finds a reason.
        batching_delay: the time that a request waits for others to join its batch, in seconds.
        max_sequences: the number of sequences whose state a stage keeps.
        sequence_idle: the time without requests after which a sequence is evicted, in seconds.
        allow_ops: as for `stagepack.load`.
        imports: modules that register custom operators.
        copy: whether to copy the files of the bundle; else they are hard links.
    """

    model_name: str
    devices: Sequence[str] = ("cpu",)
    runtime: str = TORCH_RUNTIME
    backend: str = "python"
    max_batch_size: int = 0
    batching_delay: float = 0.0
    max_sequences: int = 8
    sequence_idle: float = 60.0
    allow_ops: Sequence[str] = ()
    imports: Sequence[str] = ()
    copy: bool = False
