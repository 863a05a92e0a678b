"""A file with example inputs of a model, for a user to complete."""

import inspect
from typing import Any

import torch

from stagepack.capture.inputs import Inputs, required_parameters
from stagepack.errors import STARTING_FILE_MARK


def starting_file(model: Any, inputs: Inputs) -> str:
    """Return the end of an error message: what to pass, and after an empty line the content of the file to start from."""
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", ())
    needed = ([main] if isinstance(main, str) else list(main)) + required_parameters(model.forward)
    named = dict.fromkeys(input_name for input_name in needed if input_name in parameters) | dict(inputs.kwargs)
    other_names = [
        input_name
        for input_name, parameter in parameters.items()
        if input_name not in named and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    ]
    lines = [
        "import torch",
        "",
        "",
        "def inputs():",
        f"    # {type(model).__name__} also takes {', '.join(other_names)}." if other_names else "",
        "    return {",
        *(f"        {input_name!r}: {_expression(value)}" for input_name, value in named.items()),
        "    }",
    ]
    file_text = "\n".join(line for index, line in enumerate(lines) if line or index < 3)
    return f": write its inputs into a file such as inputs.py, and {STARTING_FILE_MARK}{file_text}"


def _expression(value: Any) -> str:
    if value is None:
        return "torch.zeros(2, 8),  # its shape and dtype are not known"
    if not isinstance(value, torch.Tensor):
        return f"{value!r},"
    shape = ", ".join(map(str, value.shape))
    function = "rand" if value.is_floating_point() else "ones"
    return f"torch.{function}({shape}, dtype={value.dtype}),"
