"""What a caller states about example inputs, in any of its forms -> `Inputs`.

Inputs as text have this grammar; a text may also name a file of arrays or an image::

    INPUT = [NAME "="] "@" FILE | NAME "=" (TENSOR | NUMBER | "true" | "false" | "none")
    TENSOR = DTYPE "[" [SIZE {"," SIZE}] "]"
    SIZE = a number | DIMENSION, see `stated_sizes`
    DYNAMIC = NAME [":" AXIS ["=" DIMENSION]]

A size with a symbol may change, and is the same wherever the symbol is. A .npz or .safetensors FILE without NAME has an input for each of
its arrays. DYNAMIC makes a size of an input dynamic, or an input that is a whole number.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file
from torch.export import Dim

from stagepack.capture.imports import call_user_function
from stagepack.capture.inputs import Inputs, inputs_by_parameter, on_device_of
from stagepack.capture.stated_sizes import StatedSize, StatedSizes
from stagepack.capture.transformers.example_tensors import random_tensor
from stagepack.errors import CaptureError, MissingPackageError, OptionError

# The inputs of one call of the model, or of functions of it by their paths.
ExampleInputs = Inputs | dict[str, Inputs]
# What `stagepack.export` takes as its inputs.
StatedInputs = Inputs | str | Sequence[str] | Mapping[str, Any]
# Makes the example inputs of a model, of which an image becomes one.
MakeInputs = Callable[[], Inputs]
_INPUT: Final = re.compile(r"(?:(?P<name>[^\W\d]\w*)\s*=\s*)?(?P<value>.+)", re.DOTALL)
_TENSOR: Final = re.compile(r"(?P<dtype>\w+)\s*\[(?P<sizes>[^\]]*)\]")
_DYNAMIC: Final = re.compile(r"(?P<name>[^\W\d]\w*)(?::(?P<axis>\d+)(?:=(?P<dimension>.+))?)?")
_WORDS: Final[Mapping[str, bool | None]] = {"true": True, "false": False, "none": None}
_DTYPES: Final = {"bool": torch.bool} | {
    dtype_name: dtype
    for dtype_name, dtype in vars(torch).items()
    if isinstance(dtype, torch.dtype) and str(dtype) == f"torch.{dtype_name}"
}
_IMAGE_SUFFIXES: Final = (".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp")
_MOST_ELEMENTS: Final = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """What a caller says about the call that is captured, in Python or on the command line."""

    # The inputs of one call, as `stagepack.export` takes them.
    stated: StatedInputs | None = None
    # The inputs of functions by their paths, see `capture_entry_points`.
    entry_points: Mapping[str, Inputs] | None = None
    # ``file.py:function`` or ``package.module:function``. The function takes no arguments and returns `Inputs`, a tuple of inputs by
    # position, or a dict of inputs by name; or a dict of `Inputs` by paths of functions.
    function: str | None = None
    # The inputs as text, see `parse_inputs`.
    texts: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()
    # Whether the model is in training mode; None to leave its mode as it is.
    training: bool | None = None

    def __post_init__(self) -> None:
        ways = (self.stated is not None, self.function is not None, bool(self.texts))
        if sum(ways) > 1:
            raise OptionError("the inputs are stated twice: pass --inputs FILE.py:FUNCTION or --input, not both")
        if self.entry_points is None:
            return
        if any(ways):
            raise OptionError(
                "entry_points: each has its own inputs: leave out args, kwargs, inputs and dynamic_shapes"
            )
        if not isinstance(self.entry_points, Mapping):
            raise OptionError(
                f"entry_points: expected a dict of inputs by paths of functions, found {type(self.entry_points).__name__}"
            )

    @classmethod
    def of_call(
        cls,
        args: Any,
        kwargs: Any,
        dynamic_shapes: Any,
        stated: StatedInputs | None = None,
        entry_points: Mapping[str, Inputs] | None = None,
    ) -> "Example":
        """Return what a call of `stagepack.export` or `stagepack.plan` says.

        kwargs: the inputs by name, or None.
        """
        # A tensor is a sequence too: its rows would become the arguments.
        if not isinstance(args, tuple | list):
            raise OptionError(f"args: expected a tuple of example inputs, such as (x,), found {type(args).__name__}")
        if not isinstance(kwargs, Mapping | None):
            raise OptionError(f"kwargs: expected a dict of example inputs by name, found {type(kwargs).__name__}")
        if args or kwargs or dynamic_shapes is not None:
            if stated is not None:
                raise OptionError("inputs: they are in the place of args, kwargs and dynamic_shapes: leave these out")
            stated = Inputs(args=tuple(args), kwargs=dict(kwargs or {}), dynamic_shapes=dynamic_shapes)
        return cls(stated=stated, entry_points=entry_points)

    @property
    def is_given(self) -> bool:
        """Whether anything is said."""
        return self != _NOTHING

    def inputs(self, make_inputs: MakeInputs | None = None) -> ExampleInputs | None:
        """Return the inputs that are stated, or None; sizes of `dynamic` are not yet dynamic."""
        if self.entry_points is not None:
            return dict(self.entry_points)
        if self.stated is not None:
            return stated_inputs(self.stated, make_inputs)
        if self.function is not None:
            return to_inputs(call_user_function(self.function), self.function)
        return parse_inputs(self.texts, make_inputs) if self.texts else None

    def completed(self, model: Any, inputs: ExampleInputs) -> ExampleInputs:
        """Return inputs on the device of a module, and with the sizes of `dynamic`; an exported program has its own."""
        is_made = bool(self.texts) or (self.stated is not None and not isinstance(self.stated, Inputs))
        if is_made and isinstance(inputs, Inputs) and isinstance(model, torch.nn.Module):
            inputs = on_device_of(model, inputs)
        if not self.dynamic:
            return inputs
        if not isinstance(model, torch.nn.Module):
            raise OptionError("the sizes of an exported program are fixed or dynamic already: leave out --dynamic")
        if isinstance(inputs, dict):
            raise OptionError("dynamic: of several entry points, each states its own sizes in stagepack.Inputs")
        return with_dynamic_sizes(inputs, self.dynamic, model.forward)


_NOTHING = Example()


def stated_inputs(stated: StatedInputs, make_inputs: MakeInputs | None = None) -> Inputs:
    """Return the inputs that a caller states in Python."""
    if isinstance(stated, Inputs):
        return stated
    if isinstance(stated, Mapping):
        texts = {input_name: input_text for input_name, input_text in stated.items() if isinstance(input_text, str)}
        parsed = parse_inputs(f"{input_name}={input_text}" for input_name, input_text in texts.items())
        return replace(
            parsed, kwargs={input_name: parsed.kwargs.get(input_name, value) for input_name, value in stated.items()}
        )
    texts_in_order = [stated] if isinstance(stated, str) else stated
    if not isinstance(texts_in_order, list | tuple) or not all(
        isinstance(input_text, str) for input_text in texts_in_order
    ):
        raise OptionError(
            "inputs: expected stagepack.Inputs, a dict by name, or texts such as 'x=float32[batch=2..512,64]', found "
            f"{type(stated).__name__}: pass a tuple of inputs by position as args"
        )
    return parse_inputs(texts_in_order, make_inputs)


def to_inputs(returned: object, reference: str) -> ExampleInputs:
    """Convert the result of a user's function to inputs."""
    if isinstance(returned, Inputs):
        return returned
    if isinstance(returned, dict) and returned and all(isinstance(value, Inputs) for value in returned.values()):
        return returned
    if isinstance(returned, dict):
        return Inputs(kwargs=returned)
    if isinstance(returned, tuple):
        return Inputs(args=returned)
    raise CaptureError(
        f"{reference}: expected stagepack.Inputs, a tuple or a dict of example inputs, found {type(returned).__name__}"
    )


