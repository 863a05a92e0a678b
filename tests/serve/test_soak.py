"""Two servers under mixed load for a long time: all requests are answered, memory stays, and health is answered at once.

It lasts a minute. `STAGEPACK_SOAK_MINUTES` is another time, and `STAGEPACK_SOAK_FILE` a file for the samples, of which
`tools/plot_soak.py` makes a picture.
"""

import json
import os
import shutil
import statistics
from pathlib import Path

import pytest

from tests.serve.bundles import Bundles
from tests.serve.servers import stagepack_server
from tests.serve.soak import SAMPLE_SECONDS, soak
from tests.serve.version_models import export_scale

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("serve")]
_MINUTES = float(os.environ.get("STAGEPACK_SOAK_MINUTES", "1"))


def growth(memory: list[int]) -> float:
    """How much more memory there is at the end than after the first tenth, as a share."""
    tenth = len(memory) // 10
    return statistics.median(memory[-2 * tenth :]) / statistics.median(memory[tenth : 3 * tenth]) - 1


def test_servers_withstand_mixed_load(bundles: Bundles, writer: Path, tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    for version in (1, 2):
        export_scale(repository / "scale" / str(version), float(version))
    shutil.copytree(bundles["skips"], repository / "skips" / "1")
    shutil.copytree(writer, repository / "writer" / "1")
    control = ("--model-repository", str(repository), "--model-control", "explicit", "--load-model", "*")
    common = ("--operator-port", "0", "--log-level", "error")
    processes = ("--processes", "2", "--max-restarts", "1000000")
    with (
        stagepack_server([], *control, *common) as local,
        stagepack_server([bundles["skips"]], *processes, *common) as divided,
    ):
        seen = soak(local, divided, repository, 60 * _MINUTES, tmp_path)
        assert (local.stop(), divided.stop()) == (0, 0)
    if path := os.environ.get("STAGEPACK_SOAK_FILE"):
        Path(path).write_text(json.dumps(seen))
    assert seen["faults"] == []
    assert set(seen["health_statuses"]) == {200}
    for durations in seen["health"].values():
        assert durations[int(0.99 * len(durations))] < 0.1
    assert len(seen["samples"]) >= 50 * _MINUTES / SAMPLE_SECONDS
    assert seen["outcomes"]["OK"] > 0.5 * sum(seen["outcomes"].values())
    for place in ("memory", "front_memory"):
        assert growth([sample[place] for sample in seen["samples"]]) < 0.05
