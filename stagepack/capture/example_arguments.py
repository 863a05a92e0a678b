"""What a caller says about example inputs, in any of its forms -> `Inputs`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from stagepack.capture.input_texts import MakeInputs, parse_inputs, with_dynamic_sizes
from stagepack.capture.inputs import Inputs
from stagepack.capture.user_modules import call_user_function
from stagepack.errors import CaptureError, OptionError

# Of one call of the model, or of functions of it by their paths.
ExampleInputs = Inputs | dict[str, Inputs]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleArguments:
    """What the options of the command line say about example inputs.

    Attributes:
        function: ``file.py:function`` or ``package.module:function``. The function takes no arguments and returns `Inputs`, a tuple of
            inputs by position, or a dict of inputs by name; or a dict of `Inputs` by paths of functions, see `capture_entry_points`.
        texts: the inputs as text, see `parse_inputs`.
        dynamic: sizes that may change, see `with_dynamic_sizes`.
    """

    function: str | None = None
    texts: tuple[str, ...] = ()
    dynamic: tuple[str, ...] = ()

    def inputs(self, make_inputs: MakeInputs | None = None) -> ExampleInputs | None:
        """Return the inputs that are stated, or None; sizes of `dynamic` are not yet dynamic."""
        if self.function is not None and self.texts:
            raise OptionError("the inputs are stated twice: pass --inputs FILE.py:FUNCTION or --input, not both")
        if self.function is not None:
            return to_inputs(call_user_function(self.function), self.function)
        return parse_inputs(self.texts, make_inputs) if self.texts else None

    def complete(self, inputs: ExampleInputs, forward: Callable[..., Any]) -> ExampleInputs:
        """Return inputs with the sizes of `dynamic`."""
        if not self.dynamic:
            return inputs
        if isinstance(inputs, dict):
            raise OptionError("dynamic: of several entry points, each states its own sizes in stagepack.Inputs")
        return with_dynamic_sizes(inputs, self.dynamic, forward)


# What `stagepack.export` takes as its inputs.
StatedInputs = Inputs | str | Sequence[str] | Mapping[str, Any]


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
