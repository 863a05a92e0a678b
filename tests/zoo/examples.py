"""Torch's own export examples."""

import functools

import torch
from torch._export.db.case import ExportCase, SupportLevel
from torch._export.db.examples import all_examples

from stagepack.capture.inputs import Inputs
from tests.zoo.case import Case


def _build(example: ExportCase) -> tuple[torch.nn.Module, Inputs]:
    return example.model, Inputs(
        args=example.example_args, kwargs=example.example_kwargs, dynamic_shapes=example.dynamic_shapes
    )


CASES = [
    Case(name=f"exportdb-{name}", row="torch's export examples", build=functools.partial(_build, example))
    for name, example in sorted(all_examples().items())
    if example.support_level == SupportLevel.SUPPORTED
]
