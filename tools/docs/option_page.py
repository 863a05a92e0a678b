"""The commands and their options as Markdown, from the commands themselves."""

import importlib
import inspect
import textwrap
from typing import Any

import click

from stagepack.cli import main


def command_reference() -> str:
    """A section for each subcommand: what it does, its usage, its options."""
    # With the settings of the command: click keeps the help option that it makes for the first context.
    context = click.Context(main, info_name="stagepack", **main.context_settings)
    parts = [_help_text(main)]
    for command_name in main.list_commands(context):
        command = main.get_command(context, command_name)
        assert command is not None
        command_context = click.Context(command, info_name=command_name, parent=context)
        usage = command.get_usage(command_context).removeprefix("Usage: ")
        parts += [
            f"## {command_name}",
            f"```text\n{' '.join(usage.split())}\n```",
            _help_text(command),
            _option_table(command),
        ]
    return "\n\n".join(parts)


def option_reference(command_name: str) -> str:
    """A table of the options of a subcommand: flag, default, allowed values, meaning."""
    command: click.Command = importlib.import_module(f"stagepack.cli.{command_name}_command").command
    return _option_table(command)


def _option_table(command: click.Command) -> str:
    table_rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for option in command.params:
        if isinstance(option, click.Option):
            metavariable = f" {option.metavar}".replace("|", "\\|") if option.metavar else ""
            flags = ", ".join(f"`{flag}{metavariable}`" for flag in (*option.opts, *option.secondary_opts))
            meaning = (option.help or "").replace("|", "\\|")
            required = " Required." if option.required else ""
            cells = (flags, _default_text(option), _allowed_values(option.type), meaning + required)
            table_rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(table_rows)


def _help_text(command: click.Command) -> str:
    """The help of a command as Markdown: what click is told not to wrap is code."""
    paragraphs = []
    for paragraph in inspect.cleandoc(command.help or "").split("\n\n"):
        if paragraph.startswith("\b"):
            lines = paragraph.split("\n")[1:]
            heading = [] if lines[0].startswith(" ") else [lines.pop(0)]
            code = textwrap.dedent("\n".join(lines))
            paragraphs += [*heading, f"```text\n{code}\n```"]
        else:
            paragraphs.append(paragraph)
    return "\n\n".join(paragraphs)


def _default_text(option: click.Option) -> str:
    """The default of an option, as its help shows it; empty for a switch that is off, and for an option without a default."""
    if isinstance(option.show_default, str):
        return option.show_default
    if option.secondary_opts:
        return f"`{(option.opts if option.default else option.secondary_opts)[0]}`"
    if isinstance(option.default, str):
        return f"`{option.default}`"
    is_number = isinstance(option.default, int | float) and not option.is_flag
    return f"`{option.default:g}`" if is_number else ""


def _allowed_values(param_type: click.ParamType[Any, Any]) -> str:
    """What values an option takes."""
    if isinstance(param_type, click.Choice):
        return ", ".join(f"`{choice_value}`" for choice_value in param_type.choices)
    if isinstance(param_type, click.IntRange | click.FloatRange):
        if param_type.max is None:
            return "" if param_type.min is None else f"at least {param_type.min:,}"
        return f"{param_type.min or 0:,} to {param_type.max:,}"
    return ""
