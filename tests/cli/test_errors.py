"""Bad input, streams that are closed or full, and packages that are missing: one line that says what, where and what to do."""

import json
import os
import re
import subprocess
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from stagepack.cli import main
from tests.cli.absent_packages import run_without
from tests.cli.test_process import STAGEPACK
from tests.hostile.attack import command_fails

COMMANDS = main.list_commands(click.Context(main))
# Before it reads a bundle.
TAKES_PORTS = pytest.mark.process
OUT = ("apply", "compile", "delta", "export", "profile", "recut", "report", "triton")


@pytest.fixture
def folder(user: Path) -> Path:
    """The current folder, with things that are no bundles in it."""
    (user / "empty").mkdir()
    (user / "file.txt").touch()
    (user / "bad.json").write_text("{}")
    (user / "broken").mkdir()
    (user / "broken" / "manifest.json").write_text("hi")
    (user / "link").symlink_to("nowhere")
    return user


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("nowhere", "no such path"),
        ("empty", "a folder without it"),
        ("file.txt", "a file"),
        ("link", "a link that leads nowhere"),
    ],
)
@pytest.mark.parametrize(
    "command",
    [
        pytest.param(command, marks=TAKES_PORTS if command == "serve" else ())
        for command in COMMANDS
        if command not in ("adapter", "asset", "cache", "doctor", "export", "plan", "pull")
    ],
)
def test_a_path_that_is_no_bundle_is_named(command: str, path: str, found: str, folder: Path) -> None:
    more = ["-o", "out"] if command in OUT else []
    more += {"recut": ["--stages", "2"]}.get(command, [])
    more += {"push": ["hf://org/name"], "sign": ["--key", "nowhere"]}.get(command, [])
    more += [path] * (command in ("apply", "delta", "diff"))
    line = command_fails(command, path, *more)
    expected = "not a stagepack bundle: expected a folder with a file manifest.json"
    assert line == f"stagepack: {path}: {expected}, found {found} [M1]\n"
    assert not (folder / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("inspect broken", "manifest.json: not JSON"),
        ("adapter empty --base broken -o out", "manifest.json: not JSON"),
        (
            "adapter empty --base BUNDLE -o out",
            "empty: expected the folder of an adapter of peft, with adapter_config.json",
        ),
        ("adapter empty --base BUNDLE --merge -o out", "empty: not a stagepack adapter"),
        (
            "load BUNDLE --adapter empty",
            "empty: not a stagepack adapter: expected a folder with a file manifest.json",
        ),
        ("load BUNDLE --adapter a=empty --adapter a=broken", "adapters: two have the name 'a'"),
        ("inspect BUNDLE --stage 9", "--stage: expected a stage from 0 to 2, found 9"),
        ("inspect BUNDLE --stage -1", "--stage: expected a stage from 0 to 2, found -1"),
        ("inspect BUNDLE --graph --stage 3", "--stage: expected a stage from 0 to 2, found 3"),
        ("load BUNDLE --stage 3", "--stage: expected a stage from 0 to 2, found 3"),
        ("plan BUNDLE --plan bad.json", "missing required field `stages`"),
        ("plan BUNDLE --plan nowhere", "nowhere: the plan cannot be read: No such file or directory$"),
        ("plan BUNDLE --plan empty", "empty: the plan cannot be read: Is a directory$"),
        ("plan BUNDLE -o empty", "empty: expected a file, found a folder"),
        ("plan BUNDLE -o nowhere/plan.json", "plan.json: cannot be written: .*/nowhere is no folder$"),
        ("plan file.txt", "file.txt: expected a .pt2 file or a Hugging Face folder, found another file"),
        ("export file.txt -o out", "file.txt: expected a .pt2 file or a Hugging Face folder"),
        ("triton BUNDLE -o file.txt", "file.txt: expected a folder at file.txt, found a file: choose another"),
        ("triton BUNDLE -o file.txt/x", "file.txt/x: expected a folder at file.txt, found a file"),
        ("compile BUNDLE -o file.txt/x/y", "file.txt/x/y: expected a folder at file.txt, found a file"),
        ("recut BUNDLE --stages 2 -o file.txt", "file.txt: already exists"),
        ("recut BUNDLE --stages 2 -o empty --overwrite", "exists and is not a bundle"),
        ("recut BUNDLE --stages 2 -o nowhere/out", "expected the folder .*nowhere to exist"),
        (
            "plan BUNDLE --profile nowhere",
            "profile: expected a device (.*) or a file that .stagepack profile. wrote, found 'nowhere'$",
        ),
        ("recut BUNDLE -o out --stages 2 --profile bad.json", "bad.json: expected a profile"),
        ("profile BUNDLE -o nowhere/times.json", "nowhere/times.json: cannot be written: .*nowhere is no folder"),
        ("profile BUNDLE -o empty --overwrite --runs 1", "empty: expected a file, found a folder"),
        ("load BUNDLE --trace nowhere/run.json", "run.json: cannot be written: .*/nowhere is no folder$"),
        ("report BUNDLE -o out --trace bad.json", "bad.json: expected a trace"),
        ("report BUNDLE -o out --trace nowhere", "nowhere: the trace cannot be read: No such file"),
        ("report BUNDLE -o nowhere/page.html", "page.html: cannot be written: .*/nowhere is no folder$"),
        ("report BUNDLE -o empty --overwrite", "empty: expected a file, found a folder"),
        ("serve BUNDLE BUNDLE", "expected a distinct name for each model, found 'tiny': pass NAME=BUNDLE"),
        pytest.param("serve --model-repository nothing", "repository cannot be read: No such", marks=TAKES_PORTS),
        ("serve a\x07b=BUNDLE", r"expected a name of printable characters, found 'a\\x07b'"),
        ("serve =BUNDLE", "expected NAME=BUNDLE, found an empty name"),
        pytest.param("serve x=nowhere", "nowhere: not a stagepack bundle", marks=TAKES_PORTS),
        ("serve BUNDLE --token-file nothing", "nothing: the token file cannot be read: No such file"),
        ("serve BUNDLE --tls-certificate a --tls-key b", "a: the TLS certificate cannot be read: No such"),
        ("serve BUNDLE --import no_such_module", "--import no_such_module: .*No module named"),
        ("triton BUNDLE -o out --import no_such_module", "--import no_such_module: .*No module named"),
        ("load BUNDLE --device nonsense", "device 'nonsense': expected a device of this machine"),
        ("load BUNDLE" + " --device cpu" * 4, "expected 1 to 3 devices for 3 stages, found 4"),
        (
            "load BUNDLE --compiled empty",
            "empty/compiled.json: No such file or directory: expected a folder that stagepack compile",
        ),
        ("load BUNDLE --compiled nowhere", r"write it \(stagepack compile .*tiny.stagepack -o nowhere\)$"),
        ("load BUNDLE --compiled file.txt", "file.txt/compiled.json: Not a directory: expected a folder"),
        ("load BUNDLE --inputs empty", "empty: expected a safetensors file with the inputs: it is a folder"),
    ],
)
def test_bad_input_is_said_in_one_line(arguments: str, says: str, folder: Path, sound: Path) -> None:
    command_fails(*arguments.replace("BUNDLE", str(sound)).split(), says=says)


