"""Weights that torchao has quantized: configuration x cut x runtime, right or refused by name, as a table of `docs/coverage.md`."""

import copy
import importlib
import re
import tempfile
import warnings
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch

import stagepack
from stagepack.errors import StagepackError

PAGE: Final = Path(__file__).parents[2] / "docs" / "coverage.md"
HEADING: Final = "## Quantized weights\n"
RIGHT: Final = "right"
_HEAD: Final = """
Written by `python -m tests.libraries.quantized`, and held by `tests/libraries/test_quantized.py`: layers of 256 features that
torchao {version} has quantized, on a CPU.

- **bytes** is the size of all weights, of that of the model before.
- **cut** is held to the eager quantized model bit for bit, for two sizes of the batch: whole, in 3 stages, and cut again in 5.
- **processes** is the same in 3 processes without torchao, a stage each.
- **ONNX Runtime** is held to it within a tolerance. A stage that it cannot run is refused by name, and runs in torch.

| configuration of torchao | model | weights as stored | bytes | cut | processes | ONNX Runtime |
|---|---|---|--:|---|---|---|
"""
_FOOT: Final = """
torchao makes these on other machines alone. Here they are refused by torchao, or, once made, by the loader, which names the operator that
has no kernel for the device:

| configuration of torchao | what it says on a CPU |
|---|---|
"""


