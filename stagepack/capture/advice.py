"""What has worked for models that ``torch.export`` refuses, by what its error says. The guide "Recipes" of the docs has the code."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Final

from stagepack.errors import STARTING_FILE_MARK, CaptureError, StagepackError

_DRAFT: Final = ", or pass the program of torch.export.draft_export, which asserts the example's answer"
_ADVICE: Final = (
    (
        ("Could not guard on data-dependent", "Data-dependent branching"),
        (
            "the line asks a tensor for an answer that only data has: use torch.cond or torch.where, replace the function in the factory "
            f"of the model{_DRAFT}"
        ),
    ),
    (
        ("Could not extract specialized integer", "aten._local_scalar_dense"),
        (
            "the line makes a number of a tensor's data: take the number from a size or the configuration, or export the modules before "
            "the line as entry points"
        ),
    ),
    (
        (".numpy() is not supported",),
        (
            "the line computes with a tensor's data in NumPy: replace the function by operators of torch in the factory of the model; a "
            "mixture of experts may compute all experts, with weights of zero for those that were not chosen"
        ),
    ),
    (
        ("Specializations unexpectedly required", "your code specialized it to be a constant"),
        "the model fixes a size that dynamic_shapes lets change: leave it out, or replace int(...) and numbers of Python in the line",
    ),
    (("must be bool, not SymBool",), "a size decides an argument that must be a bool: pass bool(...) of it"),
    (
        ("in output, which is not a known type", "is not supported or pytree-flattenable"),
        (
            "the model returns an object that is no container of tensors: return its tensors from a module around the model, or turn it "
            "off by an argument such as use_cache=False"
        ),
    ),
    (
        ("Unsupported input type",),
        "an input is no tensor, number or container of them: make it in a module around the model",
    ),
    (
        ("There was no fake impl registered", "no fake impl", "with arguments from the 'Meta' backend"),
        (
            "an operator does not tell the shapes of its results: torch.library.register_fake does; eager-mode quantized modules have "
            "none, torchao's have"
        ),
    ),
    (
        ("aten.equal.default", "aten.allclose.default"),
        "the line compares the data of tensors: leave the comparison out, in the factory of the model",
    ),
    (
        ("fake tensor in the exported program constant",),
        (
            "the model keeps a tensor outside of its parameters and buffers, and writes it: register it as a buffer; or its forward "
            "differentiates (torch.autograd.grad), which torch.export does not trace: write the derivative as code"
        ),
    ),
    (
        ("to have one of the following scalar types",),
        "an input has another dtype than the model takes: state it, such as --input 'x=int64[batch,length]'",
    ),
    (
        ("functorch tensor",),
        (
            "the forward of the model differentiates (torch.func.grad, jacrev), which torch.export does not trace with its weights: write "
            "the derivative as code, or export the modules that are differentiated"
        ),
    ),
)


def capture_advice(errors: Iterable[str], *, draft_fails: bool = False) -> list[str]:
    """Return what has worked for models with such errors."""
    texts = list(errors)
    return [
        sentence.removesuffix(_DRAFT) if draft_fails else sentence
        for patterns, sentence in _ADVICE
        if any(pattern in text for pattern in patterns for text in texts)
    ]


@contextlib.contextmanager
def advised_capture() -> Iterator[None]:
    """Append to an error of a capture in the ``with`` block what has worked for such errors, or which command looks for it."""
    try:
        yield
    except CaptureError as error:
        cause = error.__cause__
        while isinstance(cause, StagepackError):
            cause = cause.__cause__
        if cause is None or STARTING_FILE_MARK in str(error):
            raise
        recipes = capture_advice([str(error)])
        advice = f"advice: {recipes[0]}" if recipes else "run 'stagepack doctor SOURCE', which tries other ways"
        raise CaptureError(f"{error}: {advice}") from error
