"""The alerts of `examples/monitoring` fire when what they tell of happens to a server, and not before."""

import contextlib
import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from tritonclient.utils import InferenceServerException

import stagepack
from tests.distributed.test_serving import stage_process_ids
from tests.modules import module_of
from tests.serve.alert_rules import Scrape, firing, scrape
from tests.serve.local_server import local_server
from tests.serve.servers import AnyServer, Client, get, post, refused, stagepack_server
from tests.serve.version_models import export_scale, factor_of, repository_server
from tests.waiting import wait_until

pytestmark = pytest.mark.process

RULES = Path(__file__).parents[2] / "examples" / "monitoring" / "alerts.yml"
EXPRESSIONS = {
    rule["alert"]: rule["expr"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]
}
_HALF_HOUR = 1800
LIMITED_FILES = ("sh", "-c", 'ulimit -n 120 && exec "$@"', "sh")


class Watch:
    """Scrapes servers as if a minute, or so many seconds, passed each time."""

    def __init__(self, *servers: AnyServer, seconds: float = 60) -> None:
        self._addresses = {f"server {number}": server.http for number, server in enumerate(servers)}
        self._seconds = seconds
        # A server grows until it is warm: the alert waits for hours.
        self._names = EXPRESSIONS.keys() - ({"StagepackMemoryGrows"} if seconds < _HALF_HOUR else set())
        self._scrapes: list[Scrape] = []

    def alerts(self) -> set[str]:
        """Scrape, and return the alerts that fire."""
        pages: dict[str, str | None] = dict.fromkeys(self._addresses)
        for instance, address in self._addresses.items():
            with contextlib.suppress(ConnectionError):
                pages[instance] = get(address)[1]
        self._scrapes.append(scrape(len(self._scrapes) * self._seconds, pages))
        return {name for name in self._names if firing(EXPRESSIONS[name], self._scrapes)}


