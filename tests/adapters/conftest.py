"""Bundles of the small models, each exported once for a module of tests."""

import functools
from collections.abc import Callable

import pytest
import torch

from stagepack.format.reader import Bundle
from stagepack.roads.onnx import add_onnx
from tests.adapters.models import export_model, make_model


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Bundle]:
    @functools.cache
    def export(name: str, stages: int | str = 1, dtype: torch.dtype = torch.float32, *, onnx: bool = False) -> Bundle:
        bundle = export_model(make_model(name, dtype), tmp_path_factory.mktemp(name), stages=stages)
        return add_onnx(bundle).bundle if onnx else bundle

    return export
