"""What a terminal shows of a download."""

import io
import sys

import pytest

import stagepack
from stagepack import terminal
from tests.remote.http_server import HttpServer


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def use_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Make standard error a terminal, on which bytes are shown at once. pytest replaces it between a fixture and the test."""
    screen = Terminal()
    monkeypatch.setattr(terminal, "_FIRST_SECOND", 0.0)
    monkeypatch.setattr(sys, "stderr", screen)
    return screen


def test_a_download_shows_its_bytes(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal(monkeypatch)
    stagepack.open(f"{server.url}/large.stagepack").fetch(["stage-0.safetensors"])
    assert f"downloading {server.url}/large.stagepack" in " ".join(screen.getvalue().split())


def test_it_shows_them_in_the_line_of_a_command(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = use_terminal(monkeypatch)
    lines: list[str | None] = []
    with terminal.active_line(lines.append):
        stagepack.open(f"{server.url}/large.stagepack").fetch(["stage-0.safetensors"])
    assert lines[0] is not None
    assert lines[0].endswith("MB/s")
    assert lines[-1] is None
    assert not screen.getvalue()


def test_a_pipe_shows_nothing(server: HttpServer, capsys: pytest.CaptureFixture[str]) -> None:
    stagepack.open(f"{server.url}/large.stagepack").fetch(["stage-0.safetensors"])
    assert capsys.readouterr() == ("", "")
