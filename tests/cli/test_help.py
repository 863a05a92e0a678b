"""The help of each command: its summary, its examples, its options and their defaults."""

import re
import shlex
from collections.abc import Iterator

import click
import pytest
from click.testing import CliRunner

from stagepack.cli import main
from stagepack.options import options_of
from stagepack_loaders.options import LoadOptions, ProcessOptions, WeightOptions
from stagepack_loaders.registry import runtime_names
from stagepack_serving.server.limits import ServerLimits

CONTEXT = click.Context(main, info_name="stagepack")
COMMANDS = {command_name: main.get_command(CONTEXT, command_name) for command_name in main.list_commands(CONTEXT)}


def options(command: click.Command) -> Iterator[click.Option]:
    """The options of a command that take a value."""
    for parameter in command.params:
        if isinstance(parameter, click.Option) and not parameter.is_flag and parameter.flag_value is None:
            yield parameter


@pytest.mark.parametrize("command_name", COMMANDS)
def test_the_summary_is_the_same_in_both_helps(command_name: str) -> None:
    root_help = CliRunner().invoke(main, ["--help"]).output
    [summary] = re.findall(rf"^  {command_name} +(.*)$", root_help, re.MULTILINE)
    shown = CliRunner().invoke(main, [command_name, "--help"]).output
    assert shown.splitlines()[2] == f"  {summary}"


@pytest.mark.parametrize("command_name", COMMANDS)
def test_the_examples_are_valid_command_lines(command_name: str) -> None:
    command = COMMANDS[command_name]
    assert command is not None
    examples = re.findall(r"^    stagepack (.*)$", command.help or "", re.MULTILINE)
    assert examples
    for example in examples:
        subcommand_name, *arguments = shlex.split(example.partition("|")[0])
        subcommand = COMMANDS[subcommand_name]
        assert subcommand is not None
        subcommand.make_context(subcommand_name, arguments, parent=CONTEXT)


@pytest.mark.parametrize("command_name", [*COMMANDS, ""])
def test_no_line_is_wider_than_80_columns(command_name: str) -> None:
    shown = CliRunner().invoke(main, [*filter(None, [command_name]), "--help"]).output
    assert [line for line in shown.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize("command_name", COMMANDS)
def test_every_option_has_a_help_and_those_with_a_value_show_the_default(command_name: str) -> None:
    command = COMMANDS[command_name]
    assert command is not None
    assert all(option.help or option.hidden for option in command.params if isinstance(option, click.Option))
    for option in options(command):
        extra = option.get_help_extra(click.Context(command))
        assert option.required or "default" in extra, option.name


@pytest.mark.parametrize(
    ("command_name", "options_class"),
    [("load", WeightOptions), ("load", LoadOptions), ("serve", ProcessOptions), ("serve", ServerLimits)],
)
def test_an_option_of_a_class_has_its_name_help_and_default_on_the_command_line(
    command_name: str, options_class: type
) -> None:
    command = COMMANDS[command_name]
    assert command is not None
    flags = {word: parameter for parameter in command.params for word in parameter.opts}
    for field_name, (option, _, default) in options_of(options_class).items():
        found = flags[option.usage.split()[0]]
        assert isinstance(found, click.Option)
        assert found.help == option.meaning.format(runtimes=", ".join(runtime_names()))
        if options_class is ServerLimits:
            assert found.get_default(CONTEXT) == pytest.approx(default / option.unit), field_name
