"""What bundles and pipelines print, and show in a notebook."""

from html import unescape
from pathlib import Path

import pytest
import torch

import stagepack
from stagepack.examples.tower import Tower, inputs
from tests.distributed.forked_processes import forked_launches


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
    assert "<svg" in page
    assert "&lt;b&gt;.stagepack" in page
    assert "<script" not in page
