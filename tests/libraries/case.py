"""A model of a library: how it is made, what must be installed, and its examples."""

import functools
import importlib
import importlib.util
import pkgutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from stagepack.capture.inputs import Inputs
from stagepack.capture.programs import Capture
from stagepack.torch_internals import tree_map, wrapped_attributes
from tests.zoo.architectures.build import BATCH
from tests.zoo.case import Case

# Module -> the package that has it, where the names differ.
_PACKAGES = {
    "open_clip": "open_clip_torch",
    "segmentation_models_pytorch": "segmentation-models-pytorch",
    "sentence_transformers": "sentence-transformers",
    "whisper": "openai-whisper",
}

Make = Callable[[], torch.nn.Module]
MakeInputs = Callable[[], Inputs]


@dataclass(frozen=True, kw_only=True)
class LibraryCase(Case):
    """A model that a library makes."""

    libraries: Collection[str]  # the modules that must be importable

    @property
    def missing(self) -> list[str]:
        """The packages that it needs and that are not installed."""
        return [_PACKAGES.get(name, name) for name in self.libraries if importlib.util.find_spec(name) is None]

    def capture(self) -> Capture:
        """Build and capture the model. Skips the test where a library is missing."""
        self.skip_if_missing()
        return super().capture()

    def skip_if_missing(self) -> None:
        if self.missing:
            pytest.skip(
                f"{', '.join(self.missing)}: not installed: `make test-libraries` installs it, as does "
                "pip install -c constraints.txt -c tests/libraries/constraints.txt '.[libraries]'"
            )


def table(
    row: str,
    entries: Mapping[str, tuple[Make, MakeInputs]],
    *,
    libraries: Collection[str] | None = None,
    operators: str = "",
) -> list[LibraryCase]:
    """A case for each model of a library: what makes it, and what makes its example inputs."""
    return [
        LibraryCase(
            name=f"{row.replace(' ', '-')}-{name}",
            row=row,
            build=functools.partial(_build, make, inputs),
            libraries=(row,) if libraries is None else libraries,
            operators=operators,
        )
        for name, (make, inputs) in entries.items()
    ]


def _build(make: Make, make_inputs: MakeInputs) -> tuple[torch.nn.Module, Inputs]:
    importlib.import_module("tests.libraries.torchvision_operators")
    model = make().eval()
    # Libraries leave some parameters empty, whose checkpoints have them, and make others zeros, so that the answers would be zeros.
    with torch.no_grad():
        for parameter in model.parameters():
            if not wrapped_attributes(parameter) and parameter.is_floating_point() and _is_unset(parameter):
                parameter.normal_(std=0.1)
    return model, make_inputs()


def _is_unset(parameter: torch.Tensor) -> bool:
    largest = parameter.abs().max() if parameter.numel() else torch.ones(())
    return not 0 < largest < 1e4


def made(path: str, /, *args: Any, **kwargs: Any) -> Make:
    """Calls a class or function of a library, by its path ``module:name``, which is imported when it is called."""
    return lambda: pkgutil.resolve_name(path)(*args, **kwargs)


def batched(make_kwargs: Callable[[], dict[str, Any]]) -> MakeInputs:
    """Keyword arguments; the first dimension of all tensors in them is the batch, of any size."""

    def make_inputs() -> Inputs:
        kwargs = make_kwargs()
        return Inputs(kwargs=kwargs, dynamic_shapes=tree_map(_batch_of, kwargs))

    return make_inputs


def batch_of(*shapes: tuple[int, ...]) -> MakeInputs:
    """Tensors of random numbers by position, with a batch of two before these shapes, of any size."""

    def make_inputs() -> Inputs:
        args = tuple(torch.randn(2, *shape) for shape in shapes)
        return Inputs(args=args, dynamic_shapes=tuple({0: BATCH} for _ in args))

    return make_inputs


def fixed(make_args: Callable[[], tuple[Any, ...]]) -> MakeInputs:
    """Arguments by position whose sizes are fixed."""
    return lambda: Inputs(args=make_args())


def _batch_of(leaf: Any) -> dict[int, Any] | None:
    return {0: BATCH} if isinstance(leaf, torch.Tensor) and leaf.ndim else None
