"""Any model that `stagepack.export` accepts, or that the SOURCE argument of the command line names -> a captured model."""

import os
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.export import ExportedProgram

from stagepack.capture.checkpoint import DeferredTensors
from stagepack.capture.entry_points import capture_entry_points, capture_modules, function_modules, pipeline_module
from stagepack.capture.example_inputs import example_inputs
from stagepack.capture.hugging_face import capture_around_transformers, capture_pretrained, capture_transformers
from stagepack.capture.imports import call_user_function
from stagepack.capture.inputs import Inputs, on_device_of
from stagepack.capture.model_folders import diffusers_class
from stagepack.capture.module_checkpoint import make_with_checkpoint
from stagepack.capture.pretrained_model import is_transformers_model, load_pretrained
from stagepack.capture.programs import Capture, capture_module, capture_program, load_program
from stagepack.capture.sentence_pipeline import is_sentence_transformer, sentence_pipeline
from stagepack.capture.stated_inputs import ExampleArguments, ExampleInputs, StatedInputs, stated_inputs, to_inputs
from stagepack.capture.tensor_kinds import SCRIPTED
from stagepack.capture.torch_messages import advised_capture, describe_error
from stagepack.errors import CaptureError, OptionError
from stagepack.torch_internals import uncompiled_module

# The name of the only entry point of a model.
FORWARD = "forward"
NO_EXAMPLE = ExampleArguments()


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedModel:
    """A model that the command line names, and the dtype that its weights are converted to."""

    source: str
    dtype: str | None = None

    @property
    def is_factory(self) -> bool:
        """Whether a function makes it."""
        return ":" in self.source and not os.path.exists(self.source)

    def is_captured_by_name(self, example: ExampleArguments) -> bool:
        """Whether it is a program, or a model of transformers in evaluation mode, whose weights may stay in their files."""
        return self.source.endswith(".pt2") or not (example.training or diffusers_class(self.source))

    def refuse_dtype(self) -> None:
        """Refuse a dtype for a model that a function makes."""
        if self.dtype is not None:
            raise OptionError(
                f"dtype: it is for a Hugging Face folder or hub name: let {self.source} return a module of this dtype"
            )

    def load(self, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
        """Return the model, in training mode or not, and the inputs that its factory returns, if it does."""
        if self.is_factory:
            self.refuse_dtype()
            return _call_factory(self.source, training)
        model = load_pretrained(self.source, dtype=self.dtype)
        _set_mode(model, training, self.source)
        return model, None

    def load_with_inputs(self, example: ExampleArguments) -> tuple[Any, ExampleInputs]:
        """Return the model and its example inputs."""
        if self.is_factory:
            inputs = example.inputs()
            model, factory_inputs = self.load(example.training)
            return model, _completed(example, model, inputs or factory_inputs or Inputs())
        model, _ = self.load(example.training)
        inputs = example.inputs(lambda: example_inputs(model, self.source))
        if inputs is None:
            # No example is made for a model of diffusers: the error of the capture names its inputs.
            inputs = Inputs() if diffusers_class(self.source) else example_inputs(model, self.source)
        return model, _completed(example, model, inputs)


def capture_source(
    model: torch.nn.Module | ExportedProgram | str | os.PathLike[str],
    inputs: Inputs,
    *,
    dtype: str | torch.dtype | None = None,
) -> Capture:
    """Capture a model of any kind that `export` accepts."""
    is_pretrained = isinstance(model, str | os.PathLike) and not os.fspath(model).endswith(".pt2")
    if dtype is not None and not is_pretrained:
        raise OptionError(
            "dtype: it is for a Hugging Face folder or hub name: convert a module yourself, as in model.to(torch.bfloat16)"
        )
    if isinstance(model, torch.nn.Module):
        module = uncompiled_module(model)
        if is_sentence_transformer(module) and not inputs.args:
            pipeline = sentence_pipeline(module)
            captured = capture_module(pipeline, inputs if inputs.kwargs else pipeline.example())
            return replace(captured, method=f"{captured.method} of {pipeline.description}")
        capture = capture_transformers if is_transformers_model(module) else capture_around_transformers
        with advised_capture():
            return capture(module, inputs)
    if isinstance(model, ExportedProgram):
        return capture_program(model, inputs)
    if isinstance(model, str | os.PathLike):
        if os.fspath(model).endswith(".pt2"):
            return capture_program(load_program(model), inputs)
        if os.path.isfile(model) and not os.fspath(model).endswith(".py"):
            if _is_torchscript(model):
                raise CaptureError(f"{model}: {SCRIPTED}")
            raise CaptureError(f"{model}: expected a .pt2 file or a Hugging Face folder, found another file")
        if diffusers_class(os.fspath(model)):
            return capture_source(load_pretrained(os.fspath(model), dtype=dtype), inputs)
        return capture_pretrained(os.fspath(model), inputs, dtype=dtype)
    raise CaptureError(f"expected a torch.nn.Module, an ExportedProgram or a path, found {type(model).__name__}")


def _is_torchscript(path: str | os.PathLike[str]) -> bool:
    """Whether ``torch.jit.save`` wrote a file: a file of ``torch.save`` has no ``constants.pkl``."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith("/constants.pkl") for name in archive.namelist())


def capture_source_argument(
    source: str,
    example: ExampleArguments = NO_EXAMPLE,
    weights: str | None = None,
    dtype: str | None = None,
    modules: Sequence[str] = (),
) -> dict[str, Capture]:
    """Capture ``file.py:factory``, ``package.module:factory``, a ``.pt2`` file, or a Hugging Face folder or hub name.

    A factory takes no arguments and returns a module, or a module and its `Inputs`.
    """
    if modules:
        if weights is not None:
            raise CaptureError(f"{weights}: weights of a checkpoint are for a whole model")
        model, model_inputs = load_source_argument(source, example, dtype)
        return capture_modules(model, model_inputs, modules)
    named = _NamedModel(source=source, dtype=dtype)
    if not named.is_factory and (weights is not None or named.is_captured_by_name(example)):
        return _capture_saved(source, example, weights, dtype)
    if weights is not None:
        stated = example.inputs()
        named.refuse_dtype()
        if isinstance(stated, dict):
            raise CaptureError(f"{weights}: weights of a checkpoint are for a model with one entry point")
        return {
            FORWARD: capture_with_checkpoint(lambda: _call_factory(source, example.training), stated, weights, example)
        }
    model, inputs = named.load_with_inputs(example)
    if isinstance(inputs, dict):
        return capture_entry_points(_module_of_functions(source, model), inputs)
    return {FORWARD: capture_source(model, inputs)}


def _capture_saved(
    source: str, example: ExampleArguments, weights: str | None, dtype: str | None
) -> dict[str, Capture]:
    """Capture the model of a ``.pt2`` file, or a Hugging Face model."""
    if weights is not None:
        raise CaptureError(f"{source}: weights are for a module that FILE.py:FUNCTION makes; this source has its own")
    inputs = _inputs_of_saved(source, example)
    if isinstance(inputs, dict):
        return capture_entry_points(load_pretrained(source, dtype=dtype), inputs)
    return {FORWARD: capture_source(source, inputs or Inputs(), dtype=dtype)}


def load_source_argument(
    source: str, example: ExampleArguments = NO_EXAMPLE, dtype: str | None = None
) -> tuple[torch.nn.Module, Inputs]:
    """Return the model that the command line names, and its example inputs, without capturing it."""
    model, inputs = _NamedModel(source=source, dtype=dtype).load_with_inputs(example)
    if not isinstance(model, torch.nn.Module) or isinstance(inputs, dict):
        raise CaptureError(f"{source}: expected a torch.nn.Module and the inputs of one call")
    return model, inputs


def load_functions(source: str, example: ExampleArguments) -> dict[str, tuple[Any, Inputs]]:
    """Return what the command line names without capturing it: the modules to capture, or the program, by the name of the entry point."""
    if source.endswith(".pt2"):
        program_inputs = _inputs_of_saved(source, example) or Inputs()
        if isinstance(program_inputs, dict):
            raise CaptureError(f"{source}: expected the inputs of one call, found those of several entry points")
        return {FORWARD: (load_program(source), program_inputs)}
    model, inputs = _NamedModel(source=source).load_with_inputs(example)
    if not isinstance(inputs, dict):
        return {FORWARD: (model, inputs)}
    functions = function_modules(_module_of_functions(source, model), inputs)
    return {name: (module, of_path) for name, (_, module, of_path) in functions.items()}


def _module_of_functions(source: str, model: Any) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise CaptureError(f"{source}: expected a torch.nn.Module for several entry points, found an ExportedProgram")
    return model


def load_model_argument(source: str, dtype: str | None = None) -> Any:
    """Return the model that the command line names, without example inputs; see `load_source_argument`."""
    return _NamedModel(source=source, dtype=dtype).load()[0]


def _inputs_of_saved(source: str, example: ExampleArguments) -> ExampleInputs | None:
    """What is said about the inputs of a ``.pt2`` file or a Hugging Face model."""
    if source.endswith(".pt2"):
        _set_mode(None, example.training, source)
        if example.dynamic:
            raise OptionError(
                f"{source}: the sizes of an exported program are fixed or dynamic already: leave out --dynamic"
            )
        return example.inputs()
    inputs = example.inputs(lambda: pretrained_inputs(source))
    if not example.dynamic:
        return inputs
    forward = load_pretrained(source, DeferredTensors()).forward
    return example.complete(pretrained_inputs(source) if inputs is None else inputs, forward)


def pretrained_inputs(source: str) -> Inputs:
    """Return the example inputs that are made for a Hugging Face model, of which no weights are loaded."""
    return example_inputs(load_pretrained(source, DeferredTensors()), source)


def inputs_of_call(
    args: Any, kwargs: Any, dynamic_shapes: Any, stated: StatedInputs | None = None, model: object = None
) -> Inputs:
    """Return the example inputs of a call of `stagepack.export` or `stagepack.plan`.

    kwargs: the inputs by name, or None.
    """
    if stated is not None:
        if args or kwargs or dynamic_shapes is not None:
            raise OptionError("inputs: they are in the place of args, kwargs and dynamic_shapes: leave these out")
        is_pretrained = isinstance(model, str | os.PathLike) and not os.fspath(model).endswith(".pt2")
        inputs = stated_inputs(stated, (lambda: pretrained_inputs(os.fspath(model))) if is_pretrained else None)  # type: ignore[call-overload]
        return on_device_of(model, inputs) if isinstance(model, torch.nn.Module) and inputs is not stated else inputs
    # A tensor is a sequence too: its rows would become the arguments.
    if not isinstance(args, tuple | list):
        raise OptionError(f"args: expected a tuple of example inputs, such as (x,), found {type(args).__name__}")
    if not isinstance(kwargs, Mapping | None):
        raise OptionError(f"kwargs: expected a dict of example inputs by name, found {type(kwargs).__name__}")
    return Inputs(args=tuple(args), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)


def _completed(example: ExampleArguments, model: Any, inputs: ExampleInputs) -> ExampleInputs:
    """Inputs with the sizes that the command line says are dynamic; an exported program has them already."""
    if example.texts and isinstance(inputs, Inputs) and isinstance(model, torch.nn.Module):
        inputs = on_device_of(model, inputs)
    if not example.dynamic:
        return inputs
    if not isinstance(model, torch.nn.Module):
        raise OptionError("the sizes of an exported program are fixed or dynamic already: leave out --dynamic")
    return example.complete(inputs, model.forward)


def capture_with_checkpoint(
    make_model: Callable[[], tuple[Any, ExampleInputs | None]],
    inputs: Inputs | None,
    weights: str | os.PathLike[str],
    example: ExampleArguments = NO_EXAMPLE,
) -> Capture:
    """Capture a module, which a function makes with its inputs or None, whose weights stay in a checkpoint as far as possible."""

    def module_of(made: tuple[Any, ExampleInputs | None]) -> torch.nn.Module:
        if not isinstance(made[0], torch.nn.Module):
            raise CaptureError(f"{weights}: expected a function that makes a torch.nn.Module for these weights")
        return made[0]

    (model, factory_inputs), deferred = make_with_checkpoint(make_model, module_of, weights)
    if isinstance(factory_inputs, dict):
        raise CaptureError(f"{weights}: weights of a checkpoint are for a model with one entry point")
    completed = _completed(example, model, inputs or factory_inputs or Inputs())
    assert isinstance(completed, Inputs)
    if deferred is None:
        return capture_source(model, completed)
    return replace(capture_module(model, completed), deferred=deferred)


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


def _call_factory(source: str, training: bool | None = None) -> tuple[Any, ExampleInputs | None]:
    """Call a factory; return the module, in training mode or not, and its inputs, or None."""
    model = call_user_function(source)
    inputs = None
    if isinstance(model, tuple) and len(model) == 2:
        model, factory_inputs = model
        inputs = to_inputs(factory_inputs, source)
    model = pipeline_module(model) or model
    if not isinstance(model, torch.nn.Module | torch.export.ExportedProgram):
        raise CaptureError(
            f"{source}: expected a torch.nn.Module, or a module and its inputs, found {type(model).__name__}"
        )
    _set_mode(model, training, source)
    return model, inputs