class Feed(torch.nn.Module):
    """Layers that torchao quantizes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(256)
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)) for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(self.norm(x))
        return x


@dataclass(frozen=True, kw_only=True)
class Quantized:
    """A configuration of torchao."""

    name: str
    title: str  # as the table names it
    config: str  # its class
    module: str = "torchao.quantization"
    options: Callable[[Any], Mapping[str, Any]] = field(default=lambda _: {})  # of torchao.quantization
    dtype: torch.dtype = torch.float32

    def model(self) -> torch.nn.Module:
        """Layers that this configuration has quantized."""
        quantization: Any = importlib.import_module("torchao.quantization")
        torch.manual_seed(0)
        model = Feed().eval().requires_grad_(False).to(self.dtype)
        config = getattr(importlib.import_module(self.module), self.config)(**self.options(quantization))
        by_name = {"filter_fn": None} if self.config == "FqnToConfig" else {}
        quantization.quantize_(model, config, **by_name)
        return model


def _static(quantization: Any) -> dict[str, Any]:
    return {"act_quant_scale": torch.tensor([[0.02]]), "granularity": quantization.PerTensor()}


def _mixed(quantization: Any) -> dict[str, Any]:
    configs = {"layers.0.0": quantization.Int8WeightOnlyConfig(), "layers.1.2": quantization.Float8WeightOnlyConfig()}
    return {"fqn_to_config": OrderedDict(configs)}


def _int4(quantization: Any) -> dict[str, Any]:
    return {"weight_dtype": torch.int4, "granularity": quantization.PerGroup(32)}  # type: ignore[attr-defined]


_HALF: Final[dict[str, Any]] = {"dtype": torch.bfloat16}
_PACKED: Final[dict[str, Any]] = {
    "config": "PrototypeInt4WeightOnlyConfig",
    "module": "torchao.prototype.quantization.int4.inference_workflow",
    "options": lambda _: {"group_size": 32},
}
_INT8: Final[dict[str, Any]] = {"config": "Int8WeightOnlyConfig"}
_DYNAMIC: Final[dict[str, Any]] = {"config": "Int8DynamicActivationInt8WeightConfig"}
_MIXED_TITLE: Final = "`FqnToConfig`: int8, float8 and plain layers"
CASES: Final = [
    Quantized(name=name, title=title, **fields)
    for name, title, fields in (
        ("int8", "`Int8WeightOnlyConfig`", _INT8),
        ("int8-bfloat16", "`Int8WeightOnlyConfig`", _INT8 | _HALF),
        (
            "int8-groups",
            "`Int8WeightOnlyConfig`, groups of 32",
            _INT8 | {"options": lambda q: {"granularity": q.PerGroup(32)}},
        ),
        ("int8-dynamic", "`Int8DynamicActivationInt8WeightConfig`", _DYNAMIC),
        ("int8-dynamic-bfloat16", "`Int8DynamicActivationInt8WeightConfig`", _DYNAMIC | _HALF),
        (
            "int8-asymmetric",
            "`Int8DynamicActivationInt8WeightConfig`, asymmetric",
            _DYNAMIC | {"options": lambda q: {"act_mapping_type": q.MappingType.ASYMMETRIC}},
        ),
        (
            "int8-static",
            "`Int8StaticActivationInt8WeightConfig`",
            {"config": "Int8StaticActivationInt8WeightConfig", "options": _static},
        ),
        ("float8", "`Float8WeightOnlyConfig`", {"config": "Float8WeightOnlyConfig"}),
        ("float8-bfloat16", "`Float8WeightOnlyConfig`", {"config": "Float8WeightOnlyConfig"} | _HALF),
        ("int4", "`IntxWeightOnlyConfig`, int4, groups of 32", {"config": "IntxWeightOnlyConfig", "options": _int4}),
        (
            "int4-bfloat16",
            "`IntxWeightOnlyConfig`, int4, groups of 32",
            {"config": "IntxWeightOnlyConfig", "options": _int4} | _HALF,
        ),
        (
            "int4-dynamic",
            "`Int8DynamicActivationIntxWeightConfig`, int4",
            {
                "config": "Int8DynamicActivationIntxWeightConfig",
                "options": lambda _: {"weight_dtype": torch.int4},  # type: ignore[attr-defined]
            },
        ),
        ("int4-packed", "`PrototypeInt4WeightOnlyConfig`, groups of 32", _PACKED),
        ("int4-packed-bfloat16", "`PrototypeInt4WeightOnlyConfig`, groups of 32", _PACKED | _HALF),
        (
            "nf4",
            "`NF4WeightOnlyConfig`",
            {"config": "NF4WeightOnlyConfig", "module": "torchao.prototype._nf4tensor_api"} | _HALF,
        ),
        ("mixed", _MIXED_TITLE, {"config": "FqnToConfig", "options": _mixed}),
    )
]
ELSEWHERE: Final = [
    Quantized(name=name, title=title, dtype=torch.bfloat16, **fields)
    for name, title, fields in (
        ("int4-plain", "`Int4WeightOnlyConfig`", {"config": "Int4WeightOnlyConfig"}),
        (
            "int4-tiles",
            "`Int4WeightOnlyConfig`, `tile_packed_to_4d`",
            {"config": "Int4WeightOnlyConfig", "options": lambda _: {"int4_packing_format": "tile_packed_to_4d"}},
        ),
        (
            "int4-shuffled",
            "`Int4WeightOnlyConfig`, `preshuffled`",
            {"config": "Int4WeightOnlyConfig", "options": lambda _: {"int4_packing_format": "preshuffled"}},
        ),
        (
            "float8-dynamic",
            "`Float8DynamicActivationFloat8WeightConfig`",
            {"config": "Float8DynamicActivationFloat8WeightConfig"},
        ),
        (
            "float8-int4",
            "`Float8DynamicActivationInt4WeightConfig`",
            {"config": "Float8DynamicActivationInt4WeightConfig"},
        ),
    )
]


def row(case: Quantized, folder: Path, *, processes: bool = True) -> str:
    """What becomes of a model that a configuration has quantized, as a row of the table; without `processes`, their cell is empty."""
    model = case.model()
    calls = [torch.randn(rows, 256, generator=torch.Generator().manual_seed(rows)).to(case.dtype) for rows in (4, 7)]
    expected = [copy.deepcopy(model)(x) for x in calls]
    batch = torch.export.Dim("batch", min=1, max=64)
    bundles = [
        stagepack.export(
            model, (calls[0],), out=folder / f"{stages}.stagepack", stages=stages, dynamic_shapes=({0: batch},)
        )
        for stages in (1, 3)
    ]
    bundles.append(stagepack.recut(bundles[1], out=folder / "5.stagepack", stages=5))
    stored = {weight.dtype: weight for number in range(3) for weight in bundles[1].graph(number).weights}
    stored_bytes = sum(stage.weight_bytes for stage in bundles[0].stages)
    plain_bytes = sum(parameter.nbytes for parameter in Feed().to(case.dtype).parameters())
    in_processes = ""
    if processes:
        with stagepack.load(bundles[1], processes=True) as pipe:
            in_processes = _exact(pipe, calls, expected)
    cells = (
        case.title,
        str(case.dtype).removeprefix("torch."),
        ", ".join(sorted(stored)),
        f"{stored_bytes / plain_bytes:.2f}",
        next(
            (answer for answer in (_exact(stagepack.load(b), calls, expected) for b in bundles) if answer != RIGHT),
            RIGHT,
        ),
        in_processes,
        _in_onnxruntime(bundles[1], calls, expected),
    )
    return f"| {' | '.join(cells)} |"


def _exact(pipe: Any, calls: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    return RIGHT if all(torch.equal(pipe(x), answer) for x, answer in zip(calls, expected, strict=True)) else "wrong"


def _in_onnxruntime(bundle: stagepack.Bundle, calls: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    """Whether ONNX Runtime is right, or why it does not run stages."""
    added = stagepack.add_onnx(bundle)
    if added.torch_only:
        return _reason(next(iter(added.torch_only.values())))
    pipe = stagepack.load(bundle.path, runtime="onnxruntime")
    torch.testing.assert_close([pipe(x) for x in calls], expected, rtol=1e-3, atol=1e-3)
    return RIGHT


def _reason(reason: str) -> str:
    """Why ONNX Runtime does not run a stage, without the names of its nodes and of its versions."""
    if found := re.search(r"no ONNX form of \S+", reason):
        return f"refused: {found[0]}"
    if found := re.search(r"an implementation for (\w+)", reason):
        return f"refused: ONNX Runtime has no {found[1]} of this dtype"
    if found := re.search(r"Type 'tensor\((\w+)\)' of input parameter \(\S+\) of operator \((\w+)\)", reason):
        return f"refused: {found[2]} takes no {found[1]}"
    return f"refused: {reason.partition(': ')[2][:80]}"


def refusal(case: Quantized, folder: Path) -> str:
    """Why a configuration is refused on a CPU, as a row of the table."""
    try:
        stagepack.export(case.model(), (torch.randn(4, 256, dtype=case.dtype),), out=folder / "m.stagepack")
    except StagepackError as error:
        return f"| {case.title} | `stagepack.export`: {str(error).splitlines()[0][:100]} |"
    except Exception as error:  # noqa: BLE001 - torchao raises errors of any class
        return f"| {case.title} | {str(error).splitlines()[0][:100]} |"
    raise AssertionError(f"{case.name} is made on a CPU now: move it to CASES")


def section() -> str:
    """The section of the page, measured now."""
    torchao: Any = importlib.import_module("torchao")
    rows = []
    for case in (*CASES, *ELSEWHERE):
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            rows.append((row if case in CASES else refusal)(case, Path(folder)))
    made, refused = rows[: len(CASES)], rows[len(CASES) :]
    head = _HEAD.format(version=torchao.__version__)
    return "\n".join([HEADING + head + "\n".join(made), _FOOT + "\n".join(refused), "\n"])


def main() -> None:
    """Write the section anew."""
    page = PAGE.read_text()
    start = page.find(HEADING)
    end = page.index("## Not captured\n")
    start = end if start < 0 else start
    PAGE.write_text(page[:start] + section() + page[end:])


if __name__ == "__main__":
    main()
