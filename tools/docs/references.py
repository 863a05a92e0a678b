"""References as Markdown, from the code itself: commands, options, errors, the rules of the specification; and figures of the coverage."""

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

import click

from stagepack import errors
from stagepack.cli import main
from tools.docs.markdown import table, table_cell

_ROOT = Path(__file__).parents[2]
_SPECIFICATION_PATH = _ROOT / "schema" / "SPEC.md"
_RULE_PATTERN = re.compile(
    r'^\*\*([A-Z]\d+)\*\*<a id="\1"></a> (.*?)(?=^\*\*[A-Z]\d+\*\*|^\||^#|^-|\Z)', re.MULTILINE | re.DOTALL
)
_COVERAGE_PATH = _ROOT / "docs" / "coverage.md"
# Side -> its columns in the table of models, from 0: at the sizes of the example, and at other sizes.
_COVERAGE_COLUMNS = {"stagepack": (2, 3), "pipelining": (6, 7)}


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
    rows = []
    for option in command.params:
        if isinstance(option, click.Option):
            metavariable = f" {option.metavar}".replace("|", "\\|") if option.metavar else ""
            flags = ", ".join(f"`{flag}{metavariable}`" for flag in (*option.opts, *option.secondary_opts))
            meaning = (option.help or "").replace("|", "\\|") + (" Required." if option.required else "")
            rows.append((flags, _default_text(option), _allowed_values(option.type), meaning))
    return table(("option", "default", "allowed", "meaning"), rows)


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


def error_reference() -> str:
    """A table of the classes of errors and warnings."""
    rows = []
    for class_name, error_class in inspect.getmembers(errors, inspect.isclass):
        if issubclass(error_class, errors.StagepackError | Warning):
            base_names = ", ".join(f"`{base_class.__name__}`" for base_class in error_class.__bases__)
            rows.append((f"`{class_name}`", base_names, _first_paragraph(inspect.getdoc(error_class) or "")))
    return table(("class", "base", "meaning"), rows)


def rule_reference() -> str:
    """A table of the rules, each with its first sentence."""
    rows = []
    for rule_number, rule_text in specified_rules():
        first_sentence = re.split(r"(?<=[.:])\s", _first_paragraph(rule_text), maxsplit=1)[0].rstrip(":")
        rows.append((f"[{rule_number}](../../schema/SPEC.md#{rule_number})", first_sentence))
    return table(("rule", "requirement"), rows)


def specified_rules() -> list[tuple[str, str]]:
    """The number and the text of each rule of the specification."""
    return [(match[1], match[2]) for match in _RULE_PATTERN.finditer(_SPECIFICATION_PATH.read_text())]


def _first_paragraph(text: str) -> str:
    return table_cell(text.split("\n\n")[0])


def coverage_figures() -> str:
    """How many models are right on each side of `docs/coverage.md`, at the sizes of the example and at others."""
    lines = _COVERAGE_PATH.read_text().partition("\n## Models\n")[2].partition("\n## ")[0].splitlines()
    models = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    _, other_size_column = _COVERAGE_COLUMNS["stagepack"]
    dynamic_models = [cells for cells in models if cells[other_size_column]]
    heading = f"{len(dynamic_models)} of them, called with other sizes than the example's"
    rows = [
        (side, _outcomes(models, column), _outcomes(dynamic_models, other_column))
        for side, (column, other_column) in _COVERAGE_COLUMNS.items()
    ]
    return table(("", f"{len(models)} models", heading), rows)


def _outcomes(models: list[list[str]], column: int) -> str:
    """How many models are right, raise an error, and answer wrongly without one."""
    outcomes = [cells[column] for cells in models]
    right, wrong = outcomes.count("right"), outcomes.count("wrong")
    failed = len(outcomes) - right - wrong
    parts = [f"{right} right"]
    if failed:
        parts.append(f"{failed} raise an error")
    if wrong:
        parts.append(f"{wrong} wrong without an error")
    return ", ".join(parts)
