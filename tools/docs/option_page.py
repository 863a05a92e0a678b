"""The options of a command as a table, from the command itself."""

import importlib
from typing import Any

import click


def option_reference(command_name: str) -> str:
    """A table of the options of a subcommand: flag, default, allowed values, meaning."""
    command: click.Command = importlib.import_module(f"stagepack.cli.{command_name}_command").command
    table_rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for option in command.params:
        if isinstance(option, click.Option):
            flag_name = max(option.opts, key=len)
            cells = (f"`{flag_name}`", _default_text(option), _allowed_values(option.type), option.help or "")
            table_rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(table_rows)


def _default_text(option: click.Option) -> str:
    """The default of an option; empty for a switch and for an option without one."""
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
