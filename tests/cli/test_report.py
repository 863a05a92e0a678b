"""`report`: one page that asks for nothing, shows what the manifest says, and lets no name of a bundle become markup."""

import base64
import hashlib
import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import stagepack
from stagepack.cli.cost_facts import bubble_share, bundle_cut_facts
from stagepack.cli.output import count_of
from stagepack_loaders.run_trace import RunTrace, write_trace
from stagepack_loaders.spans import Span
from tests.bundle_editor import BundleEditor
from tests.hostile.attack import command_fails, run

EVIL = "</script><img src=x onerror=alert(1)>"


class Page(HTMLParser):
    """The elements of a page, and the text in each kind."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "input"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open:
            self.texts.setdefault(self._open[-1], []).append(data)


def report(bundle: Path, folder: Path, *options: str) -> str:
    result = run("report", str(bundle), "-o", str(folder / "page.html"), *options)
    assert result.exit_code == 0, result.output
    assert "wrote" in result.stdout
    return (folder / "page.html").read_text(encoding="utf-8")


def test_the_page_shows_stages_edges_and_nodes(sound: Path, tmp_path: Path) -> None:
    page = Page(report(sound, tmp_path))
    bundle = stagepack.open(sound)
    assert bundle.entry_point.plan is not None
    facts = bundle_cut_facts(bundle, bundle.entry_point.plan)
    assert bundle.digest in page.texts["code"]
    assert f"{facts['slowest_over_mean']:.2f}" in page.texts["strong"]
    assert {edge.name for edge in bundle.edges} <= set(page.texts["code"])
    assert {f"{share:.1%}" for share in facts["bubble"].values()} <= set(page.texts["td"])
    assert page.texts["pre"][0].startswith("flowchart LR\n  input([input])\n")
    assert page.texts["summary"] == [
        f"stage {number}: {count_of('node', stage.nodes)}" for number, stage in enumerate(bundle.stages)
    ]
    assert {"embed", "aten.embedding.default"} <= set(page.texts["td"])


def test_the_page_asks_for_nothing_and_runs_nothing_but_its_own(sound: Path, tmp_path: Path) -> None:
    page = Page(report(sound, tmp_path))
    assert not any({"src", "href", "style", "action"} & attributes.keys() for _, attributes in page.tags)
    assert not any(attribute.startswith("on") for _, attributes in page.tags for attribute in attributes)
    policy = next(a["content"] for tag, a in page.tags if tag == "meta" and "http-equiv" in a) or ""
    assert policy.startswith("default-src 'none'; ")
    assert "script" not in {tag for tag, _ in page.tags}
    (style,) = page.texts["style"]
    assert f"'sha256-{base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()}'" in policy


def test_names_of_a_bundle_are_text(editor: BundleEditor, tmp_path: Path) -> None:
    def scopes(graph: dict[str, Any]) -> None:
        graph["scopes"] = [scope | {"path": EVIL} for scope in graph["scopes"]]

    def rename_modules(manifest: dict[str, Any]) -> None:
        for stage in manifest["entry_points"][0]["plan"]["stages"]:
            stage["module"] = EVIL

    editor.edit_graph(1, scopes)
    editor.edit_manifest(rename_modules)
    html = report(editor.path, tmp_path)
    page = Page(html)
    assert html.count("<img") == 0
    assert "img" not in {tag for tag, _ in page.tags}
    assert EVIL in page.texts["code"]
    assert EVIL in page.texts["td"]


def test_a_bundle_without_a_plan_says_so(editor: BundleEditor, tmp_path: Path) -> None:
    editor.edit_manifest(lambda manifest: manifest["entry_points"][0].pop("plan"))
    command_fails("report", str(editor.path), "-o", str(tmp_path / "page.html"), says="contains no plan: cut it again")


def traced(bundle: Path, folder: Path) -> Path:
    """A trace of five requests in two processes, the second with two stages; each request waits for the stage before."""
    spans = []
    for request in range(1, 6):
        for stage, process in ((0, 0), (1, 1), (2, 1)):
            start = 10_000_000 * request + 4_000_000 * stage
            spans.append(
                Span(
                    kind="compute",
                    process=process,
                    thread="stages",
                    request=request,
                    stage=stage,
                    start=start,
                    duration=4_000_000,
                )
            )
        start = 10_000_000 * request + 4_000_000
        spans.append(
            Span(kind="transfer", process=0, thread="stages", request=request, stage=1, start=start, duration=1_000_000)
        )
    path = folder / "trace.json"
    names = {0: "process 0", 1: f"process 1 {EVIL}"}
    write_trace(RunTrace(bundle=stagepack.open(bundle).digest, processes=names, spans=spans), path)
    return path


def test_a_traced_run_is_shown_beside_the_estimate(sound: Path, tmp_path: Path) -> None:
    page = Page(report(sound, tmp_path, "--trace", str(traced(sound, tmp_path))))
    # 52 ms from the first span to the last: 20 and 40 ms of work.
    assert {"process 0", f"process 1 {EVIL}", "38.5%", "76.9%"} <= set(page.texts["td"])
    plan = stagepack.open(sound).entry_point.plan
    assert plan is not None
    times = [stage.time for stage in plan.stages]
    idle = bubble_share([times[0], times[1] + times[2]], 5)
    assert {"42.3%", f"{idle:.1%}"} <= set(page.texts["strong"])
    assert "img" not in {tag for tag, _ in page.tags}


def test_one_process_has_no_bubble(sound: Path, tmp_path: Path) -> None:
    trace_file = tmp_path / "trace.json"
    assert run("load", str(sound), "--trace", str(trace_file), "--requests", "50").exit_code == 0
    page = Page(report(sound, tmp_path, "--trace", str(trace_file)))
    assert any(text.startswith("50 requests in ") for text in page.texts["p"])
    assert "0.0%" in page.texts["strong"]


def test_a_trace_of_another_bundle_is_refused(sound: Path, tmp_path: Path) -> None:
    out, page = tmp_path / "two.stagepack", str(tmp_path / "page.html")
    stagepack.recut(sound, out=out, stages=2)
    trace_file = traced(sound, tmp_path)
    command_fails("report", str(out), "-o", page, "--trace", str(trace_file), says="expected a run of .*, found one of")
    command_fails("report", str(sound), "-o", page, "--trace", str(out / "manifest.json"), says="expected a trace")
    write_trace(RunTrace(bundle=stagepack.open(sound).digest, processes={0: "process 0"}), tmp_path / "empty.json")
    command_fails("report", str(sound), "-o", page, "--trace", str(tmp_path / "empty.json"), says="found none")
    content = trace_file.read_text()
    trace_file.write_text(content.replace('"stage":2', '"stage":3'))
    command_fails("report", str(sound), "-o", page, "--trace", str(trace_file), says="expected the stages 0 to 2")


def test_measured_times_take_the_place_of_estimates(sound: Path, tmp_path: Path) -> None:
    times = tmp_path / "times.json"
    assert run("profile", str(sound), "-o", str(times), "--runs", "1").exit_code == 0
    page = Page(report(sound, tmp_path, "--profile", str(times)))
    shown = json.loads(run("plan", str(sound), "--profile", str(times), "--json").stdout)
    assert any(text.startswith("Measured: cpu of ") for text in page.texts["p"])
    assert f"{shown['slowest_over_mean']:.2f}" in page.texts["strong"]


def test_nodes_that_several_stages_compute_are_counted_in_each(sound: Path, tmp_path: Path) -> None:
    inspected = json.loads(run("inspect", str(sound), "--json").stdout)["stages"]
    planned = json.loads(run("plan", str(sound), "--json").stdout)["stages"]
    shown = Page(report(sound, tmp_path)).texts["summary"]
    for stage, facts in enumerate(inspected):
        assert facts["nodes"] == planned[stage]["nodes"]
        assert shown[stage] == f"stage {stage}: {count_of('node', facts['nodes'])}"