@pytest.fixture(scope="module")
def scale(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_scale(tmp_path_factory.mktemp("alerts") / "scale.stagepack", 1.0)


def test_a_lost_stage_and_a_server_that_is_gone(scale: Path) -> None:
    with stagepack_server([scale], "--processes", "1") as server, Client("http", server) as client:
        watch = Watch(server)
        factor_of(client, "scale")
        assert watch.alerts() == set()
        factor_of(client, "scale")
        assert watch.alerts() == set()
        os.kill(stage_process_ids(server)[0], signal.SIGKILL)
        wait_until(lambda: not client.raw.is_server_ready(), 5)
        with refused("503", says="is lost"):
            factor_of(client, "scale")
        lost = 'stagepack_requests_total{model="scale",protocol="rest",status="STAGE_LOST",version=""} 1.0'
        assert lost in get(server.http)[1]
        watch.alerts()  # the first sample of a status has no rate
        with contextlib.suppress(InferenceServerException):  # it may be back
            factor_of(client, "scale")
        wait_until(client.raw.is_server_ready, 60)
        factor_of(client, "scale")
        assert "StagepackRestarts" in watch.alerts()
        server.process.kill()
        server.process.wait()
        assert "StagepackDown" in watch.alerts()


def test_a_stage_that_stays_lost_fails_the_model_and_is_no_overload(scale: Path) -> None:
    """The server lingers without restarts, so that each request is refused."""
    options = ("--processes", "1", "--max-restarts", "0", "--linger-s", "20")
    with stagepack_server([scale], *options) as server, Client("http", server) as client:
        watch = Watch(server)
        factor_of(client, "scale")
        watch.alerts()
        os.kill(stage_process_ids(server)[0], signal.SIGKILL)
        wait_until(lambda: not client.raw.is_server_ready(), 5)
        for _ in range(2):
            for _ in range(5):
                with refused("503", says="is lost"):
                    factor_of(client, "scale")
            alerts = watch.alerts()
        assert alerts == {"StagepackModelFails"}


def test_overload(scale: Path) -> None:
    """Each answer waits for others to join its batch, and one request is accepted at a time."""
    with local_server([scale], "--max-queue", "1", "--max-delay-ms", "200") as server, ThreadPoolExecutor(8) as pool:
        watch = Watch(server)

        def ask(_: int) -> None:
            with Client("http", server) as client, contextlib.suppress(InferenceServerException):
                factor_of(client, "scale")

        for _ in range(2):
            list(pool.map(ask, range(8)))
            alerts = watch.alerts()
        assert alerts == {"StagepackOverloaded"}


def test_a_refused_load_and_two_bundles_of_one_model(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second")]
    for factor, folder in enumerate(folders):
        export_scale(folder / "scale" / "1", float(factor))
    with repository_server(folders[0]) as first, repository_server(folders[1]) as second:
        watch = Watch(first.server)
        assert post(first.server.http, "/v2/repository/models/scale/load", b"")[0] == 200
        assert watch.alerts() == set()
        damaged = export_scale(folders[0] / "scale" / "2", 3.0)
        sound_manifest = (damaged / "manifest.json").read_bytes()
        (damaged / "manifest.json").write_bytes(b"{")
        assert post(first.server.http, "/v2/repository/models/scale/load", b"")[0] == 400
        assert watch.alerts() == {"StagepackLoadRefused"}
        (damaged / "manifest.json").write_bytes(sound_manifest)
        assert post(first.server.http, "/v2/repository/models/scale/load", b"")[0] == 200
        wait_until(lambda: watch.alerts() == set())  # the version before is closed
        assert post(second.server.http, "/v2/repository/models/scale/load", b"")[0] == 200
        assert Watch(first.server, second.server).alerts() == {"StagepackDigestsDiffer"}


@pytest.mark.slow
def test_slow_answers(scale: Path) -> None:
    with stagepack_server([scale], "--max-delay-ms", "1200") as server, Client("http", server) as client:
        watch = Watch(server)
        for _ in range(2):
            factor_of(client, "scale")
            alerts = watch.alerts()
        assert alerts == {"StagepackSlow"}


@pytest.mark.slow
def test_memory_that_grows(tmp_path: Path) -> None:
    large = module_of(lambda self, x: self.layer(x), layer=torch.nn.Linear(4096, 4096))
    export_scale(tmp_path / "scale" / "1", 1.0)
    (tmp_path / "large").mkdir()
    stagepack.export(large, (torch.ones(1, 4096),), out=tmp_path / "large" / "1")
    with repository_server(tmp_path, serve=stagepack_server) as repository:
        watch = Watch(repository.server, seconds=_HALF_HOUR)
        post(repository.server.http, "/v2/repository/models/scale/load", b"")
        watch.alerts()
        assert watch.alerts() == set()
        assert post(repository.server.http, "/v2/repository/models/large/load", b"")[0] == 200
        assert watch.alerts() == {"StagepackMemoryGrows"}


@pytest.mark.slow
def test_connections_that_use_up_the_files(scale: Path) -> None:
    with stagepack_server([scale], prefix=LIMITED_FILES) as server, contextlib.ExitStack() as closing:
        watch = Watch(server)
        assert watch.alerts() == set()
        used_files = open_files(get(server.http)[1])
        for _ in range(100 - round(used_files)):
            closing.enter_context(socket.create_connection(("127.0.0.1", server.http)))
        wait_until(lambda: open_files(get(server.http)[1]) > 96, 8)
        assert watch.alerts() == {"StagepackConnectionsExhausted"}


def open_files(page: str) -> float:
    (count,) = scrape(0, {"a": page})[1]["process_open_fds"].values()
    return count


def test_every_alert_is_made_to_fire() -> None:
    text = Path(__file__).read_text()
    assert [name for name in EXPRESSIONS if f'"{name}"' not in text] == []


def test_the_evaluator_counts_over_its_window_and_over_resets() -> None:
    pages = ['c_total{s="A"} 0', 'c_total{s="A"} 30', 'c_total{s="A"} 10', 'c_total{s="A"} 20\nc_total{s="B"} 9']
    scrapes = [scrape(60 * number, {"a": f"{page}\n"}) for number, page in enumerate(pages)]
    (rate,) = firing('rate(c_total{s=~"A|B"}[5m]) > 0', scrapes).values()
    assert rate == pytest.approx(50 / 180)
    (increase,) = firing("sum by (s) (increase(c_total[1m])) > 0", scrapes).values()
    assert increase == pytest.approx(10)
    assert firing('c_total{s!="A"} > 8', scrapes)
    assert not firing('c_total{s="B"} / c_total > 1', scrapes)
