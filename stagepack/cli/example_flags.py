"""The options that state example inputs, shared by `export`, `plan` and `doctor`."""

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from stagepack.capture.stated_inputs import ExampleArguments

_OPTIONS = (
    click.option(
        "--inputs",
        "function_name",
        metavar="FILE.py:FUNCTION",
        show_default="those that SOURCE returns",
        help="Function that returns the example inputs: a tuple by position, a dict by name, or stagepack.Inputs.",
    ),
    click.option(
        "--input",
        "texts",
        multiple=True,
        metavar="NAME=INPUT",
        help="An example input, such as x=float32[batch=2..512,64], where batch may change, n=3, mask=none, x=@x.npy or @inputs.npz; of "
        "a Hugging Face model of images also @image.png. Repeatable.",
    ),
    click.option(
        "--dynamic",
        multiple=True,
        metavar="NAME:AXIS[=SYMBOL]",
        help="Size of an input that may change, such as x:0=batch or x:0=batch=2..512; NAME alone for a whole number. Repeatable.",
    ),
)


def example_flags(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a subcommand, which receives them as the argument `make_example`.

    It is a function that returns `ExampleArguments`, because that class needs torch, which is imported after the command line is checked.
    It is None when none of the options is used.
    """

    @functools.wraps(function)
    def wrapped(function_name: str | None, texts: tuple[str, ...], dynamic: tuple[str, ...], **arguments: Any) -> Any:
        if function_name is not None and texts:
            raise click.UsageError("--inputs and --input cannot be used together")

        def make_example() -> "ExampleArguments":
            from stagepack.capture.stated_inputs import ExampleArguments  # noqa: PLC0415 - torch, see above

            return ExampleArguments(function=function_name, texts=texts, dynamic=dynamic)

        is_used = function_name is not None or texts or dynamic
        return function(make_example=make_example if is_used else None, **arguments)

    return functools.reduce(lambda decorated, option: option(decorated), reversed(_OPTIONS), wrapped)
