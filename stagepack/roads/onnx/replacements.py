"""Operators that torch's ONNX exporter converts wrong, or ONNX Runtime runs wrong, as others that both get right."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true

from stagepack.roads.onnx.decompositions import NARROW, NoOnnxFormError
from stagepack.torch_internals import OperatorOverload, operator_schema, tree_flatten

_Arguments = Mapping[str, Any]
_Operator = OperatorOverload


def call_replaced(target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Call an operator, or what is right in its place."""
    # `guarded_operator` wraps the operators whose arguments the loader checks.
    operator = getattr(target, "__wrapped__", target)
    if not isinstance(operator, OperatorOverload):
        return target(*args, **kwargs)
    namespace, written_name, overload = str(operator).split(".")
    functional_name = written_name.removesuffix("_")
    replacement = REPLACEMENTS.get(functional_name) if namespace == "aten" else None
    if replacement is None:
        return target(*args, **kwargs)
    arguments = {parameter.name: parameter.default_value for parameter in operator_schema(operator).arguments}
    arguments |= {**dict(zip(arguments, args, strict=False)), **kwargs}
    functional = getattr(getattr(torch.ops.aten, functional_name), overload, operator)
    result = None if "out" in arguments else replacement(functional, arguments)
    if result is None:
        return target(*args, **kwargs)
    is_written = written_name != functional_name and result is not arguments["self"]
    written: Any = arguments.get("self")
    return written.copy_(result) if is_written else result


def _dropout(target: _Operator, arguments: _Arguments) -> Any:
    tensor = arguments["input" if "input" in arguments else "self"]
    if not arguments["train"]:
        return tensor  # The operator returns its input itself, which the exporter does not know.
    operator_name = target.overloadpacket.__name__
    if operator_name not in ("dropout", "feature_dropout"):
        return None
    # ONNX Runtime 1.31 never drops the first element, and drops others in every call: it seeds its generator anew for each.
    kept_share = 1 - arguments["p"]
    sizes = [size if operator_name == "dropout" or dim < 2 else 1 for dim, size in enumerate(tensor.shape)]
    is_kept = (torch.rand(sizes, dtype=torch.float32) < kept_share).to(tensor.dtype)
    return tensor * (is_kept / kept_share if kept_share else is_kept)


def _causal_attention(target: _Operator, arguments: _Arguments) -> Any:
    # The exporter adds the smallest finite number to later keys: it is larger than a score of -inf, and lost beside infinity.
    query, key, value = (arguments[name] for name in ("query", "key", "value"))
    is_later = torch.arange(key.shape[-2]) > torch.arange(query.shape[-2])[:, None]
    if arguments["dropout_p"]:
        mask = torch.where(is_later, -math.inf, 0.0).to(query.dtype)
        return target(**{**arguments, "attn_mask": mask, "is_causal": False})
    if arguments["enable_gqa"]:
        group_size = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(group_size, -3) for tensor in (key, value))
    scale = 1 / math.sqrt(query.shape[-1]) if arguments["scale"] is None else arguments["scale"]
    scores = torch.where(is_later, -math.inf, (query * scale) @ key.transpose(-2, -1))
    # A row of scores that are all -inf has chances of 0 in torch.
    has_scores = (scores != -math.inf).any(-1, keepdim=True)
    return torch.where(has_scores, scores.softmax(-1), 0.0) @ value


def _attention(target: _Operator, arguments: _Arguments) -> Any:
    mask = arguments["attn_mask"]
    if mask is None:
        return _causal_attention(target, arguments) if arguments["is_causal"] else None
    # For a row whose mask excludes all keys torch returns 0, or NaN if a value is not finite; the exporter the mean of all values, or NaN.
    is_seen = mask if mask.dtype == torch.bool else mask != -math.inf
    if all(isinstance(size, int) for size in mask.shape):
        has_keys = is_seen.any(-1, keepdim=True)
    else:
        # A product: without rows, reductions of ONNX Runtime return the shape of their input if a size of it is 1.
        has_keys = is_seen.to(torch.float32) @ torch.ones(mask.shape[-1], 1) > 0
    if mask.dtype == torch.bool:
        # With a mask of booleans, the exporter makes 0 of chances that are NaN.
        mask = torch.where(mask, 0.0, -math.inf).to(arguments["query"].dtype)
    shown = torch.where(has_keys, mask, torch.zeros((), dtype=mask.dtype))
    result = target(**{**arguments, "attn_mask": shown})
    return torch.where(has_keys, result, result * 0)


def _bernoulli(_: _Operator, arguments: _Arguments) -> Any:
    # The kernel of ONNX Runtime draws 1 with the chance of a 0.
    tensor = arguments["self"]
    chances = arguments.get("p", tensor)
    dtypes = [value.dtype for value in (tensor, chances) if isinstance(value, torch.Tensor)]
    wide_dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    if isinstance(chances, torch.Tensor):
        chances = chances.to(wide_dtype)
    return (torch.rand_like(tensor, dtype=wide_dtype) < chances).to(tensor.dtype)


