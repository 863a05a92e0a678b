"""What the commands do, in Python: plan, report, serve; and what bundles and pipelines print. `stagepack.compile` is tested elsewhere."""

import json
import signal
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

import stagepack
from stagepack.errors import CutError, OptionError, OutputExistsError
from stagepack.examples.tower import Tower, inputs
from tests.distributed.forked_processes import forked_launches
from tools.fork_server import ForkedCommand

SERVER = """
import sys, stagepack
pipeline = stagepack.load(sys.argv[1], copy=True)
show = lambda addresses: print(addresses.http_port, flush=True)
limits = stagepack.ServerLimits(linger=0)
stagepack.serve({"tower": pipeline}, http_port=0, grpc_port=0, limits=limits, on_listening=show)
print("stopped")
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> stagepack.Bundle:
    example = inputs()
    out = tmp_path_factory.mktemp("tower") / "tower.stagepack"
    return stagepack.export(Tower(), example.args, out=out, stages=2, dynamic_shapes=example.dynamic_shapes)


def test_plan_is_what_an_export_and_a_recut_would_make(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    example = inputs()
    planned = stagepack.plan(bundle.path, stages=3)
    assert planned == stagepack.recut(bundle, out=tmp_path / "recut.stagepack", stages=3).entry_point.plan
    assert planned == stagepack.plan(Tower(), example.args, stages=3, dynamic_shapes=example.dynamic_shapes)
    with pytest.raises(OptionError, match="a bundle has its own"):
        stagepack.plan(bundle, example.args, stages=3)


def test_report_writes_a_page(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    pipeline = stagepack.load(bundle)
    with pipeline.trace() as trace, torch.no_grad():
        pipeline(*inputs().args)
    page = stagepack.report(bundle, out=tmp_path / "tower.html", trace=trace)
    assert "Traced run" in page.read_text()
    with pytest.raises(OutputExistsError, match="overwrite"):
        stagepack.report(bundle, out=page)
    other = stagepack.recut(bundle, out=tmp_path / "other.stagepack", stages=1)
    with pytest.raises(OptionError, match="trace: expected a run of"):
        stagepack.report(other, out=page, trace=trace, overwrite=True)


@pytest.mark.process
def test_serve_answers_until_it_is_told_to_stop(bundle: stagepack.Bundle, tmp_path: Path) -> None:
    (script := tmp_path / "script.py").write_text(SERVER)
    process = ForkedCommand(str(bundle.path), script=script)
    with process.stdout:
        port = int(process.stdout.readline())
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/models/tower") as answer:
            assert json.load(answer)["inputs"][0]["name"] == "x"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == "stopped\n"
    assert process.wait() == 0


def test_serve_refuses_wrong_arguments(bundle: stagepack.Bundle) -> None:
    pipelines = {"tower": stagepack.load(bundle)}
    wrong_pipelines: list[tuple[Any, str]] = [
        ({}, "at least one"),
        ([pipelines["tower"]], "expected a dict of pipelines by name, found list"),
        ({"\udcff": bundle}, "expected a name of printable characters"),
        ({1: pipelines["tower"]}, "expected a name of printable characters without '/', found 1"),
        ({"a/b": pipelines["tower"]}, "expected a name of printable characters without '/', found 'a/b'"),
        ({"m": bundle}, "expected a pipeline that stagepack.load returns for 'm'"),
    ]
    for wrong, says in wrong_pipelines:
        with pytest.raises(OptionError, match=says):
            stagepack.serve(wrong)
    wrong_arguments: list[tuple[dict[str, Any], str]] = [
        ({"http_port": 70_000}, "http_port: expected a number from 0 to 65535, found 70000"),
        ({"grpc_port": "8001"}, "grpc_port: expected a number from 0 to 65535, found '8001'"),
        ({"operator_port": True}, "operator_port: expected a number"),
        ({"host": None}, "host: expected an address"),
        ({"limits": {"max_batch_size": 1}}, "limits: expected stagepack.ServerLimits, found dict"),
        ({"check_token": 3}, "check_token: expected a function, found 3"),
    ]
    for arguments, says in wrong_arguments:
        with pytest.raises(OptionError, match=says):
            stagepack.serve(pipelines, **arguments)
    with ThreadPoolExecutor(1) as pool, pytest.raises(OptionError, match="expected the main thread"):
        pool.submit(stagepack.serve, pipelines).result()


def test_more_stages_than_operators_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    bundle = stagepack.export(model, (torch.ones(1, 2),), out=tmp_path / "m.stagepack", stages=2)
    for road in (
        lambda: stagepack.export(model, (torch.ones(1, 2),), out=tmp_path / "n.stagepack", stages=3),
        lambda: stagepack.plan(model, (torch.ones(1, 2),), stages=3),
        lambda: stagepack.plan(bundle, stages=3),
        lambda: stagepack.recut(bundle, out=tmp_path / "n.stagepack", stages=3),
    ):
        with pytest.raises(CutError, match=r"stages: expected at most 2, found 3: the model has 2 operators$"):
            road()
    assert [path.name for path in tmp_path.iterdir()] == ["m.stagepack"]


@pytest.mark.process
def test_bundles_and_pipelines_say_what_they_are(tmp_path: Path) -> None:
    example = inputs()
    path = tmp_path / "tower.stagepack"
    bundle = stagepack.export(Tower(), example.args, out=path, stages=2, dynamic_shapes=example.dynamic_shapes)
    assert repr(bundle) == f"<Bundle '{path}', 2 stages, x: float32[rows, 64]>"
    pipeline = stagepack.load(bundle)
    assert repr(pipeline) == f"<Pipeline '{path}', 2 stages on cpu, x: float32[rows, 64]>"
    assert pipeline.inputs == bundle.inputs
    assert [(edge.name, edge.dtype, edge.shape) for edge in bundle.inputs] == [("x", "float32", ("rows", 64))]
    with forked_launches(), stagepack.load(bundle, processes=True) as processes:
        assert repr(processes) == f"<DistributedPipeline '{path}', 2 stages, ready>"


@pytest.mark.process
def test_a_notebook_shows_the_report_in_a_frame(tmp_path: Path) -> None:
    bundle = stagepack.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),), out=tmp_path / "<b>.stagepack")
    html = bundle._repr_html_() or ""
    assert html.startswith("<iframe srcdoc=")
    assert html.count("<") == 2
    page = unescape(html)
    assert "flowchart LR" in page
    assert "&lt;b&gt;.stagepack" in page
    assert "<script" not in page
