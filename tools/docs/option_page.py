"""The options of a command as a table, from the command itself."""

import importlib

import click


def option_reference(command_name: str) -> str:
    """A table of the options of a subcommand: flag, default, allowed values, meaning."""
    command: click.Command = importlib.import_module(f"stagepack.cli.{command_name}_command").command
    rows = ["| option | default | allowed | meaning |", "|---|---|---|---|"]
    for option in command.params:
        if isinstance(option, click.Option):
            default = f"`{option.default:g}`" if isinstance(option.default, int | float) and not option.is_flag else ""
            if isinstance(option.default, str):
                default = f"`{option.default}`"
            rows.append(
                f"| `{max(option.opts, key=len)}` | {default} | {_allowed(option.type)} | {option.help or ''} |"
            )
    return "\n".join(rows)


def _allowed(kind: click.ParamType) -> str:
    """What values an option takes."""
    if isinstance(kind, click.Choice):
        return ", ".join(f"`{choice}`" for choice in kind.choices)
    if isinstance(kind, click.IntRange | click.FloatRange):
        return f"{kind.min:,} to {kind.max:,}"
    return ""