def _multinomial(_: _Operator, arguments: _Arguments) -> Any:
    # ONNX draws each number anew. The largest quotients of chances and exponential draws are how torch draws without replacement.
    if arguments["replacement"] or arguments["num_samples"] == 1:
        return None
    chances = arguments["self"]
    exponential = -torch.log(1 - torch.rand_like(chances))
    return torch.topk(chances / exponential, arguments["num_samples"], dim=-1)[1]


def _adaptive_average(_: _Operator, arguments: _Arguments) -> Any:
    # The exporter takes the windows from the sizes of the example.
    tensor, counts = arguments["self"], arguments["output_size"]
    sizes = tensor.shape[-len(counts) :]
    if all(isinstance(size, int) for size in sizes):
        return None
    if all(count == 1 for count in counts):
        # Without elements ONNX Runtime returns the shape of its input for a dimension that is counted from the end.
        dims = list(range(tensor.dim() - len(counts), tensor.dim()))
        return _nan_if_none(tensor.mean(dims, keepdim=True), math.prod(sizes))
    for dim, (size, count) in enumerate(zip(sizes, counts, strict=True), start=-len(counts)):
        tensor = _window_means(tensor.transpose(dim, -1), size, count).transpose(dim, -1)
    return tensor


def _window_means(tensor: torch.Tensor, size: Any, count: int) -> torch.Tensor:
    """The means of windows of the last dimension: the window `i` has the elements from i * size / count to (i + 1) * size / count."""
    windows = torch.arange(count)
    starts, ends = windows * size // count, ((windows + 1) * size + count - 1) // count
    longest = size // count + 2
    positions = starts[:, None] + torch.arange(longest)
    elements = tensor.index_select(-1, positions.clamp(max=size - 1).flatten()).reshape(
        *tensor.shape[:-1], count, longest
    )
    is_inside = positions < ends[:, None]
    sums = torch.where(is_inside, elements, torch.zeros((), dtype=tensor.dtype)).sum(-1)
    means: torch.Tensor = sums / (ends - starts).to(tensor.dtype)
    return means


def _reshape(target: _Operator, arguments: _Arguments) -> Any:
    # ONNX cannot tell the size of a -1 beside a size 0, which torch's trace knows.
    tensor, sizes = arguments["self"], arguments.get("size", arguments.get("shape"))
    if all(isinstance(size, int) for size in tensor.shape) or (sizes is not None and not _has_unknown_size(sizes)):
        return None
    shape = target(**arguments).shape
    if sizes is not None and all(isinstance(size, int) and size for size in sizes):
        return None
    return tensor.reshape(shape)


def _has_unknown_size(sizes: Any) -> bool:
    return any(isinstance(size, int) and size == -1 for size in sizes)


def _scatter(target: _Operator, arguments: _Arguments) -> Any:
    # ONNX has a source of the size of the index; torch leaves unused what is beyond it.
    index, source = arguments["index"], arguments.get("src")
    if source is None or index.dim() != source.dim():
        return None
    if all(statically_known_true(have == used) for have, used in zip(source.shape, index.shape, strict=True)):
        return None
    return target(**{**arguments, "src": source[tuple(slice(size) for size in index.shape)]})


def _integer_division(target: _Operator, arguments: _Arguments) -> Any:
    # The smallest integer divided by -1 has no quotient of its dtype, and ends the process of ONNX Runtime by SIGFPE.
    dividend, divisor = arguments["self"], arguments["other"]
    dtype = torch.result_type(dividend, divisor)
    is_exact = target.overloadpacket.__name__.startswith("div") and arguments.get("rounding_mode") is None
    if dtype not in (torch.int32, torch.int64) or is_exact:
        return None
    is_remainder = target.overloadpacket.__name__.removesuffix("_") in ("remainder", "fmod")
    if not isinstance(divisor, torch.Tensor):
        if divisor != -1:
            return None
        return torch.zeros_like(dividend, dtype=dtype) if is_remainder else -dividend.to(dtype)
    is_inverse = divisor == -1
    result = target(**{**arguments, "other": torch.where(is_inverse, torch.ones((), dtype=divisor.dtype), divisor)})
    return result if is_remainder else torch.where(is_inverse, -_as_tensor(dividend, dtype), result)


def _mean(target: _Operator, arguments: _Arguments) -> Any:
    # The mean of no elements is NaN in torch, and 0 in ONNX Runtime. A trace takes sizes that are dynamic to be at least 2.
    count = _reduced_count(arguments)
    if isinstance(count, int) and count:
        return None
    return _nan_if_none(target(**arguments), count)