def test_a_file_that_must_not_be_read_is_named(sound: Path, tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.mkdir()
    (path / "manifest.json").write_text("{}")
    (path / "manifest.json").chmod(0)
    if os.access(path / "manifest.json", os.R_OK):
        pytest.skip("this user may read every file")
    command_fails("inspect", str(path), says="manifest.json: Permission denied")


@pytest.mark.process
@pytest.mark.parametrize("arguments", [["--help"], ["inspect", "--help"], ["inspect"], ["verify", "--json"]])
def test_a_full_disk_is_no_traceback(arguments: list[str], sound: Path) -> None:
    paths = [] if "--help" in arguments else [str(sound)]
    with Path("/dev/full").open("wb") as full:
        result = subprocess.run(
            [STAGEPACK, *arguments, *paths], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert result.returncode == 1
    # click writes a help text itself, and does not know to which stream.
    stream = "(standard output: )?" if paths == [] else "standard output: "
    assert re.fullmatch(rf"stagepack: {stream}No space left on device\n", result.stderr)


@pytest.mark.process
@pytest.mark.parametrize(
    ("redirection", "arguments", "status"),
    [
        (">&-", "inspect BUNDLE", 0),
        (">&-", "inspect BUNDLE --json", 0),
        ("2>&-", "verify BUNDLE", 0),
        ("2>&-", "inspect nowhere", 1),
        (">&- 2>&-", "inspect nowhere", 1),
        ("2>/dev/full", "inspect nowhere", 1),
        ("<&- >&- 2>&-", "inspect BUNDLE", 0),
    ],
)
def test_closed_streams_change_no_exit_status(redirection: str, arguments: str, status: int, sound: Path) -> None:
    line = f"{STAGEPACK} {arguments.replace('BUNDLE', str(sound))} {redirection}"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert result.returncode == status
    assert "Traceback" not in result.stdout + result.stderr
    assert not result.stdout.startswith("stagepack: ")


def test_a_traceback_is_printed_on_request_before_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEPACK_TRACEBACK", "1")
    result = CliRunner().invoke(main, ["inspect", "nowhere"])
    assert result.exit_code == 1
    first, *_, last = result.stderr.splitlines()
    assert first == "Traceback (most recent call last):"
    assert last.startswith("stagepack: nowhere: not a stagepack bundle")


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (ZeroDivisionError("by zero"), "stagepack: internal error: ZeroDivisionError: by zero. Please"),
        (MemoryError(), "stagepack: out of memory"),
        (PermissionError(13, "Permission denied", "x"), "stagepack: x: Permission denied"),
    ],
)
def test_unexpected_errors_are_one_line_too(error: Exception, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("stagepack.cli.shared_flags.opened_listed", raise_error)
    result = CliRunner().invoke(main, ["inspect", "x"])
    assert result.exit_code == 1
    assert result.stderr.startswith(says)
    assert result.stderr.count("\n") == 1


SERVER_PACKAGES = {"google", "grpc", "prometheus_client", "starlette", "tritonclient", "uvicorn"}
ERRORS = """
from stagepack.cli import main

print(json.dumps([CliRunner().invoke(main, arguments).stderr for arguments in json.loads(sys.argv[1])]))
"""


@pytest.mark.process
def test_serving_without_its_packages_says_which_extra_installs_them(sound: Path, tmp_path: Path) -> None:
    lines = [["serve", str(sound)], ["triton", str(sound), "-o", str(tmp_path / "out")]]
    errors = json.loads(run_without(SERVER_PACKAGES, ERRORS, json.dumps(lines)))
    for error, extra in zip(errors, ("serve", "triton"), strict=True):
        says = rf"stagepack: the package '\S+' is not installed: the extra '{extra}' of stagepack .*\n"
        assert re.fullmatch(says, error)