@dataclass(frozen=True, slots=True)
class _Described:
    """A tensor as a text describes it: its sizes are numbers, or symbols."""

    dtype: torch.dtype
    sizes: tuple[int | StatedSize, ...]


def parse_inputs(input_texts: str | Iterable[str], make_inputs: MakeInputs | None = None) -> Inputs:
    """Return the example inputs that texts describe, by their names.

    make_inputs: makes the inputs of a model of images, one of which an image without a name replaces. One with a name is ``[1, 3, height,
        width]`` of numbers from 0 to 1.
    """
    stated_sizes = StatedSizes()
    described: dict[str, Any] = {}
    made_inputs = Inputs()
    for input_text in [input_texts] if isinstance(input_texts, str) else input_texts:
        if (
            make_inputs is not None
            and input_text.strip().startswith("@")
            and Path(input_text.strip()).suffix.lower() in _IMAGE_SUFFIXES
        ):
            made_inputs = make_inputs()
            values = _image_in_place(input_text, made_inputs)
        else:
            values = _parse(input_text, stated_sizes)
        for input_name, value in values.items():
            if input_name in described:
                raise OptionError(f"{input_text}: the input {input_name} is there twice")
            described[input_name] = value
    kwargs, dynamic_shapes = dict(made_inputs.kwargs), dict(made_inputs.dynamic_shapes or {})
    symbol_sizes = stated_sizes.example_sizes()
    for input_name, value in described.items():
        kwargs[input_name] = _example(input_name, value, symbol_sizes) if isinstance(value, _Described) else value
        if isinstance(value, _Described):
            dynamic_sizes = [(axis, size) for axis, size in enumerate(value.sizes) if isinstance(size, StatedSize)]
            dynamic_shapes[input_name] = {axis: stated_sizes.dim(size) for axis, size in dynamic_sizes}
    return Inputs(
        kwargs=kwargs, dynamic_shapes={input_name: dims for input_name, dims in dynamic_shapes.items() if dims} or None
    )


