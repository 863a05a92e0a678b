"""Checks of arguments before operators that read past the memory of a tensor, or leave their result unwritten, on some arguments.

A call with these arguments ends the process, or shows memory of other requests. Models need these operators, so they run by default, and
each call is checked.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from stagepack.grouped_product import filled_grouped_product
from stagepack.torch_internals import GROUPED_PRODUCT, OperatorOverload, operator_schema
from stagepack.unwritten_memory import ALLOCATING_OPERATORS, filled_operator, memory_extent

_Arguments = Mapping[str, Any]
_QUANTIZED_DTYPES: Final = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)


@functools.cache
def guarded_operator(operator: OperatorOverload) -> Callable[..., Any]:
    """Return a function that checks the arguments of an operator and then calls it; the operator itself if it needs no check.

    The function raises ValueError if arguments do not fit. Tensors whose elements overlap, as `expand` and `as_strided` make them, are
    copied for operators that take the elements of a tensor to be one after another. Results that the operator leaves unwritten are
    zeros. Its ``__wrapped__`` is the operator.
    """
    if str(operator) in ALLOCATING_OPERATORS:
        return filled_operator(operator)
    if operator is GROUPED_PRODUCT:
        return filled_grouped_product(operator)
    check_arguments = ARGUMENT_CHECKS.get(str(operator))
    needs_no_overlap = str(operator) in NEED_NO_OVERLAP
    if check_arguments is None and not needs_no_overlap:
        return operator
    parameter_names = [argument.name for argument in operator_schema(operator).arguments]

    def call_checked(*args: Any, **kwargs: Any) -> Any:
        if check_arguments is not None:
            check_arguments({**dict(zip(parameter_names, args, strict=False)), **kwargs})
        if needs_no_overlap:
            args = tuple([_without_overlap(argument) for argument in args])
            kwargs = {name: _without_overlap(argument) for name, argument in kwargs.items()}
        return operator(*args, **kwargs)

    call_checked.__wrapped__ = operator  # type: ignore[attr-defined]
    return call_checked


def _without_overlap(argument: Any) -> Any:
    """A copy of a tensor that has less memory than elements; any other argument as it is."""
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.contiguous() if memory_extent(argument) < argument.numel() else argument


def _check_lstm(arguments: _Arguments) -> None:
    hidden, cell = _expect_items("hx", arguments["hx"], 2)
    _check_recurrent(arguments, hidden, cell.size(-1), gates=4)
    _expect_shape("hx[1]", cell, [*hidden.shape[:-1], cell.size(-1)])
    _expect_dtype("hx[1]", cell, arguments["input"])


def _check_gru(arguments: _Arguments) -> None:
    _check_recurrent(arguments, arguments["hx"], arguments["hx"].size(-1), gates=3)


def _check_rnn(arguments: _Arguments) -> None:
    _check_recurrent(arguments, arguments["hx"], arguments["hx"].size(-1), gates=1)


def _check_recurrent(arguments: _Arguments, hidden: torch.Tensor, cell_size: int, gates: int) -> None:
    """Check the arguments that all recurrent layers have.

    hidden: the hidden state, [layers * directions, batch, hidden].
    """
    layer_input = arguments["input"]
    if layer_input.dim() != 3 or hidden.dim() != 3:
        raise ValueError(f"expected 3 dimensions, found {layer_input.dim()} and {hidden.dim()}")
    batch_size = layer_input.size(0 if arguments["batch_first"] else 1)
    direction_count = 2 if arguments["bidirectional"] else 1
    hidden_size, run_count = hidden.size(2), arguments["num_layers"] * direction_count
    _expect_shape("hx", hidden, [run_count, batch_size, hidden_size])
    is_projected = hidden_size != cell_size
    weight_count = 2 + 2 * arguments["has_biases"] + is_projected
    params = _expect_items("params", arguments["params"], run_count * weight_count)
    for run_index in range(run_count):
        width = layer_input.size(2) if run_index < direction_count else hidden_size * direction_count
        shapes = [[gates * cell_size, width], [gates * cell_size, hidden_size]]
        if arguments["has_biases"]:
            shapes += [[gates * cell_size]] * 2
        if is_projected:
            shapes.append([hidden_size, cell_size])
        for index, shape in enumerate(shapes, run_index * weight_count):
            _expect_shape(f"params[{index}]", params[index], shape)
    for name, tensor in (("hx", hidden), *((f"params[{index}]", tensor) for index, tensor in enumerate(params))):
        _expect_dtype(name, tensor, layer_input)


def _check_weight_norm(arguments: _Arguments) -> None:
    v, dim = arguments["v"], arguments.get("dim", 0)
    if dim not in (0, v.dim() - 1):
        return  # computed by operators that check
    if v.dim() == 0 or v.numel() == 0:
        raise ValueError(f"v: expected at least one dimension and no size 0, found {list(v.shape)}")
    _expect_shape("g", arguments["g"], [v.size(dim) if index == dim else 1 for index in range(v.dim())])


def _check_batch_norm(arguments: _Arguments) -> None:
    batch = arguments["input"]
    if batch.dim() < 2:
        raise ValueError(f"input: expected at least 2 dimensions, found {batch.dim()}")
    for name in ("weight", "bias", "running_mean", "running_var"):
        if arguments.get(name) is not None:
            _expect_shape(name, arguments[name], [batch.size(1)])


def _check_fourier_transform(arguments: _Arguments) -> None:
    normalization = arguments["normalization"]
    if normalization not in (0, 1, 2):
        raise ValueError(f"normalization: expected 0, 1 or 2, found {normalization}")
    dims, dim_count = arguments["dim"], arguments["self"].dim()
    if len(set(dims)) != len(dims) or not all(0 <= dim < dim_count for dim in dims):
        raise ValueError(f"dim: expected different dimensions from 0 to {dim_count - 1}, found {list(dims)}")


def _check_pairwise_distances(arguments: _Arguments) -> None:
    if arguments["self"].dim() != 2:
        raise ValueError(f"self: expected 2 dimensions, found {arguments['self'].dim()}")


def _check_matrix_power(arguments: _Arguments) -> None:
    # torch negates a negative exponent, which has no end for the smallest integer.
    if not -(2**31) <= arguments["n"] < 2**31:
        raise ValueError(f"n: expected an integer of 32 bits, found {arguments['n']}")


def _check_attention(arguments: _Arguments) -> None:
    for name in ("query", "key", "value"):
        if arguments[name].dim() != 3 or arguments[name].size(2) != arguments["embed_dim"]:
            raise ValueError(
                f"{name}: expected [batch, length, {arguments['embed_dim']}], found {list(arguments[name].shape)}"
            )
    _check_attention_weights(arguments, arguments["query"], arguments["num_head"])


def _check_encoder_layer(arguments: _Arguments) -> None:
    source, width, inner_width = arguments["src"], arguments["embed_dim"], arguments["ffn_weight_1"].size(0)
    if source.dim() != 3 or source.size(2) != width:
        raise ValueError(f"src: expected [batch, length, {width}], found {list(source.shape)}")
    _check_attention_weights(arguments, source, arguments["num_heads"])
    shapes = {"ffn_weight_1": [inner_width, width], "ffn_bias_1": [inner_width], "ffn_weight_2": [width, inner_width]}
    for name in ("norm_weight_1", "norm_bias_1", "norm_weight_2", "norm_bias_2", "ffn_bias_2"):
        shapes[name] = [width]
    for name, shape in shapes.items():
        _expect_shape(name, arguments[name], shape)
        _expect_dtype(name, arguments[name], source)


def _check_attention_weights(arguments: _Arguments, query: torch.Tensor, head_count: int) -> None:
    """Check the weights and the mask of an operator with the whole attention of several heads.

    query: what the heads attend from, [batch, length, width].
    """
    batch_size, length, width = query.shape
    if head_count <= 0 or width % head_count or not width:
        raise ValueError(f"expected a number of heads that divides the width {width}, found {head_count}")
    shapes = {
        "qkv_weight": [3 * width, width],
        "qkv_bias": [3 * width],
        "proj_weight": [width, width],
        "proj_bias": [width],
    }
    for name, shape in shapes.items():
        _expect_shape(name, arguments[name], shape)
        _expect_dtype(name, arguments[name], query)
    mask, mask_type = arguments.get("mask"), arguments.get("mask_type")
    if mask is not None:
        mask_shapes = {0: [length, length], 1: [batch_size, length], 2: [batch_size, head_count, length, length]}
        if mask_type not in mask_shapes:
            raise ValueError(f"mask_type: expected 0, 1 or 2, found {mask_type}")
        _expect_shape("mask", mask, mask_shapes[mask_type])


def _check_embedding_bag(arguments: _Arguments) -> None:
    for name in ("indices", "offsets"):
        if arguments[name].dim() != 1:
            raise ValueError(f"{name}: expected 1 dimension, found {arguments[name].dim()}")
    if arguments["indices"].numel() and not arguments["offsets"].numel():
        raise ValueError("offsets: expected at least one, found none")


def _check_antialiased_interpolation(arguments: _Arguments) -> None:
    sizes = zip(arguments["self"].shape[2:], arguments["output_size"], ("scales_h", "scales_w"), strict=False)
    for input_size, output_size, name in sizes:
        scale = arguments.get(name)
        # The middle of the last element of the result, in elements of the input.
        if scale is not None and scale > 0 and (output_size - 0.5) / scale >= input_size:
            raise ValueError(f"{name}: expected a scale from {input_size} to {output_size} elements, found {scale}")


def _check_least_squares(arguments: _Arguments) -> None:
    # LAPACK reads a right side of no columns.
    if arguments.get("driver") == "gelss" and arguments["self"].numel() and not arguments["b"].numel():
        raise ValueError(f"b: expected elements for the driver gelss, found the shape {list(arguments['b'].shape)}")


def _check_random_start(arguments: _Arguments) -> None:
    # torch adds 1, and shifts what has overflowed until it is 0, which has no end.
    if arguments["from"] >= 2**63 - 1:
        raise ValueError(f"from: expected an integer below 2**63 - 1, found {arguments['from']}")


def _check_truncating_division(arguments: _Arguments) -> None:
    # The processor refuses to divide the smallest integer by -1, as no integer is the quotient, and ends the process.
    dividend, divisor = arguments["self"], arguments["other"]
    if arguments.get("rounding_mode", "trunc") == "trunc":
        smallest = _smallest_integer(dividend, divisor)
        if smallest is not None and bool(((dividend == smallest) & (divisor == -1)).any()):
            raise ValueError(f"expected quotients that are integers of the dtype, found {smallest} / -1")


def _check_retyped(arguments: _Arguments) -> None:
    # An operator such as `empty` makes a tensor of a quantized dtype without a quantizer, which a view in another dtype asks for.
    for dtype in (arguments["self"].dtype, arguments["dtype"]):
        if dtype in _QUANTIZED_DTYPES:
            raise ValueError(f"expected dtypes of numbers, found {dtype}")


def _check_common_multiple(arguments: _Arguments) -> None:
    # A greatest common divisor that overflows is -1, which the smallest integer is then divided by.
    left, right = arguments["self"], arguments["other"]
    smallest = _smallest_integer(left, right)
    if smallest is not None and bool(((left == smallest) & (right != 0)).any()):
        raise ValueError(f"expected multiples that are integers of the dtype, found ones of {smallest}")


def _check_extent(arguments: _Arguments) -> None:
    """Check that a view with strides of its own shows no memory behind the elements of its tensor, which nothing may have written.

    What is before them is of the tensor that it is a view of, and models use it: `x[1:].as_strided(size, stride, 0)`.
    """
    tensor, offset = arguments["self"], arguments.get("storage_offset")
    offset = tensor.storage_offset() if offset is None else offset
    sizes, strides = arguments["size"], arguments["stride"]
    if 0 in sizes:
        return
    last = offset + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    end = tensor.storage_offset() + memory_extent(tensor)
    if last >= end:
        raise ValueError(f"expected a view of the elements 0 to {end - 1} of the memory, found {offset} to {last}")


def _check_resized(arguments: _Arguments) -> None:
    tensor = arguments.get("self", arguments.get("out"))
    template = arguments.get("the_template")
    element_count = math.prod(arguments["size"] if template is None else template.shape)
    if element_count > memory_extent(tensor):
        raise ValueError(
            f"expected at most the {memory_extent(tensor)} elements that the tensor has memory for, found {element_count}: "
            "nothing has written the others"
        )


def _check_dense_strides(arguments: _Arguments) -> None:
    tensor, strides, dense_stride = arguments["a"], arguments["stride"], 1
    for stride, size in sorted(zip(strides, tensor.shape, strict=True)):
        if tensor.numel() and size > 1:
            if stride != dense_stride:
                raise ValueError(f"stride: expected elements one after another in memory, found {list(strides)}")
            dense_stride *= size


def _check_grid_sampler(arguments: _Arguments) -> None:
    for name, mode_count in (("interpolation_mode", 3 if arguments["input"].dim() == 4 else 2), ("padding_mode", 3)):
        if not 0 <= arguments[name] < mode_count:
            raise ValueError(f"{name}: expected an integer from 0 to {mode_count - 1}, found {arguments[name]}")


def _smallest_integer(left: torch.Tensor, right: torch.Tensor | complex) -> int | None:
    """The smallest integer of the dtype of a result, if the processor divides integers of it and the operands have data to look at."""
    if left.is_meta or torch.compiler.is_compiling():
        return None
    dtype = torch.result_type(left, right)
    return torch.iinfo(dtype).min if dtype in (torch.int32, torch.int64) else None


def _expect_items(name: str, tensors: Sequence[torch.Tensor], count: int) -> Sequence[torch.Tensor]:
    if len(tensors) != count:
        raise ValueError(f"{name}: expected {count} tensors, found {len(tensors)}")
    return tensors


def _expect_shape(name: str, tensor: torch.Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise ValueError(f"{name}: expected the shape {list(shape)}, found {list(tensor.shape)}")


def _expect_dtype(name: str, tensor: torch.Tensor, reference: torch.Tensor) -> None:
    # Autocast makes the dtypes equal inside of the call.
    if tensor.dtype != reference.dtype and not torch.is_autocast_enabled(reference.device.type):
        raise ValueError(f"{name}: expected the dtype {reference.dtype}, found {tensor.dtype}")


# By the qualified name of the operator.
ARGUMENT_CHECKS: Final[Mapping[str, Callable[[_Arguments], None]]] = {
    "aten._batch_norm_with_update.default": _check_batch_norm,
    "aten._batch_norm_with_update_functional.default": _check_batch_norm,
    "aten._embedding_bag.default": _check_embedding_bag,
    "aten._embedding_bag_forward_only.default": _check_embedding_bag,
    "aten._fft_c2c.default": _check_fourier_transform,
    "aten._fft_c2r.default": _check_fourier_transform,
    "aten._fft_r2c.default": _check_fourier_transform,
    "aten._native_batch_norm_legit.default": _check_batch_norm,
    "aten._native_batch_norm_legit.no_stats": _check_batch_norm,
    "aten._native_batch_norm_legit_functional.default": _check_batch_norm,
    "aten._native_batch_norm_legit_no_training.default": _check_batch_norm,
    "aten._native_multi_head_attention.default": _check_attention,
    "aten._pdist_forward.default": _check_pairwise_distances,
    "aten._transformer_encoder_layer_fwd.default": _check_encoder_layer,
    "aten._upsample_bicubic2d_aa.default": _check_antialiased_interpolation,
    "aten._upsample_bilinear2d_aa.default": _check_antialiased_interpolation,
    "aten._upsample_lanczos2d_aa.default": _check_antialiased_interpolation,
    "aten._weight_norm.default": _check_weight_norm,
    "aten._weight_norm_interface.default": _check_weight_norm,
    "aten.as_strided.default": _check_extent,
    "aten.as_strided_.default": _check_extent,
    "aten.as_strided_copy.default": _check_extent,
    "aten.as_strided_scatter.default": _check_extent,
    "aten.div.Scalar_mode": _check_truncating_division,
    "aten.div.Tensor_mode": _check_truncating_division,
    "aten.div.out_mode": _check_truncating_division,
    "aten.div_.Scalar_mode": _check_truncating_division,
    "aten.div_.Tensor_mode": _check_truncating_division,
    "aten.divide.Scalar_mode": _check_truncating_division,
    "aten.divide.Tensor_mode": _check_truncating_division,
    "aten.divide.out_mode": _check_truncating_division,
    "aten.divide_.Scalar_mode": _check_truncating_division,
    "aten.divide_.Tensor_mode": _check_truncating_division,
    "aten.embedding_bag.default": _check_embedding_bag,
    "aten.embedding_bag.padding_idx": _check_embedding_bag,
    "aten.empty.out": _check_resized,
    "aten.grid_sampler.default": _check_grid_sampler,
    "aten.grid_sampler_2d.default": _check_grid_sampler,
    "aten.grid_sampler_3d.default": _check_grid_sampler,
    "aten.gru.input": _check_gru,
    "aten.lcm.default": _check_common_multiple,
    "aten.lcm.out": _check_common_multiple,
    "aten.lcm_.default": _check_common_multiple,
    "aten.linalg_lstsq.default": _check_least_squares,
    "aten.linalg_lstsq.out": _check_least_squares,
    "aten.linalg_matrix_power.default": _check_matrix_power,
    "aten.linalg_matrix_power.out": _check_matrix_power,
    "aten.lstm.input": _check_lstm,
    "aten.matrix_power.default": _check_matrix_power,
    "aten.matrix_power.out": _check_matrix_power,
    "aten.native_batch_norm.default": _check_batch_norm,
    "aten.random.from": _check_random_start,
    "aten.random_.from": _check_random_start,
    "aten.resize_.default": _check_resized,
    "aten.resize_as_.default": _check_resized,
    "aten.rnn_relu.input": _check_rnn,
    "aten.rnn_tanh.input": _check_rnn,
    "aten.view.dtype": _check_retyped,
    "aten.view_copy.dtype": _check_retyped,
    "prims.copy_strided.default": _check_dense_strides,
    "prims.div.default": _check_truncating_division,
}

# Operators that take the elements of a tensor to be one after another.
NEED_NO_OVERLAP: Final = frozenset(
    {
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._int_mm.default",
        "aten._weight_int4pack_mm_for_cpu.default",
        "aten._weight_int8pack_mm.default",
        "aten._weight_norm.default",
        "aten._weight_norm_interface.default",
        "aten.embedding_bag.default",
        "aten.embedding_bag.padding_idx",
        "aten.median.dim",
        "aten.nanmedian.dim",
        "aten.native_group_norm.default",
    }
)
