"""Values that a model cannot take are errors of the client; other failures are errors of the server."""

from typing import Any

import pytest
import torch

from stagepack.errors import InputError, StageFailedError
from stagepack_loaders.stage_errors import typed_stage_errors

TABLE = torch.arange(20.0).reshape(5, 4)
OUTSIDE = torch.tensor([7])


@pytest.mark.parametrize(
    "operation",
    [
        lambda: torch.nn.functional.embedding(OUTSIDE, TABLE),
        lambda: torch.nn.functional.embedding_bag(OUTSIDE[None], TABLE),
        lambda: torch.nn.functional.one_hot(OUTSIDE, 3),
        lambda: torch.nn.functional.one_hot(-OUTSIDE),
        lambda: torch.nn.functional.nll_loss(TABLE[:1], OUTSIDE),
        lambda: TABLE[OUTSIDE],
        lambda: TABLE.gather(0, OUTSIDE[None]),
        lambda: TABLE.index_add(0, OUTSIDE, TABLE[:1]),
        lambda: TABLE.index_copy(0, OUTSIDE, TABLE[:1]),
        lambda: TABLE.index_put((OUTSIDE,), TABLE[0]),
        lambda: TABLE.index_select(0, OUTSIDE),
        lambda: TABLE.scatter(0, OUTSIDE[None], TABLE),
        lambda: TABLE.select(0, 7),
        lambda: TABLE.take(OUTSIDE * 10),
        lambda: torch.ops.aten._assert_scalar(False, "Runtime assertion failed for expression u0 <= 5 on node 'le'"),
    ],
)
def test_how_torch_reports_values_out_of_range(operation: Any) -> None:
    with pytest.raises(InputError, match=r"an input value is out of range in stage 3: \w"), typed_stage_errors(3):
        operation()


@pytest.mark.parametrize(
    "operation",
    [
        lambda: TABLE @ TABLE,
        lambda: torch.empty(2**50),
        lambda: torch.linalg.inv(torch.zeros(3, 3)),
        lambda: {"b": 1}["a"],
    ],
)
def test_other_errors_are_failures_of_the_stage(operation: Any) -> None:
    with pytest.raises(StageFailedError, match=r"^stage 3 failed: \w+: \S") as caught, typed_stage_errors(3):
        operation()
    assert isinstance(caught.value.__cause__, RuntimeError | KeyError)