def _image_in_place(input_text: str, made_inputs: Inputs) -> dict[str, torch.Tensor]:
    """An image as the input of a model that takes images of one size."""
    images = {
        input_name: value
        for input_name, value in made_inputs.kwargs.items()
        if isinstance(value, torch.Tensor)
        and value.ndim == 4
        and value.is_floating_point()
        and value.shape[1] in (1, 3)
    }
    if not images:
        raise OptionError(
            f"{input_text}: the model takes no image [batch, channels, height, width]: name an input, NAME={input_text}"
        )
    input_name, example = next(iter(images.items()))
    path, (height, width) = Path(input_text.strip()[1:]), example.shape[2:]
    image = _from_file(
        input_text, path, lambda: image_tensor(path, (height, width), "L" if example.shape[1] == 1 else "RGB")
    )
    return {input_name: image.to(example.dtype).repeat(example.shape[0], 1, 1, 1)}


def with_dynamic_sizes(inputs: Inputs, input_texts: Iterable[str], forward: Callable[..., Any]) -> Inputs:
    """Return inputs of which further sizes may change."""
    shapes, stated_sizes, values = inputs.dynamic_shapes, StatedSizes(), inputs_by_parameter(forward, inputs)
    if not isinstance(shapes, Mapping | None):
        raise OptionError(
            "dynamic: the dynamic_shapes of the inputs are no dict by the names of parameters: state all sizes there"
        )
    dynamic_shapes = dict(shapes or {})
    parsed = []
    for input_text in input_texts:
        stated = _DYNAMIC.fullmatch(input_text.strip())
        if stated is None:
            raise OptionError(
                f"{input_text}: expected NAME:AXIS=SYMBOL, such as x:0=batch, x:0=batch=2..512 or x:0=4*h, or the NAME of a number"
            )
        dimension = stated["dimension"]
        parsed.append((input_text, stated, stated_sizes.add(input_text, dimension) if dimension else None))
    for input_text, stated, size in parsed:
        input_name, axis = stated["name"], stated["axis"]
        if input_name not in values:
            raise OptionError(
                f"{input_text}: expected one of the inputs {', '.join(values) or '(none)'}, found {input_name}"
            )
        value = values[input_name]
        if axis is None:
            if type(value) is not int:
                raise OptionError(
                    f"{input_text}: {input_name} is no whole number: name a dimension of it, such as {input_name}:0=batch"
                )
            dynamic_shapes[input_name] = Dim.DYNAMIC
        elif not isinstance(value, torch.Tensor | np.ndarray) or int(axis) >= value.ndim:
            kind = f"{value.ndim} dimensions" if isinstance(value, torch.Tensor | np.ndarray) else type(value).__name__
            raise OptionError(f"{input_text}: expected a dimension of a tensor, found {input_name} with {kind}")
        else:
            dim = Dim.DYNAMIC if size is None else stated_sizes.dim(size)
            of_name = dynamic_shapes.get(input_name) or {}
            of_axis = of_name if isinstance(of_name, Mapping) else dict(enumerate(of_name))
            dynamic_shapes[input_name] = {**of_axis, int(axis): dim}
    return replace(inputs, dynamic_shapes=dynamic_shapes)


