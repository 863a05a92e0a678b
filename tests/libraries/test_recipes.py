"""The factories of the page of recipes are exported, and their bundles answer as the models do."""

from pathlib import Path

import pytest
import torch
from torch.utils import _pytree as pytree

import stagepack
from stagepack.capture.imports import call_user_function
from tools.docs.page import ROOT, read_blocks

BLOCKS = {
    block.title: block for block in read_blocks(ROOT / "docs" / "how-to" / "capture-recipes.md") if block.kind == "file"
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", BLOCKS)
def test_a_recipe_is_exported(name: str, tmp_path: Path) -> None:
    if BLOCKS[name].not_run:
        pytest.skip(BLOCKS[name].not_run)
    (tmp_path / name).write_text(BLOCKS[name].source)
    torch.manual_seed(0)
    model, inputs = call_user_function(f"{tmp_path / name}:make")
    if not isinstance(inputs, stagepack.Inputs):
        inputs = stagepack.Inputs(args=inputs)
    bundle = stagepack.export(
        model, inputs.args, dynamic_shapes=inputs.dynamic_shapes, out=tmp_path / "m.stagepack", stages=3
    )
    pipe = stagepack.load(bundle, allow_ops={name for stage in bundle.stages for name in stage.namespaces})
    with torch.no_grad():
        found, wanted = (pytree.tree_leaves(run(*inputs.args)) for run in (pipe, model))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
