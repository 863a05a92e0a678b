"""Recurrent layers in a trace: the shapes of their results are found from the shapes of the arguments.

The layers are one operator each, but torch finds the shapes by a loop over the steps of the example, which fixes the length.
"""

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from unittest import mock

import torch

from stagepack.torch_internals import (
    FakeTensor,
    OperatorOverload,
    shape_decompositions,
)

_LIST_OF_WEIGHTS: Final = r"self[\w.]*\._flat_weights\[\d+\]"
LAYERS: Final = ("lstm", "gru", "rnn_tanh", "rnn_relu")


@contextlib.contextmanager
def sequences_of_any_length(layers: Iterable[str] = LAYERS) -> Iterator[None]:
    """Trace recurrent layers, within the ``with`` block, without a loop over the steps of their sequences.

    torch warns that they assign tensors to attributes, which it would lose: the list of their weights, in which it puts its own.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", rf"The tensor attributes? ({_LIST_OF_WEIGHTS}(, )?)+ w(as|ere) assigned")
        for layer in layers:
            stack.enter_context(_shapes_from_arguments(getattr(torch.ops.aten, layer).input))
        yield


@contextlib.contextmanager
def _shapes_from_arguments(operator: OperatorOverload) -> Iterator[None]:
    """Use `_fake_results` for the fake tensors of an operator; other tensors go to the kernels that torch registered."""
    kernels = dict(operator.py_kernels)
    decompositions = {operator: _kernel_for_fake_tensors(shape_decompositions()[operator])}
    try:
        for key, kernel in kernels.items():
            del operator.py_kernels[key]
            operator.py_impl(key)(_kernel_for_fake_tensors(kernel))
        with mock.patch.dict(shape_decompositions(), decompositions):
            yield
    finally:
        for key, kernel in kernels.items():
            operator.py_kernels.pop(key, None)
            operator.py_impl(key)(kernel)


def _kernel_for_fake_tensors(kernel: Callable[..., Any]) -> Callable[..., Any]:
    def run(input: torch.Tensor, hidden: Any, *args: Any) -> Any:
        if not isinstance(input, FakeTensor):
            return kernel(input, hidden, *args)
        # The last arguments of all recurrent layers.
        *_, bidirectional, batch_first = args
        return _fake_results(input, hidden, bidirectional=bidirectional, batch_first=batch_first)

    return run


def _fake_results(
    input: torch.Tensor, hidden: Any, *, bidirectional: bool, batch_first: bool
) -> tuple[torch.Tensor, ...]:
    """Results of the right shapes and strides.

    `input` is ``[steps, batch, features]``, or ``[batch, steps, features]`` with `batch_first`; `hidden` is ``[layers * directions, batch,
    width]``, of an LSTM the list of the hidden and the cell states.
    """
    states = (hidden,) if isinstance(hidden, torch.Tensor) else tuple(hidden)
    steps, batch = (input.shape[1], input.shape[0]) if batch_first else (input.shape[0], input.shape[1])
    output = states[0].new_empty(steps, batch, states[0].shape[2] * (2 if bidirectional else 1))
    return (output.transpose(0, 1) if batch_first else output, *(state.new_empty(state.shape) for state in states))
