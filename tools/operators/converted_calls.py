"""Valid calls of operators that ONNX converters take and torch's tests have no samples of: written ones, and others by their schemas."""

from typing import Any, Final

import torch

from stagepack.torch_internals import onnx_operator_names, operator_schema
from tools.operators.hostile_arguments import Call, bind
from tools.operators.valid_calls import find_operator, recorded_calls
from tools.operators.value_grid import CAST, CAST_TYPES, TYPES

_BY_TYPE: Final = {"number": 2, "float": 2.0, "int": 2, "bool": False}
# The tensor that stands for all tensors: the first of those that the operator takes.
_TENSORS: Final = (torch.ones(3), torch.ones(3, dtype=torch.int64), torch.ones(3, dtype=torch.bool))


def all_calls() -> dict[str, list[Call]]:
    """Return the calls of torch's own samples, and others of converted operators that have none, by the name of the operator."""
    calls = recorded_calls()
    for operator_name, written in _written_calls().items():
        calls[operator_name] = [*written, *calls.get(operator_name, [])]
    for operator_name in sorted(converted_operators() - set(calls)):
        if call := _call_by_schema(operator_name):
            calls[operator_name] = [call]
    return calls


def converted_operators() -> set[str]:
    """Return the names of the operators that torch's ONNX exporter has a function for, with their overloads."""
    names = {target.replace("::", ".") for target in onnx_operator_names()}
    return {
        name if name.count(".") > 1 else f"{name}.default" for name in names if name.startswith(("aten.", "prims."))
    }


def _call_by_schema(operator_name: str) -> Call | None:
    """A call with a tensor, or 2, for each argument without a default; None where the operator takes no such call."""
    for tensor in _TENSORS:
        by_type = {"Tensor": tensor, **_BY_TYPE}
        try:
            operator = find_operator(operator_name)
            required = [
                argument for argument in operator_schema(operator).arguments if not argument.has_default_value()
            ]
            call = {argument.name: by_type[str(argument.type)] for argument in required}
            operator(**call)
        except Exception:  # noqa: BLE001, S112 - operators raise any class
            continue
        return call
    return None


