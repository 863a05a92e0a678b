"""The ``stagepack`` command: one file a subcommand, imported when the subcommand is called."""

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import click

from stagepack.cli.failures import failure_of

# The subcommands with their summaries, which are also the first lines of their own help.
_COMMAND_GROUPS = {
    "Write bundles": {
        "export": "Write a model as a bundle.",
        "doctor": "Find out why a model cannot be exported, and what would work.",
        "plan": "Show how a model or a bundle would be cut.",
        "recut": "Write a bundle with another cut.",
        "onnx": "Add ONNX files to a bundle.",
        "compile": "Compile a bundle to native code.",
    },
    "Examine bundles": {
        "inspect": "Show the stages, edges and nodes of a bundle.",
        "verify": "Check a bundle against its digests and the format rules.",
        "sign": "Sign a bundle.",
        "diff": "Show what differs between two bundles.",
        "report": "Write a report about a bundle as an HTML page.",
    },
    "Exchange bundles": {
        "pull": "Download a bundle into a folder.",
        "push": "Upload a bundle to the Hugging Face Hub.",
        "cache": "List the downloaded bundles, or remove some.",
    },
    "Run bundles": {
        "load": "Load a bundle and run its example.",
        "profile": "Measure how long the operators of a bundle take.",
        "serve": "Serve bundles over the Open Inference Protocol.",
        "triton": "Write a bundle into a Triton model repository.",
        "k8s": "Write a deployment on Kubernetes.",
    },
}


class _Commands(click.Group):
    """The subcommands. Their modules are imported only when they are called, so that each one starts fast."""

    def main(self, args: Sequence[str] | None = None, *, standalone_mode: bool = True, **extra: Any) -> Any:  # type: ignore[override]
        """Run the command line; an error of any kind is one line on standard error and exit status 1."""
        try:
            return super().main(args, standalone_mode=standalone_mode, **extra)
        except click.ClickException:
            raise  # only without standalone_mode, where the caller handles it
        except Exception as error:
            failure = failure_of(error)
            if not standalone_mode:
                raise failure from error
            failure.show()
            sys.exit(failure.exit_code)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [command_name for summaries in _COMMAND_GROUPS.values() for command_name in summaries]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = importlib.import_module(f"stagepack.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # The names are padded to one width, so that the summaries of all groups begin in the same column.
        name_width = max(map(len, self.list_commands(ctx)))
        for title, summaries in _COMMAND_GROUPS.items():
            with formatter.section(title):
                formatter.write_dl([(name.ljust(name_width), summary) for name, summary in summaries.items()])


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

    The exit status is 0 on success, 1 if a check fails or an input is bad, and 2 if the command line is wrong. Set
    STAGEPACK_TRACEBACK=1 to print the Python traceback of an error.
    """
