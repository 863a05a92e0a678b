"""The line of code that an error came from."""

import importlib.metadata

import pytest
from packaging.version import InvalidVersion, Version

from stagepack.capture.torch_messages import describe_error


def test_errors_in_a_library_read_the_installed_packages_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read_packages, reads = importlib.metadata.packages_distributions, []

    def counted() -> object:
        reads.append(1)
        return read_packages()

    monkeypatch.setattr(importlib.metadata, "packages_distributions", counted)
    for _ in range(3):
        with pytest.raises(InvalidVersion) as raised:
            Version("no version")
        assert f"packaging {importlib.metadata.version('packaging')}, packaging/version.py, line" in describe_error(
            raised.value
        )
    assert len(reads) <= 1
