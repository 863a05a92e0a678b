"""The Grafana dashboard of `examples/monitoring`: its queries fit the metrics of a server, and a real Prometheus answers them."""

import contextlib
import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

from stagepack_serving.server.errors import RequestStatus
from tests.serve.servers import Client, Server, free_ports, get, stagepack_server
from tests.serve.version_models import Repository, X, count, export_counter, export_scale, factor_of
from tests.waiting import wait_until

FOLDER = Path(__file__).parents[2] / "examples" / "monitoring"
# Labels that Prometheus adds, and those of a bucket of a histogram.
ADDED_LABELS = {"job", "instance"}
_SELECTOR = re.compile(r"\b((?:stagepack|process)_\w+)(?:\{([^}]*)\})?")
_GROUPING = re.compile(r"\bby \(([^)]*)\)")


def dashboard() -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
    return fields


def queries() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


def alerts() -> list[dict[str, Any]]:
    """The rules of Prometheus beside the dashboard."""
    fields = yaml.safe_load((FOLDER / "alerts.yml").read_text())
    return [rule for group in fields["groups"] for rule in group["rules"]]


@contextlib.contextmanager
def busy_server(folder: Path, *options: str) -> Iterator[tuple[Server, list[Client]]]:
    """A server of both models that has answered requests, and refused one, and clients that ask it on."""
    paths = [export_scale(folder / "scale.stagepack", 1.0), export_counter(folder / "counter.stagepack", 1.0)]
    with stagepack_server(paths, *options) as server, contextlib.ExitStack() as closing:
        clients = [closing.enter_context(Client(protocol, server)) for protocol in ("http", "grpc")]
        ask_all(clients)
        yield server, clients


def ask_all(clients: list[Client]) -> None:
    """A request of each kind on each connection."""
    for client in clients:
        factor_of(client, "scale")
        count(client, "counter", 1, sequence_start=True)
        with pytest.raises(InferenceServerException):
            client.ask("scale", {"other": X}, outputs=["y"])


def test_every_metric_and_label_of_the_queries_exists(repository: Repository) -> None:
    with Client("http", repository.server) as client:
        ask_all([client])
        families = {family.name: family for family in text_string_to_metric_families(get(repository.server.http)[1])}
    labels_of_sample: dict[str, set[str]] = {}
    for family in families.values():
        for sample in family.samples:
            labels_of_sample.setdefault(sample.name, set()).update(sample.labels)
    # Servers without --processes have no samples of these.
    for topic in ("stage_runs_total", "stage_busy_seconds_total", "process_queue", "process_sent_bytes_total"):
        name = f"stagepack_{topic}"
        assert name.removesuffix("_total") in families
        labels_of_sample[name] = {"model", "version", topic.partition("_")[0]}
    for query in [*queries(), *(rule["expr"] for rule in alerts() if not rule["expr"].startswith("up{"))]:
        selectors = _SELECTOR.findall(query)
        assert selectors, query
        for sample_name, matchers in selectors:
            used_labels = set(re.findall(r"(\w+)(?:=~|!=|=)", matchers))
            used_labels |= {label for labels in _GROUPING.findall(query) for label in labels.split(", ")}
            assert used_labels <= labels_of_sample[sample_name] | ADDED_LABELS, (sample_name, query)


def test_every_panel_has_its_place_and_every_variable_a_definition() -> None:
    fields = dashboard()
    variables = {variable["name"] for variable in fields["templating"]["list"]}
    text = json.dumps(fields)
    assert set(re.findall(r"\$\{?(\w+)", text)) <= variables | {"__rate_interval", "__all"}
    assert len({panel["id"] for panel in fields["panels"]}) == len(fields["panels"])
    places = [
        (panel["gridPos"]["x"] + column, panel["gridPos"]["y"] + line)
        for panel in fields["panels"]
        for column in range(panel["gridPos"]["w"])
        for line in range(panel["gridPos"]["h"])
    ]
    assert len(set(places)) == len(places)
    assert max(column for column, _ in places) < 24
    for path in FOLDER.rglob("*.y*ml"):
        assert yaml.safe_load(path.read_text())


def test_every_alert_says_what_is_wrong_and_who_is_called() -> None:
    statuses = {"OK", *RequestStatus.__members__}
    assert len({rule["alert"] for rule in alerts()}) == len(alerts())
    for rule in alerts():
        assert rule.keys() == {"alert", "expr", "for", "labels", "annotations"}
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert rule["expr"].count("(") == rule["expr"].count(")")
        for matched in re.findall(r'status=~?"([^"]*)"', rule["expr"]):
            assert set(matched.split("|")) <= statuses


