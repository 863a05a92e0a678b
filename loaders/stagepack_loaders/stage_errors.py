"""Errors that a stage raises in a call, as errors of stagepack.

They are values of the inputs that are out of range, a GPU that computes nothing more in this process, and other failures.

Torch and ONNX Runtime have no common class for values that are out of range, such as a token id outside the vocabulary: torch raises
`IndexError` or, like ONNX Runtime, `RuntimeError` with one of the messages below.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from stagepack.errors import InputError, StageFailedError, StageLostError, StagepackError, first_line
from stagepack_loaders.file_leases import check_files_in_use

_OUT_OF_RANGE: Final = re.compile(
    "|".join(
        (
            r"index \S+ is out of bounds for dimension",  # torch: gather, scatter, index_add
            r"Index \d+ of input takes value",  # torch: embedding_bag
            r"Class values must be",  # torch: one_hot
            r"index out of bounds: ",  # torch: code that Inductor compiled
            r"Runtime assertion failed for expression",  # torch.export: checks of values that the capture recorded
            r"indices element out of data bounds",  # ONNX Runtime: Gather, ScatterElements
            r"Out of range value in index tensor",  # ONNX Runtime: GatherElements
            r"invalid ind(ex|ice) found",  # ONNX Runtime: GatherND, ScatterND
        )
    )
)

# Errors after which CUDA fails every call in the process, of torch ("CUDA error: ...") and of ONNX Runtime ("CUDA failure 710: ...").
# The documentation of the CUDA runtime says that they "leave the process in an inconsistent state".
_DEVICE_LOST: Final = re.compile(
    r"CUDA (?:error|failure \d+): (?:"
    + "|".join(
        (
            "device-side assert triggered",  # an index out of range
            "an illegal memory access was encountered",
            "unspecified launch failure",
            "misaligned address",
            "an illegal instruction was encountered",
            "the launch timed out and was terminated",
            "uncorrectable ECC error encountered",
            "hardware stack error",
            "invalid program counter",
        )
    )
    + ")"
)


@contextlib.contextmanager
def typed_stage_errors(stage_number: int) -> Iterator[None]:
    """Raise the errors of a stage as errors of stagepack, with the original error as their cause.

    A message has the class and the first line of the original message: further lines may be a native stack trace.
    """
    try:
        check_files_in_use()
        yield
        check_files_in_use()
    except StagepackError:
        raise
    except Exception as error:
        if type(error).__module__ == "torch.utils.checkpoint":
            raise  # it ends the computation of what a checkpoint has not kept
        message = _out_of_range_message(error)
        if message is not None:
            raise InputError(f"an input value is out of range in stage {stage_number}: {message}") from error
        reason = f"{type(error).__name__}: {first_line(error)}"
        if _DEVICE_LOST.search(str(error)):
            lost = (
                f"stage {stage_number}, or one before it, failed on its device, which computes nothing more in this process: {reason}: "
                "an index out of range is such an error: start the process again"
            )
            raise StageLostError(lost, stages=(stage_number,)) from error
        raise StageFailedError(f"stage {stage_number} failed: {reason}") from error


def _out_of_range_message(error: Exception) -> str | None:
    """The first line of the message from where it names the value; None if the error has another cause."""
    message = str(error)
    match = _OUT_OF_RANGE.search(message)
    if match is None and not isinstance(error, IndexError):
        return None
    return first_line(message[match.start() :] if match else message)
