"""A model in any form that users have: `ModelSource` gives its captures, its functions and its files."""

import os
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.capture.checkpoint import DeferredTensors
from stagepack.capture.entry_points import capture_entry_points, capture_modules, function_modules, pipeline_module
from stagepack.capture.extensions import library_model
from stagepack.capture.imports import call_user_function
from stagepack.capture.inputs import Inputs
from stagepack.capture.module_checkpoint import make_with_checkpoint
from stagepack.capture.programs import Capture, capture_module, capture_program, load_program
from stagepack.capture.stated_inputs import Example, ExampleInputs, to_inputs
from stagepack.capture.tensor_kinds import SCRIPTED
from stagepack.capture.torch_messages import advised_capture, describe_error
from stagepack.capture.transformers.example_inputs import example_inputs
from stagepack.capture.transformers.exported_folders import read_exported_folder
from stagepack.capture.transformers.hugging_face import (
    capture_around_transformers,
    capture_pretrained,
    capture_transformers,
)
from stagepack.capture.transformers.model_folders import diffusers_class, export_folder, form_of_source
from stagepack.capture.transformers.pretrained_model import load_pretrained
from stagepack.capture.user_model import is_transformers_model
from stagepack.errors import CaptureError, OptionError
from stagepack.torch_internals import uncompiled_module

# The name of the only entry point of a model.
FORWARD = "forward"
# The name of the component that transformers' exporters give a model that they export as a whole.
_ONLY_COMPONENT = "model"
_NO_EXAMPLE = Example()


class ModelSource(ABC):
    """A model in any form: a module, a program or programs, their files, a Hugging Face folder or hub name, or a function.

    Attributes:
        name: how messages name it.
        folder: the folder or hub name of a Hugging Face model; None for others.
    """

    folder: str | None = None

    def __init__(self, name: str) -> None:
        self.name = name

    @staticmethod
    def of(
        model: object, *, weights: str | os.PathLike[str] | None = None, dtype: str | torch.dtype | None = None
    ) -> "ModelSource":
        """Return the source of a model.

        Args:
            model: the model; of a text, what the command line takes as SOURCE.
            weights: a checkpoint of the module that a function makes.
            dtype: what the weights of a Hugging Face model are converted to.

        Raises:
            CaptureError: `model` is no model.
            OptionError: the model does not take `weights` or `dtype`.
        """
        source = _named_source(os.fspath(model), weights, dtype) if isinstance(model, str | os.PathLike) else None
        if source is None and weights is not None and callable(model) and not isinstance(model, torch.nn.Module):
            source = _Factory(getattr(model, "__qualname__", type(model).__name__), model, weights)
        if source is None:
            source = _LoadedModel(model)
        if weights is not None and not isinstance(source, _Factory):
            raise OptionError(
                "weights: expected a function that makes the module, such as its class or FILE.py:FUNCTION, found "
                f"{source.name}, which has its own weights"
            )
        if dtype is not None and not isinstance(source, _Pretrained):
            raise OptionError(
                "dtype: it is for a Hugging Face folder or hub name: convert a module yourself, as in model.to(torch.bfloat16)"
            )
        return source

    @abstractmethod
    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        """Return the module or the program, and the inputs that a function returns beside it.

        training: its mode; None to leave it as it is.
        """

    def captures(self, example: Example = _NO_EXAMPLE, modules: Sequence[str] = ()) -> dict[str, Capture]:
        """Capture the model, or those functions or modules of it that become entry points, by the names of these.

        modules: paths of modules that are captured with the inputs that they get when the model runs its example.
        """
        model, inputs = self.load_with_inputs(example)
        if modules:
            if not isinstance(model, torch.nn.Module) or isinstance(inputs, dict):
                raise CaptureError(f"{self.name}: expected a torch.nn.Module and the inputs of one call")
            return capture_modules(model, inputs, modules)
        if isinstance(inputs, dict):
            return capture_entry_points(self._module_of_functions(model), inputs)
        return {FORWARD: capture_model(model, inputs)}

    def functions(self, example: Example) -> dict[str, tuple[Any, Inputs]]:
        """Return the modules to capture, or the program, with their inputs, by the names of the entry points; nothing is captured."""
        model, inputs = self.load_with_inputs(example)
        if not isinstance(inputs, dict):
            return {FORWARD: (model, inputs)}
        functions = function_modules(self._module_of_functions(model), inputs)
        return {name: (module, of_path) for name, (_, module, of_path) in functions.items()}

    def load_with_inputs(self, example: Example) -> tuple[Any, ExampleInputs]:
        """Return the model and its example inputs."""
        inputs = example.inputs(self._make_inputs)
        model, own_inputs = self.load(example.training)
        inputs = own_inputs if inputs is None else inputs
        return model, example.completed(model, self._default_inputs(model) if inputs is None else inputs)

    def _make_inputs(self) -> Inputs:
        """The inputs that are made for the model, of which an image that is stated becomes one."""
        return Inputs()

    def _default_inputs(self, _model: Any) -> Inputs:
        return Inputs()

    def _module_of_functions(self, model: Any) -> torch.nn.Module:
        if not isinstance(model, torch.nn.Module):
            raise CaptureError(
                f"{self.name}: expected a torch.nn.Module for several entry points, found an ExportedProgram"
            )
        return model


