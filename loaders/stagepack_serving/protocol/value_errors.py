"""Errors that the values of a request cause in a stage, such as a token number outside the vocabulary.

The client can correct them, so each protocol reports them as an invalid argument; any other error of a stage is the server's. Torch and
ONNX Runtime have no common class for them: torch raises `IndexError` or, like ONNX Runtime, `RuntimeError` with one of the messages below.
"""

import contextlib
import re
from collections.abc import Iterator
from typing import Final

from stagepack.errors import InputError

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


@contextlib.contextmanager
def raises_input_errors(stage_number: int) -> Iterator[None]:
    """Raise an error of a stage as `InputError` where the values of its inputs cause it; leave other errors as they are.

    The message repeats only the part of the original message that names the value: what surrounds it may hold paths of this machine.

    Args:
        stage_number: the stage that runs inside the context, for the message.

    Raises:
        InputError: the stage raised `IndexError`, or an error whose message says that an index is out of range or that a check which
            the capture recorded failed.
    """
    try:
        yield
    except Exception as error:
        message = _out_of_range_message(error)
        if message is None:
            raise
        raise InputError(f"an input value is out of range in stage {stage_number}: {message}") from error


def _out_of_range_message(error: Exception) -> str | None:
    """The first line of the message from where it names the value; None if the error has another cause."""
    message = str(error)
    match = _OUT_OF_RANGE.search(message)
    if match is None and not isinstance(error, IndexError):
        return None
    return message[match.start() if match else 0 :].partition("\n")[0]
