"""A bundle answers at each size as the captured program does, or refuses where the program refuses."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.export import Dim

import stagepack
from stagepack.errors import InputError

Condition = Callable[[Any, Any], Any]

# Each on the rows n of the first input and m of the second. Those that torch.export decides alone would need no guard.
CONDITIONS: dict[str, Condition] = {
    "modulo": lambda n, _: n % 4 == 1,
    "quotient": lambda n, _: n // 3 != 2,
    "factor": lambda n, _: 3 * n > 22,
    "product": lambda n, m: n * m < 40,
    "sum": lambda n, m: n + m == 11,
    "order": lambda n, m: n < m,
    "largest": lambda n, m: torch.sym_max(n, m) > 7,
    "smallest": lambda n, m: torch.sym_min(n, 2 * m) % 3 != 0,
    "distance": lambda n, _: abs(n - 8) > 2,
    "square": lambda n, _: n**2 > 50,
    "fraction": lambda n, _: n / 3 > 2.5,
    "half": lambda n, _: int(n * 0.5) % 2 == 0,
    "negative": lambda n, _: -(-n // 4) != 2,
    "either": lambda n, m: (n == 6) | (m == 5),
    "both": lambda n, m: (n > 6) & (m > 5),
    "chosen": lambda n, m: torch.sym_ite(n > m, n, m) > 9,
    "difference": lambda n, m: (2 * n - m) % 3 == 1,
    "bits": lambda n, _: (n & 1) == 1,
    "rounded": lambda n, _: round(n / 4) == 2,
}


class Branches(torch.nn.Module):
    """Computes otherwise for each condition that holds for the rows of its inputs."""

    def __init__(self, conditions: list[Condition]) -> None:
        super().__init__()
        self.first, self.last = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        self.conditions = conditions

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        for number, condition in enumerate(self.conditions):
            hidden = hidden * (number + 2) if condition(x.shape[0], y.shape[0]) else hidden - number
        return self.last(hidden) + y.sum()


H = Dim("h", min=1, max=8)
SMALL = Dim.AUTO(min=2, max=20)
# The dynamic shapes, the rows of the example for a number from 2 to 4, and whether rows are of the declared form.
FORMS: list[tuple[Any, Callable[[int], tuple[int, int]], Callable[[int, int], bool]]] = [
    (({0: SMALL}, {0: SMALL}), lambda h: (3 * h, h + 2), lambda n, m: 2 <= n <= 20 and 2 <= m <= 20),
    (({0: Dim.AUTO(max=30)}, {0: Dim.AUTO}), lambda h: (h + 3, h + 3), lambda n, m: 2 <= n <= 30 and m >= 0),
    (({0: 4 * H}, {0: SMALL}), lambda h: (4 * h, h), lambda n, m: n % 4 == 0 and 4 <= n <= 32 and 2 <= m <= 20),
    (({0: 2 * H + 1}, None), lambda h: (2 * h + 1, 3), lambda n, m: n % 2 == 1 and 3 <= n <= 17 and m == 3),
    (
        ({0: 2 * H}, {0: 3 * H}),
        lambda h: (2 * h, 3 * h),
        lambda n, m: n % 2 == 0 and 1 <= n // 2 <= 8 and m == n // 2 * 3,
    ),
]
SIZES = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 16, 20, 21, 24, 32, 36]


@pytest.mark.parametrize("seed", range(16))
def test_bundle_answers_or_refuses_as_the_program_does(tmp_path: Path, seed: int) -> None:
    generator = random.Random(seed)  # noqa: S311 - draws models
    torch.manual_seed(seed)
    dynamic_shapes, example_rows, is_declared = FORMS[seed % len(FORMS)]
    names = generator.sample(sorted(CONDITIONS), 2)
    model = Branches([CONDITIONS[name] for name in names]).eval()
    args = tuple(torch.randn(rows, 2) for rows in example_rows(generator.randint(2, 4)))
    program = torch.export.export(model, args, dynamic_shapes=dynamic_shapes)
    reference = program.module()
    torch.export.save(program, tmp_path / "program.pt2")

    bundle = stagepack.export(program, out=tmp_path / "program.stagepack", stages=2)
    of_file = stagepack.export(tmp_path / "program.pt2", out=tmp_path / "file.stagepack", stages=2)
    assert of_file.entry_point == bundle.entry_point
    pipeline = stagepack.load(bundle)
    answered = 0
    for rows in [(n, m) for n in SIZES for m in SIZES]:
        inputs = [torch.randn(size, 2) for size in rows]
        try:
            expected = reference(*inputs) if is_declared(*rows) else None
        except AssertionError:  # a guard
            expected = None
        if expected is None:
            with pytest.raises(InputError):
                pipeline(*inputs)
        else:
            answered += 1
            assert torch.equal(pipeline(*inputs), expected), (names, rows)
    assert answered