def request_series(**counts: int) -> dict[str, str]:
    """The counts of requests that a minute adds, by status."""
    return {f'stagepack_requests_total{{model="m",status="{status}"}}': f"0+{n}x300" for status, n in counts.items()}


# For each alert, the samples of a minute, and what it says of them after 4 hours.
FIRING = {
    "StagepackDown": ({'up{job="stagepack",instance="a"}': "0x300"}, "a does not answer"),
    "StagepackModelFails": (request_series(OK=90, MODEL_FAILED=10), "m fails on 10% of the requests"),
    "StagepackOverloaded": (request_series(OK=75, BUSY=25), "m refuses 25% of the requests"),
    "StagepackDigestsDiffer": (
        {
            'stagepack_model_info{model="m",digest="1",instance="a"}': "1x300",
            'stagepack_model_info{model="m",digest="2",instance="b"}': "1x300",
        },
        "m is served with 2 bundles",
    ),
}


@pytest.mark.skipif(shutil.which("promtool") is None, reason="Debian's package prometheus is not installed")
def test_prometheus_accepts_the_alerts_and_fires_them(tmp_path: Path) -> None:
    shutil.copy(FOLDER / "alerts.yml", tmp_path)
    rules = {rule["alert"]: rule for rule in alerts()}
    tests = []
    for name, (series, summary) in FIRING.items():
        labels = {"severity": rules[name]["labels"]["severity"]}
        labels |= {"instance": "a", "job": "stagepack"} if name == "StagepackDown" else {"model": "m"}
        annotations = {"summary": summary, "description": rules[name]["annotations"]["description"]}
        alert = {"exp_labels": labels, "exp_annotations": annotations}
        tests.append(
            {
                "interval": "1m",
                "input_series": [{"series": selector, "values": values} for selector, values in series.items()],
                "alert_rule_test": [{"eval_time": "4h", "alertname": name, "exp_alerts": [alert]}],
            }
        )
    (tmp_path / "tests.yml").write_text(yaml.safe_dump({"rule_files": ["alerts.yml"], "tests": tests}))
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "tests.yml"]):
        finished = subprocess.run(["promtool", *command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Debian's package prometheus is not installed")
def test_prometheus_answers_every_query(tmp_path: Path) -> None:
    with (
        busy_server(tmp_path) as (server, clients),
        busy_server(tmp_path, "--processes", "1") as (process_server, process_clients),
        prometheus(tmp_path, [server, process_server]) as address,
    ):
        wait_until(lambda: len(_ask_prometheus(address, "stagepack_model_info")) == 4, 60)
        end_time = time.monotonic() + 8
        while time.monotonic() < end_time:
            ask_all(clients + process_clients)
            time.sleep(0.05)
        results = {query: _ask_prometheus(address, query) for query in queries()}
        for variable in dashboard()["templating"]["list"][1:]:
            metric_name, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["definition"]).groups()  # type: ignore[union-attr]
            assert all(result["metric"][label] for result in _ask_prometheus(address, metric_name))
    for query, result in results.items():
        assert result, query
        print(len(result), result[0]["value"][1], query)  # noqa: T201 - pytest -s shows it
        assert all(sample["value"][1] != "NaN" for sample in result), query


@contextlib.contextmanager
def prometheus(folder: Path, servers: list[Server]) -> Iterator[str]:
    """A Prometheus with the configuration of the example, which asks servers each second; its address."""
    (port,) = free_ports(1)
    text = (FOLDER / "prometheus.yml").read_text()
    config = folder / "prometheus.yml"
    targets = json.dumps([f"127.0.0.1:{server.http}" for server in servers])
    config.write_text(text.replace('["127.0.0.1:8000"]', targets).replace("interval: 5s", "interval: 1s"))
    shutil.copy(FOLDER / "alerts.yml", folder)
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)
    address = f"127.0.0.1:{port}"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen([*command, f"--web.listen-address={address}"], stdout=log, stderr=log)
    try:
        wait_until(lambda: _is_ready(address), 60)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


def _is_ready(address: str) -> bool:
    try:
        return urllib.request.urlopen(f"http://{address}/-/ready").status == 200
    except (urllib.error.URLError, ConnectionError):
        return False


def _ask_prometheus(address: str, query: str) -> list[dict[str, Any]]:
    """The result of a query of the dashboard, with its variables as Grafana fills them in."""
    expression = re.sub(r"\$(job|model|version)", ".*", query.replace("$__rate_interval", "6s"))
    url = f"{address}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    answer = json.loads(urllib.request.urlopen(url).read())  # noqa: S310 - an address of this machine
    assert answer["status"] == "success", answer
    result: list[dict[str, Any]] = answer["data"]["result"]
    return result
