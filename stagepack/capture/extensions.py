"""What extensions add to the export: models of libraries that neither torch nor transformers knows."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from stagepack.capture.inputs import Inputs
from stagepack.extensions import stated_objects


class LibraryModel(torch.nn.Module, ABC):
    """A model of a library as a module, with all that its export needs.

    Attributes:
        description: what it consists of, for people.
        files: the files of its bundle by their names.
    """

    description: str
    files: Mapping[str, bytes]

    @abstractmethod
    def example(self) -> Inputs:
        """Return its example inputs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratingModel:
    """A module that generates, which an extension makes of a model for the option ``generate`` of `stagepack.export`.

    Attributes:
        inputs: example inputs of its ``forward``; None for a module with an encoder.
        entry_points: example inputs of its functions by their names; empty for a module without an encoder.
        files: the files of its bundle by their names.
    """

    module: torch.nn.Module
    inputs: Inputs | None
    entry_points: dict[str, Inputs]
    files: dict[str, bytes]


class SourceExtension(Protocol):
    """The models of one library."""

    def wrap(self, model: object) -> LibraryModel | None:
        """Return a model in memory as the module that is captured; None if it is of another library. Imports nothing."""

    def reads(self, source: str) -> bool:
        """Return whether a folder or a hub name has such a model.

        Raises:
            CaptureError: its configuration is of no kind that can be exported.
        """

    def load(
        self, source: str, dtype_option: Mapping[str, torch.dtype], loading: AbstractContextManager[object]
    ) -> LibraryModel:
        """Load the model of a folder or a hub name.

        Args:
            source: the folder or the hub name.
            dtype_option: `dtype`, what its weights are converted to; nothing for the dtype of the checkpoint.
            loading: the context that its weights are loaded in.

        Raises:
            MissingPackageError: the library is not installed.
        """


@functools.cache
def source_extensions() -> Sequence[SourceExtension]:
    """Return what the installed extensions add."""
    return stated_objects("source")


def library_model(model: Any) -> LibraryModel | None:
    """Return a model of an extension as the module that is captured; None for another model."""
    modules = (extension.wrap(model) for extension in source_extensions())
    return next((module for module in modules if module is not None), None)


def extension_that_reads(source: str) -> SourceExtension | None:
    """Return the extension that loads a folder or a hub name; None if transformers or diffusers does."""
    return next((extension for extension in source_extensions() if extension.reads(source)), None)