def _parse(input_text: str, stated_sizes: StatedSizes) -> dict[str, Any]:
    """The inputs of a text, by name."""
    stated = _INPUT.fullmatch(input_text.strip())
    input_name, value = (None, "") if stated is None else (stated["name"], stated["value"].strip())
    if value.startswith("@"):
        return _read(input_text, input_name, Path(value[1:]))
    if input_name is not None and value.lower() in _WORDS:
        return {input_name: _WORDS[value.lower()]}
    if input_name is not None and (number_value := _parsed_number(value)) is not None:
        return {input_name: number_value}
    tensor = None if input_name is None else _TENSOR.fullmatch(value)
    if input_name is None or tensor is None:
        raise OptionError(
            f"{input_text}: expected NAME=DTYPE[SIZES] such as x=float32[batch=2..512,64], NAME=3, NAME=true, NAME=none, or [NAME=]@FILE"
        )
    if tensor["dtype"] not in _DTYPES:
        raise OptionError(
            f"{input_text}: expected a dtype of torch such as float32, int64 or bool, found {tensor['dtype']}"
        )
    sizes = [size.strip() for size in tensor["sizes"].split(",")] if tensor["sizes"].strip() else []
    return {
        input_name: _Described(
            _DTYPES[tensor["dtype"]],
            tuple(int(size) if size.isdecimal() else stated_sizes.add(input_text, size) for size in sizes),
        )
    }


def _parsed_number(input_text: str) -> int | float | None:
    for convert in (int, float):
        try:
            return convert(input_text)
        except ValueError:
            pass
    return None


def _example(input_name: str, described: _Described, symbol_sizes: Mapping[str, int]) -> torch.Tensor:
    """Random numbers, or ones of other dtypes: they are tokens, masks and numbers of things."""
    shape = [size if isinstance(size, int) else size.at(symbol_sizes[size.symbol]) for size in described.sizes]
    if int(np.prod(shape, dtype=object)) > _MOST_ELEMENTS:
        raise OptionError(f"{input_name}: the example would have over {_MOST_ELEMENTS} elements: state smaller sizes")
    is_float = described.dtype.is_floating_point and described.dtype.itemsize > 1
    return random_tensor(described.dtype, *shape) if is_float else torch.ones(shape).to(described.dtype)


def _read(input_text: str, input_name: str | None, path: Path) -> dict[str, Any]:
    """The inputs that a file has, by name."""
    arrays = _from_file(input_text, path, lambda: _arrays(path))
    if input_name is None:
        if "" in arrays:
            raise OptionError(f"{input_text}: name the input: NAME=@{path}")
        return {key: torch.as_tensor(array) for key, array in arrays.items()}
    array = arrays.get(input_name, next(iter(arrays.values())) if len(arrays) == 1 else None)
    if array is None:
        raise OptionError(f"{input_text}: {path} has no array {input_name}: it has {', '.join(arrays) or 'none'}")
    return {input_name: torch.as_tensor(array)}


def _from_file(input_text: str, path: Path, read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"{input_text}: the package {error.name!r} is not installed: pip install pillow", name=error.name
        ) from error
    except FileNotFoundError:
        raise OptionError(f"{input_text}: no such file: {path}") from None
    except Exception as error:
        # numpy, safetensors and Pillow raise many kinds.
        raise OptionError(f"{input_text}: cannot read {path}: {error}") from error


def _arrays(path: Path) -> Mapping[str, Any]:
    """The arrays of a file by name; that of a file of one has an empty name."""
    suffix = path.suffix.lower()
    if suffix in _IMAGE_SUFFIXES:
        return {"": image_tensor(path)}
    if suffix == ".safetensors":
        return load_file(path)
    if suffix not in (".npz", ".npy"):
        raise ValueError("expected a file .npz, .npy, .safetensors or an image")
    loaded = np.load(path, allow_pickle=False)
    return {"": loaded} if isinstance(loaded, np.ndarray) else {key: loaded[key] for key in loaded.files}


def image_tensor(path: Path, size: tuple[int, int] | None = None, mode: str = "RGB") -> torch.Tensor:
    """Return an image as numbers from 0 to 1, ``[1, channels, height, width]``."""
    from PIL import Image  # noqa: PLC0415 - only for images

    with Image.open(path) as opened:
        image = opened.convert(mode)
    if size is not None:
        image = image.resize((size[1], size[0]))
    pixels = torch.from_numpy(np.array(image, dtype=np.float32) / 255)
    pixels_chw = pixels.permute(2, 0, 1) if pixels.ndim == 3 else pixels[None]
    return pixels_chw[None].contiguous()