def _spread(target: _Operator, arguments: _Arguments) -> Any:
    # Torch sums in float64: squares from 1.8e19 overflow in float32.
    tensor = arguments["self"]
    if tensor.dtype != torch.float32:
        return _mean(target, arguments)
    result = target(**{**arguments, "self": tensor.to(torch.float64)}).to(torch.float32)
    return _nan_if_none(result, _reduced_count(arguments))


def _nan_if_none(result: torch.Tensor, count: Any) -> torch.Tensor:
    """A result of a number of elements, or NaN if there were none."""
    return torch.where(torch.scalar_tensor(count, dtype=torch.int64) == 0, math.nan, result).to(result.dtype)


def _any(_: _Operator, arguments: _Arguments) -> Any:
    # The result for no elements is False in torch, and True in ONNX Runtime.
    count = _reduced_count(arguments)
    if isinstance(count, int) and count:
        return None
    is_false = torch.logical_not(arguments["self"])
    if "dim" not in arguments or arguments["dim"] is None:
        return torch.logical_not(is_false.all())
    return torch.logical_not(torch.all(is_false, dim=arguments["dim"], keepdim=arguments["keepdim"]))


def _interpolation(target: _Operator, arguments: _Arguments) -> Any:
    if not arguments["input" if "input" in arguments else "self"].is_floating_point():
        raise NoOnnxFormError(f"{target} of integers, whose weights torch rounds to 16 bits")


def _bilinear(target: _Operator, arguments: _Arguments) -> Any:
    _interpolation(target, arguments)
    # The trace takes it apart into differences of neighbours, which are NaN beside infinity.
    if "output_size" not in arguments or "scale_factors" in arguments:
        return None
    if arguments["scales_h"] is not None and not arguments["align_corners"]:
        raise NoOnnxFormError("aten.upsample_bilinear2d.default with scales and a size")
    return torch.ops.aten.upsample_bilinear2d.vec(
        arguments["self"], arguments["output_size"], arguments["align_corners"], None
    )


def _margin_loss(target: _Operator, _: _Arguments) -> Any:
    raise NoOnnxFormError(f"{target}, which leaves NaN out in torch")


def _steps_of_16_bits(target: _Operator, arguments: _Arguments) -> Any:
    # Torch rounds each step to 16 bits; ONNX Runtime keeps float32 between them, and is finite where torch overflows to NaN.
    tensors = [leaf for leaf in tree_flatten(list(arguments.values()))[0] if isinstance(leaf, torch.Tensor)]
    if any(tensor.dtype in NARROW for tensor in tensors):
        raise NoOnnxFormError(f"{target} of 16 bits, whose steps torch rounds")


def _reduced_count(arguments: _Arguments) -> Any:
    """The number of elements that become one."""
    tensor, dims = arguments["self"], arguments.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    return math.prod([tensor.shape[dim] for dim in dims] if dims else tensor.shape)


def _as_tensor(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return value.to(dtype) if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)


# By the name of the operator, without the `_` of those that write their input.
REPLACEMENTS: Final[Mapping[str, Callable[[Any, _Arguments], Any]]] = {
    "_adaptive_avg_pool2d": _adaptive_average,
    "_adaptive_avg_pool3d": _adaptive_average,
    "_upsample_bicubic2d_aa": _interpolation,
    "_upsample_bilinear2d_aa": _interpolation,
    "adaptive_avg_pool1d": _adaptive_average,
    "adaptive_avg_pool2d": _adaptive_average,
    "adaptive_avg_pool3d": _adaptive_average,
    "alpha_dropout": _dropout,
    "any": _any,
    "bernoulli": _bernoulli,
    "chain_matmul": _steps_of_16_bits,
    "div": _integer_division,
    "divide": _integer_division,
    "dropout": _dropout,
    "feature_alpha_dropout": _dropout,
    "feature_dropout": _dropout,
    "flatten": _reshape,
    "floor_divide": _integer_division,
    "fmod": _integer_division,
    "gradient": _steps_of_16_bits,
    "gru": _steps_of_16_bits,
    "linalg_multi_dot": _steps_of_16_bits,
    "lstm": _steps_of_16_bits,
    "mean": _mean,
    "multi_margin_loss": _margin_loss,
    "multilabel_margin_loss": _margin_loss,
    "multilabel_margin_loss_forward": _margin_loss,
    "multinomial": _multinomial,
    "remainder": _integer_division,
    "reshape": _reshape,
    "rnn_relu": _steps_of_16_bits,
    "rnn_tanh": _steps_of_16_bits,
    "scaled_dot_product_attention": _attention,
    "scatter": _scatter,
    "scatter_add": _scatter,
    "scatter_reduce": _scatter,
    "std": _spread,
    "upsample_bicubic2d": _interpolation,
    "upsample_bilinear2d": _bilinear,
    "var": _spread,
    "view": _reshape,
}