def _written_calls() -> dict[str, list[Call]]:
    rows, image, volume = torch.rand(4, 5), torch.rand(1, 2, 6, 6), torch.rand(1, 2, 3, 4, 5)
    table, indices, offsets = torch.rand(6, 3), torch.tensor([0, 2, 1, 4, 5]), torch.tensor([0, 2])
    weight, bias, mean, variance = (torch.rand(2) for _ in range(4))
    heads, classes = torch.rand(2, 2, 5, 4), torch.tensor([0, 3, 1, 4])
    mask = torch.rand(5, 5) > 0.5
    grid_points = torch.rand(1, 3, 3, 2) * 2 - 1
    zero_point = torch.tensor([3], dtype=torch.int32)
    rounded = (0.1, 3, 0, 255)
    args: dict[str, list[tuple[Any, ...]]] = {
        "aten._embedding_bag.default": [(table, indices, offsets, False, mode) for mode in range(3)],
        "aten._native_batch_norm_legit.no_stats": [(image, weight, bias, True, 0.1, 1e-5)],
        "aten._native_batch_norm_legit_functional.default": [
            (image, weight, bias, mean, variance, is_training, 0.1, 1e-5) for is_training in (False, True)
        ],
        "aten._native_batch_norm_legit_no_training.default": [(image, weight, bias, mean, variance, 0.1, 1e-5)],
        "aten._scaled_dot_product_flash_attention_for_cpu.default": [
            (heads, heads, heads, 0.0, causal) for causal in (False, True)
        ],
        "aten._upsample_bicubic2d_aa.default": [(image, [4, 9], aligned) for aligned in (False, True)],
        "aten.celu.default": [(torch.ones(3), alpha) for alpha in (1.0, 0.5, -2.0)],
        "aten.clamp.Tensor": [(torch.ones(3),) * 3],
        "aten.col2im.default": [(torch.rand(1, 8, 9), [4, 4], [2, 2], [1, 1], [0, 0], [1, 1])],
        "aten.concat.default": [([rows, rows], 1)],
        "aten.concatenate.default": [([rows, rows], 0)],
        "aten.conv1d.default": [(torch.rand(1, 2, 6), torch.rand(3, 2, 3), torch.rand(3))],
        "aten.copy.default": [(torch.ones(3), torch.ones(3))],
        "aten.cross_entropy_loss.default": [
            (rows, classes),
            (rows, classes, None, 0, 3),
            (rows, classes, None, 1, -100, 0.3),
        ],
        "aten.det.default": [(torch.rand(3, 3),)],
        "aten.einsum.default": [("ij,kj->ik", [rows, rows]), ("ij->j", [rows])],
        "aten.embedding_bag.default": [(table, indices, offsets, False, mode) for mode in range(3)],
        "aten.embedding_bag.padding_idx": [(table, indices, offsets, False, 0, False, None, False, 1)],
        "aten.fake_quantize_per_tensor_affine.default": [(torch.ones(3), *rounded), (torch.ones(3), 0.5, 0, -8, 7)],
        "aten.fake_quantize_per_tensor_affine.tensor_qparams": [(rows, torch.tensor([0.1]), zero_point, 0, 255)],
        "aten.fill.Tensor": [(rows, torch.tensor(2.0))],
        "aten.grid_sampler.default": [
            (image, grid_points, mode, padding, False) for mode in (0, 1) for padding in (0, 1)
        ],
        "aten.instance_norm.default": [(image, weight, bias, None, None, True, 0.1, 1e-5, False)],
        "aten.masked_fill.Scalar": [(rows, rows > 0.5, 2)],
        "aten.max_pool1d.default": [(rows[None], [2]), (rows[None], [3], [2], [1])],
        "aten.max_pool1d_with_indices.default": [(rows[None], [2])],
        "aten.max_pool2d.default": [(image, [2, 2]), (image, [3, 3], [2, 2], [1, 1], [1, 1], True)],
        "aten.max_pool3d.default": [(volume, [2, 2, 2])],
        "aten.nll_loss.default": [(rows, classes), (rows, classes, None, 0), (rows, classes, torch.rand(5), 1, 3)],
        "aten.pad.default": [
            (image, [1, 2], "constant", 0.5),
            (image, [1, 2], "reflect"),
            (image, [1, 2, 1, 1], "replicate"),
        ],
        "aten.prelu.default": [(image, weight), (image, weight[:1])],
        "aten.reflection_pad3d.default": [(volume, [1, 1, 1, 2, 1, 1])],
        "aten.replication_pad3d.default": [(volume, [1, 1, 1, 2, 1, 1])],
        "aten.scaled_dot_product_attention.default": [
            (heads, heads, heads),
            (heads, heads, heads, None, 0.0, True),
            (heads, heads, heads, mask),
            (heads, heads, heads, torch.rand(5, 5)),
        ],
        "aten.scatter.value": [(rows, 0, torch.tensor([[0, 0, 1, 2, 3]]), 0.5)],
        "aten.scatter_reduce.two": [
            (rows, 0, torch.tensor([[0, 0, 1, 2, 3]] * 3), rows[:3], kind)
            for kind in ("sum", "prod", "mean", "amax", "amin")
        ],
        "aten.special_log_softmax.default": [(rows, 1)],
        "aten.special_softmax.default": [(rows, 0)],
        "aten.unique_dim.default": [(rows, 0)],
        "aten.upsample_bicubic2d.vec": [(image, [4, 9], aligned, None) for aligned in (False, True)],
        "aten.upsample_bilinear2d.vec": [(image, [4, 9], aligned, None) for aligned in (False, True)],
        "aten.upsample_nearest1d.vec": [(rows[None], [7], None)],
        "aten.upsample_nearest2d.vec": [(image, [4, 9], None), (image, None, [1.5, 0.7])],
        "aten.upsample_nearest3d.default": [(volume, [2, 5, 7])],
        "aten.upsample_nearest3d.vec": [(volume, [2, 5, 7], None)],
        "aten.upsample_trilinear3d.vec": [(volume, [2, 5, 7], aligned, None) for aligned in (False, True)],
        "prims.broadcast_in_dim.default": [(rows, [2, 4, 5], [1, 2])],
        "prims.reshape.default": [(rows, [5, 4])],
        "prims.squeeze.default": [(rows[None], [0])],
        "prims.sum.default": [(rows, [0])],
        "prims.transpose.default": [(rows, [1, 0])],
        "prims.var.default": [(rows, [0], 1.0)],
        "prims.where.default": [(torch.ones(3) > 0, torch.ones(3), torch.ones(3))],
    }
    calls = {name: [bind(find_operator(name), arguments, {}) for arguments in each] for name, each in args.items()}
    for name in ("aten.div.Scalar_mode", "aten.div.Tensor_mode"):
        operator, divisor = find_operator(name), 2 if "Scalar" in name else torch.ones(3)
        modes = (None, "trunc", "floor")
        calls[name] = [bind(operator, (torch.ones(3), divisor), {"rounding_mode": mode}) for mode in modes]
    cast = find_operator(CAST)
    calls[CAST] = [bind(cast, (torch.ones(3),), {"dtype": dtype}) for dtype in (*TYPES, *CAST_TYPES)]
    return calls
