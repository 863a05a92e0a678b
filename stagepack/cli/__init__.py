"""The ``stagepack`` command: one file a subcommand, imported when the subcommand is called."""

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from click.shell_completion import CompletionItem

from stagepack.cli.failures import failure_of
from stagepack.cli.termination import orderly_interrupt

# The subcommands with their summaries, which are also the first lines of their own help.
_COMMAND_GROUPS = {
    "Write bundles": {
        "export": "Write a model as a bundle.",
        "doctor": "Find out why a model cannot be exported, and what would work.",
        "plan": "Show how a model or a bundle would be cut.",
        "recut": "Write a bundle with another cut.",
        "onnx": "Add ONNX files to a bundle.",
        "adapter": "Write an adapter of peft for a bundle, or merge it into one.",
        "asset": "Add files such as a tokenizer to a bundle, list or remove them.",
        "compile": "Compile a bundle to native code.",
        "delta": "Write what differs between a bundle and its next version.",
        "apply": "Write the bundle that deltas make of another one.",
    },
    "Examine bundles": {
        "inspect": "Show a bundle in stages, or what a delta or an adapter changes.",
        "verify": "Check a bundle, a delta or an adapter by its digests and the rules.",
        "sign": "Sign a bundle, a delta or an adapter.",
        "diff": "Show what differs between two bundles or adapters, or in a delta.",
        "report": "Write a report about a bundle as an HTML page.",
    },
    "Exchange bundles": {
        "pull": "Download a bundle, a delta or an adapter into a folder.",
        "push": "Upload a bundle, a delta or an adapter to the Hugging Face Hub.",
        "cache": "List the downloaded bundles, or remove some.",
    },
    "Run bundles": {
        "load": "Load a bundle and run its example.",
        "profile": "Measure how long the operators of a bundle take.",
        "serve": "Serve bundles over the Open Inference Protocol.",
        "triton": "Write a bundle into a Triton model repository.",
    },
}

# That of a program that a shell sees end by SIGINT.
_INTERRUPTED_STATUS = 130


class _Commands(click.Group):
    """The subcommands. Their modules are imported only when they are called, so that each one starts fast."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command line; an error of any kind is one line on standard error and exit status 1, an interrupt exit status 130."""
        _open_closed_streams()
        try:
            with orderly_interrupt():
                status = super().main(args, standalone_mode=False, **extra)
        except Exception as error:  # noqa: BLE001 - an error of any kind is one line
            expected = (click.ClickException, click.Abort)  # the caller handles them without standalone_mode
            failure = error if isinstance(error, expected) else failure_of(error)
            if not standalone_mode:
                raise failure from (None if failure is error else error)
            if isinstance(failure, click.Abort):
                click.echo("stagepack: interrupted", err=True)
                sys.exit(_INTERRUPTED_STATUS)
            failure.show()
            sys.exit(failure.exit_code)
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        command_name = args[0]
        if command_name not in (names := self.list_commands(ctx)) and not command_name.startswith("-"):
            close = [f"stagepack {name}" for name in difflib.get_close_matches(command_name, names, cutoff=0.5)]
            hint = f" Did you mean {' or '.join(close)}?" if close else ""
            ctx.fail(f"No such command {command_name!r}.{hint}")
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command_name for summaries in _COMMAND_GROUPS.values() for command_name in summaries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"stagepack.cli.{cmd_name}_command").command
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands and the options that begin so: by their summaries, without an import of the commands."""
        summaries = {name: summary for group in _COMMAND_GROUPS.values() for name, summary in group.items()}
        commands = [
            CompletionItem(name, help=summary) for name, summary in summaries.items() if name.startswith(incomplete)
        ]
        return commands + click.Command.shell_complete(self, ctx, incomplete)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The names are padded to one width, so that the summaries of all groups begin in the same column.
        name_width = max(map(len, self.list_commands(ctx)))
        for title, summaries in _COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(name_width), summary) for name, summary in summaries.items()])


def _open_closed_streams() -> None:
    """Open /dev/null as each standard stream that the caller has closed.

    Otherwise the next file has its number: what a library logs is written into a bundle, and uvloop aborts when it closes such a socket.
    """
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Run 'stagepack COMMAND --help' for the options and examples of a command.",
)
@click.version_option(package_name="stagepack")
def main(**_: Any) -> None:
    """Cut PyTorch models into pipeline stages, and store, check and run them as bundles.

    A bundle is a folder that holds the graph and the weights of each stage. It is opened without pickle and without the source code of
    the model.

    The exit status is 0 on success, 1 if a check fails or an input is bad, 2 if the command line is wrong, and 130 after Ctrl-C. Set
    STAGEPACK_TRACEBACK=1 to print the Python traceback of an error.
    """
