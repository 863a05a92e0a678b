"""`stagepack completion`."""

from typing import Literal

import click
from click.shell_completion import get_completion_class

from stagepack.cli.command import argument, option_object, subcommand
from stagepack.cli.output import print_text

_VARIABLE = "_STAGEPACK_COMPLETE"


@option_object
class _Options:
    shell: Literal["bash", "zsh", "fish"] = argument()


@subcommand("completion", examples=["stagepack completion bash", "stagepack completion fish"])
def command(options: _Options) -> None:
    """Print the script with which a shell completes words.

    In ~/.bashrc or ~/.zshrc, eval "$(stagepack completion bash)" or zsh loads it; fish reads it from
    ~/.config/fish/completions/stagepack.fish. It completes commands, options and their values.
    """
    completion_class = get_completion_class(options.shell)
    assert completion_class is not None
    program = click.get_current_context().find_root()
    print_text(completion_class(program.command, {}, "stagepack", _VARIABLE).source())
