"""Errors that a stage raises on the inputs of a request: whether the client or the server has to correct them.

Values that are out of range, such as a token id outside the vocabulary, are an invalid argument of the client. Torch and ONNX Runtime
have no common class for them: torch raises `IndexError` or, like ONNX Runtime, `RuntimeError` with one of the messages below. Any other
error of a stage is a failure of the server.
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

    The message repeats only the part of the original message that names the value: the rest may contain paths of this machine.

    Args:
        stage_number: the stage that runs inside the context, for the message.

    Yields:
        Nothing.

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


def failure_message(error: Exception) -> str:
    """Describe an error of a stage that is a failure of the server, for the client.

    Args:
        error: the error.

    Returns:
        Its class and the first line of its message: further lines may be a native stack trace with paths of this machine.
    """
    return f"the model failed: {type(error).__name__}: {_first_line(str(error))}"


def _out_of_range_message(error: Exception) -> str | None:
    """The first line of the message from where it names the value; None if the error has another cause."""
    message = str(error)
    match = _OUT_OF_RANGE.search(message)
    if match is None and not isinstance(error, IndexError):
        return None
    return _first_line(message[match.start() :] if match else message)


def _first_line(message: str) -> str:
    return message.partition("\n")[0]
