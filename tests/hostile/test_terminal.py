"""What a bundle says of itself is shown, and never obeyed: not by a terminal, and not by who reads the JSON."""

import json
import logging
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from stagepack.cli import main
from stagepack_loaders.logs import TextFormatter
from tests.bundle_editor import BundleEditor, rename_value
from tests.hostile.attack import command_fails

# Clear the screen, set the title, C1 control, right-to-left override, and a line that looks like ours.
INDEX = "model.safetensors.index.json"
EVIL = "\x1b[2J\x1b]0;owned\x07\x9b31m\u202egnp.exe\r\nall rules hold"
STATE = f"{EVIL} of state"
STYLES = re.compile(r"\x1b\[[012]m")  # what we print ourselves: bold, dim, reset


def shown(*arguments: str) -> str:
    """What a command prints on a terminal with colours."""
    found = CliRunner().invoke(main, list(arguments), color=True)
    assert found.exit_code == 0, found.output
    return STYLES.sub("", found.stdout)


def dress(editor: BundleEditor) -> None:
    """Write what a terminal obeys wherever a bundle may have any text."""
    editor.edit_manifest(lambda fields: fields["producer"].update(stagepack=EVIL, torch=EVIL))
    editor.edit_graph(1, lambda fields: fields["scopes"][0].update(path=EVIL, type=EVIL))
    editor.edit_graph(1, lambda fields: fields.update(rename_value(fields, "first.weight", EVIL)))
    editor.edit_weight_header(
        "stage-1.safetensors",
        lambda fields: fields.update({EVIL: fields.pop("first.weight"), "first.bias": fields.pop("first.bias")}),
    )
    editor.edit_graph(2, lambda fields: fields.update(rename_value(fields, "calls", STATE)))
    editor.edit_weight_header(
        "stage-2.safetensors", lambda fields: fields.update({STATE: fields.pop("calls")}) if "calls" in fields else None
    )
    editor.edit_manifest(lambda fields: fields["entry_points"][0]["stages"][2].update(state=[STATE]))
    index = json.loads((editor / INDEX).read_bytes())
    new_names = {"first.weight": EVIL, "calls": STATE}
    index["weight_map"] = {new_names.get(name, name): file_name for name, file_name in index["weight_map"].items()}
    editor.write_file(INDEX, json.dumps(index).encode())


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--stage", "1"], ["verify", "--run"], ["load"]])
def test_nothing_that_a_bundle_says_reaches_the_terminal_as_a_command(
    arguments: list[str], editor: BundleEditor
) -> None:
    dress(editor)
    found = shown(*arguments, str(editor.path))
    assert all(line.isprintable() for line in found.split("\n"))
    assert not any(line.startswith("all rules hold") for line in found.split("\n"))
    if arguments[0] == "inspect":
        assert r"\x1b[2J" in found
        assert r"\u202e" in found


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--stage", "1"]])
def test_the_json_is_ascii_and_true(arguments: list[str], editor: BundleEditor) -> None:
    dress(editor)
    text = shown(*arguments, "--json", str(editor.path))
    assert text.isascii()
    assert all(line.isprintable() for line in text.split("\n"))
    facts = json.loads(text)
    assert EVIL in (
        facts["producer"].values() if "producer" in facts else [weight["name"] for weight in facts["weights"]]
    )


def test_errors_are_one_printable_line_whatever_they_quote(editor: BundleEditor) -> None:
    editor.edit_manifest(lambda fields: fields.update(rename_value(fields, "gelu_2", EVIL)))
    line = command_fails("verify", str(editor.path), says="is not an identifier")
    assert line[:-1].isprintable()


def test_a_record_of_the_log_is_one_printable_line() -> None:
    record = logging.LogRecord("stagepack", logging.ERROR, "", 0, "refused: %s", (EVIL,), None)
    line = TextFormatter("%(levelname)s %(message)s").format(record)
    assert line.isprintable()
    assert line.startswith(r"ERROR refused: \x1b[2J\x1b]0;owned\x07")
    assert line.endswith(" all rules hold")


def test_a_traceback_in_the_log_is_printable_and_has_no_line_that_begins_like_a_record() -> None:
    error = ValueError(EVIL)
    record = logging.LogRecord("stagepack", logging.ERROR, "", 0, "failed", None, (ValueError, error, None))
    record.exc_text = EVIL  # as another formatter leaves it
    for _ in range(2):
        line, *traceback_lines = TextFormatter("%(message)s").format(record).split("\n")
        assert line == "failed"
        assert traceback_lines[-1] == "  all rules hold"
        assert all(
            traceback_line.startswith("  ") and traceback_line.isprintable() for traceback_line in traceback_lines
        )
        record.exc_text = None


def test_a_path_of_any_bytes_is_shown(tmp_path: Path) -> None:
    command_fails("inspect", str(tmp_path / EVIL.replace("/", "")), says="not a stagepack bundle")
    command_fails("inspect", str(tmp_path / "\udcff\udcfe"), says="not a stagepack bundle")
