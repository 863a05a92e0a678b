"""How subcommands are declared."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import click


def subcommand(command_name: str, *, examples: Sequence[str]) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a function a subcommand.

    Args:
        command_name: the name of the subcommand.
        examples: command lines that the help shows below the docstring of the function.
    """

    def declare(function: Callable[..., Any]) -> click.Command:
        # click keeps the line breaks of a paragraph that starts with \b. Four spaces make it a code block in Markdown.
        lines = "\n".join(f"    {example}" for example in examples)
        description = f"{inspect.cleandoc(function.__doc__ or '')}\n\nExamples:\n\n\b\n{lines}"
        return click.command(command_name, help=description)(function)

    return declare
