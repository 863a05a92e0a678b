"""The `stagepack` command: one file a subcommand, imported when it is called."""

import importlib
from typing import Any

import click

_COMMANDS = {
    "compile": "Compile a bundle to native code, kept outside of it.",
    "export": "Write a model as a bundle of pipeline stages.",
    "inspect": "Show what a bundle holds, without torch.",
    "load": "Load a bundle or one stage, and run it.",
    "onnx": "Add ONNX files that use the weights of a bundle.",
    "plan": "Show a cut: bytes, compute, traffic, balance.",
    "recut": "Write a bundle in other stages, without torch.",
    "report": "Draw a bundle as one HTML page.",
    "serve": "Serve bundles by the Open Inference Protocol.",
    "triton": "Write a bundle as a Triton model repository.",
    "verify": "Check the digests and rules of a bundle.",
}


class _Commands(click.Group):
    """Subcommands by name; the module of one is imported only when it is called, so that each starts fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"stagepack.cli.{cmd_name}_command").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="stagepack")
def main(**_: Any) -> None:
    """Ship partitioned PyTorch models as bundles of pipeline stages."""