class _LoadedModel(ModelSource):
    """A module, a program, or a pipeline of diffusers in memory."""

    def __init__(self, model: object) -> None:
        super().__init__(type(model).__name__)
        self._pipeline = pipeline_module(model)
        self._model = uncompiled_module(model) if isinstance(model, torch.nn.Module) else self._pipeline or model
        if not isinstance(self._model, torch.nn.Module | ExportedProgram):
            raise CaptureError(
                f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}"
            )

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        _set_mode(self._model, training, self.name)
        return self._model, None

    def captures(self, example: Example = _NO_EXAMPLE, modules: Sequence[str] = ()) -> dict[str, Capture]:
        if self._pipeline is not None and not modules and example.entry_points is None:
            raise CaptureError(
                f"expected a torch.nn.Module, an ExportedProgram or a path, found {self.name}: state the inputs of its models "
                "by entry_points"
            )
        return super().captures(example, modules)


class _ProgramFile(ModelSource):
    """A ``.pt2`` file."""

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        _set_mode(None, training, self.name)
        return load_program(self.name), None


class _Programs(ModelSource):
    """The folder of an exporter of transformers: each program is an entry point, one that is alone and called ``model`` the only one."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.folder = export_folder(name)

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        _set_mode(None, training, self.name)
        names = ", ".join(self._read())
        raise CaptureError(
            f"{self.name}: expected a module, found exported programs ({names}), which are exported as they are"
        )

    def captures(self, example: Example = _NO_EXAMPLE, modules: Sequence[str] = ()) -> dict[str, Capture]:
        if modules:
            raise OptionError(
                f"modules: {self.name} holds exported programs: each becomes an entry point, leave out modules (--part)"
            )
        return {name: self._capture(name, *function) for name, function in self.functions(example).items()}

    def functions(self, example: Example) -> dict[str, tuple[Any, Inputs]]:
        _set_mode(None, example.training, self.name)
        stated, programs = example.inputs(), self._read()
        if stated is not None and not isinstance(stated, dict):
            if len(programs) > 1:
                raise OptionError(
                    f"inputs: {self.name} has the entry points {', '.join(programs)}: pass a dict of stagepack.Inputs by their names"
                )
            stated = dict.fromkeys(programs, stated)
        inputs = stated or {}
        if unknown := [name for name in inputs if name not in programs]:
            raise OptionError(f"entry_points: expected names among {', '.join(programs)}, found {unknown[0]!r}")
        functions = {}
        for name, program in programs.items():
            completed = example.completed(program, inputs.get(name, Inputs()))
            if not isinstance(completed, Inputs):
                raise OptionError(
                    f"entry_points: expected stagepack.Inputs for {name!r}, found {type(completed).__name__}"
                )
            functions[name] = (program, completed)
        return functions

    def _read(self) -> dict[str, ExportedProgram]:
        programs = read_exported_folder(self.name)
        return {FORWARD: programs[_ONLY_COMPONENT]} if [*programs] == [_ONLY_COMPONENT] else programs

    def _capture(self, name: str, program: ExportedProgram, inputs: Inputs) -> Capture:
        try:
            return capture_program(program, inputs)
        except CaptureError as error:
            raise CaptureError(f"{self.name}: {name}: {error}") from error


class _Pretrained(ModelSource):
    """A Hugging Face folder or hub name."""

    def __init__(self, name: str, dtype: str | torch.dtype | None) -> None:
        super().__init__(name)
        self.folder = name
        self._dtype = dtype

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        model = load_pretrained(self.name, dtype=self._dtype)
        _set_mode(model, training, self.name)
        return model, None

    def captures(self, example: Example = _NO_EXAMPLE, modules: Sequence[str] = ()) -> dict[str, Capture]:
        """The weights of a whole model in evaluation mode stay in their files."""
        if modules or example.training or diffusers_class(self.name):
            return super().captures(example, modules)
        inputs = example.inputs(self._make_inputs)
        if example.dynamic:
            made = self._make_inputs() if inputs is None else inputs
            inputs = example.completed(load_pretrained(self.name, DeferredTensors()), made)
        if isinstance(inputs, dict):
            return capture_entry_points(self.load()[0], inputs)
        return {FORWARD: capture_pretrained(self.name, inputs or Inputs(), dtype=self._dtype)}

    def _make_inputs(self) -> Inputs:
        return pretrained_inputs(self.name)

    def _default_inputs(self, model: Any) -> Inputs:
        # No example is made for a model of diffusers: the error of the capture names its inputs.
        return Inputs() if diffusers_class(self.name) else example_inputs(model, self.name)


class _Factory(ModelSource):
    """A function without arguments that returns a module, or a module and its inputs; its weights may be in a checkpoint."""

    def __init__(self, name: str, make_model: Callable[[], Any], weights: str | os.PathLike[str] | None) -> None:
        super().__init__(name)
        self._make_model = make_model
        self._weights = weights

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        model, inputs = self._make_model(), None
        if isinstance(model, tuple) and len(model) == 2:
            model, factory_inputs = model
            inputs = to_inputs(factory_inputs, self.name)
        model = pipeline_module(model) or model
        if not isinstance(model, torch.nn.Module | ExportedProgram):
            raise CaptureError(
                f"{self.name}: expected a torch.nn.Module, or a module and its inputs, found {type(model).__name__}"
            )
        _set_mode(model, training, self.name)
        return model, inputs

    def captures(self, example: Example = _NO_EXAMPLE, modules: Sequence[str] = ()) -> dict[str, Capture]:
        """With a checkpoint, the weights stay in it as far as possible."""
        if self._weights is None:
            return super().captures(example, modules)
        if modules:
            raise CaptureError(f"{self._weights}: weights of a checkpoint are for a whole model")
        weights, stated = self._weights, example.inputs(self._make_inputs)

        def module_of(made: tuple[Any, ExampleInputs | None]) -> torch.nn.Module:
            if not isinstance(made[0], torch.nn.Module):
                raise CaptureError(f"{weights}: expected a function that makes a torch.nn.Module for these weights")
            return made[0]

        (model, own_inputs), deferred = make_with_checkpoint(lambda: self.load(example.training), module_of, weights)
        inputs = own_inputs if stated is None else stated
        if isinstance(inputs, dict):
            raise CaptureError(f"{weights}: weights of a checkpoint are for a model with one entry point")
        completed = example.completed(model, Inputs() if inputs is None else inputs)
        assert isinstance(completed, Inputs)
        if deferred is None:
            return {FORWARD: capture_model(model, completed)}
        return {FORWARD: replace(capture_module(model, completed), deferred=deferred)}


def _named_source(name: str, weights: str | os.PathLike[str] | None, dtype: str | torch.dtype | None) -> ModelSource:
    match form_of_source(name):
        case "program":
            return _ProgramFile(name)
        case "programs":
            return _Programs(name)
        case "function":
            return _Factory(name, lambda: call_user_function(name), weights)
        case "file":
            if _is_torchscript(name):
                raise CaptureError(f"{name}: {SCRIPTED}")
            raise CaptureError(f"{name}: expected a .pt2 file or a Hugging Face folder, found another file")
        case "pretrained":
            return _Pretrained(name, dtype)


def capture_model(model: torch.nn.Module | ExportedProgram, inputs: Inputs) -> Capture:
    """Capture a module, or take the program."""
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if not inputs.args and (module := library_model(model)) is not None:
        captured = capture_module(module, inputs if inputs.kwargs else module.example())
        return replace(captured, method=f"{captured.method} of {module.description}")
    capture = capture_transformers if is_transformers_model(model) else capture_around_transformers
    with advised_capture():
        return capture(model, inputs)


def pretrained_inputs(source: str) -> Inputs:
    """Return the example inputs that are made for a Hugging Face model, of which no weights are loaded."""
    return example_inputs(load_pretrained(source, DeferredTensors()), source)


def _is_torchscript(path: str) -> bool:
    """Whether ``torch.jit.save`` wrote a file: a file of ``torch.save`` has no ``constants.pkl``."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def _set_mode(model: Any, training: bool | None, source: str) -> None:
    """Put a module into training mode, or out of it; None leaves its mode as it is. A program keeps that of its export."""
    if training is None:
        return
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{source}: an exported program is in the mode of its export: leave out --eval and --train")
    try:
        model.train(training)
    except Exception as error:
        # The module of a program, as PT2E quantization returns it, raises NotImplementedError.
        option = "--train" if training else "--eval"
        raise CaptureError(
            f"{source}: {type(model).__name__} has no other mode: leave out {option}: {describe_error(error)}"
        ) from error
