"""Options and variables of launchers that are refused before a process starts."""

import subprocess
from typing import Any

import pytest

import stagepack
from stagepack.distributed import connect
from stagepack.errors import DeviceError, OptionError
from stagepack.format.reader import Bundle
from stagepack_loaders.call_limits import Limits


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"processes": 4}, OptionError, "expected 1 to 3 processes for 3 stages, found 4"),
        ({"processes": 0}, OptionError, "expected 1 to 3 processes for 3 stages, found 0"),
        ({"processes": -1}, OptionError, "expected 1 to 3 processes for 3 stages, found -1"),
        ({"compile": True, "compiled": "x"}, OptionError, "compile and compiled"),
        ({"runtime": "x"}, OptionError, "expected the runtime"),
        ({"processes": "2"}, OptionError, "processes: expected True or a number"),
        ({"in_flight": 0}, OptionError, "in_flight: expected a number of at least 1, found 0"),
        ({"in_flight": "a"}, OptionError, "in_flight"),
        ({"limits": 60}, OptionError, "limits: expected stagepack.Limits"),
        ({"max_restarts": -1}, OptionError, "max_restarts: expected a number of at least 0"),
        ({"microbatch_size": "x"}, OptionError, "microbatch_size: expected a number of at least 1"),
        ({"compile": "x"}, OptionError, "compile"),
        ({"imports": "zoo"}, OptionError, "imports: expected a sequence of modules"),
        ({"devices": ["foo"]}, DeviceError, "foo"),
        ({"devices": ["cpu"] * 5}, DeviceError, "5"),
        ({"processes": False, "max_restarts": 1}, OptionError, "max_restarts: only stages in processes"),
        (
            {"processes": False, "limits": Limits(stall_seconds=1)},
            OptionError,
            "stall_seconds: only stages in processes",
        ),
        ({"processes": False, "in_flight": 1}, OptionError, "in_flight: only stages in processes"),
    ],
)
def test_wrong_options_are_refused_before_a_process_starts(
    options: dict[str, Any], error: type[Exception], message: str, layers: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(subprocess, "Popen")
    with pytest.raises(error, match=message):
        stagepack.load(layers, **({"processes": True} | options))


@pytest.mark.parametrize(
    ("variable", "text"),
    [("WORLD_SIZE", "two"), ("WORLD_SIZE", ""), ("RANK", "2"), ("MASTER_PORT", "99999999"), ("MASTER_PORT", "-1")],
)
def test_a_launcher_that_sets_no_numbers_is_named(
    variable: str, text: str, layers: Bundle, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, text if name == variable else value)
    with pytest.raises(OptionError, match=rf"variable {variable}.*expected an integer from \d+ to \d+, found '{text}'"):
        connect(layers)


def test_connect_needs_a_launcher(layers: Bundle, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(OptionError, match="expected the environment of torchrun"):
        connect(layers)
