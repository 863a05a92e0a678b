"""Formulas for the cost of operators, from the shapes of their tensors: floating-point operations, and bytes that are read repeatedly.

They cover the operators that torch's own counter (``torch.utils.flop_counter``) does not count. A multiplication and an addition are two
operations. Terms of lower order, such as the addition of a bias, are left out.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

_RECURRENT_LAYERS: Final = "lstm gru rnn_tanh rnn_relu"


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """The sizes of one tensor of a call, at the sizes of the example."""

    sizes: tuple[int, ...]
    # Whether the dtype is one that operators multiply: floating point, complex, or an integer of 8 bits, as quantized tensors have.
    # Indices and masks are not.
    is_multiplied: bool = True
    is_weight: bool = False
    # Bytes of one element.
    item_size: int = 4

    @property
    def elements(self) -> int:
        """The number of elements."""
        return math.prod(self.sizes)

    @property
    def last_size(self) -> int:
        """The size of the last dimension; 1 for a 0-dimensional tensor."""
        return self.sizes[-1] if self.sizes else 1

    @property
    def rows(self) -> int:
        """The product of all sizes but the last one."""
        return math.prod(self.sizes[:-1])


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorCall:
    """One call of an operator."""

    # The arguments by parameter name, those that the call leaves out too; a `TensorShape` stands for a tensor, and a list of them for a
    # list of tensors.
    arguments: Mapping[str, Any]
    results: Sequence[TensorShape]

    def tensor(self, *parameters: str) -> TensorShape:
        """Return the tensor given for the first of these parameters that the operator has."""
        for parameter in parameters:
            if isinstance(self.arguments.get(parameter), TensorShape):
                shape: TensorShape = self.arguments[parameter]
                return shape
        raise KeyError(parameters)

    def tensors(self) -> Iterator[TensorShape]:
        """Yield the shapes of all tensors among the arguments."""
        for argument in self.arguments.values():
            for item in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(item, TensorShape):
                    yield item


FlopFormula = Callable[[OperatorCall], int]


def estimated_flops(call: OperatorCall) -> int:
    """Estimate the operations of an operator that no formula is known for: one for each element that it returns.

    Where it takes weights that are matrices, as a layer does, also one product of each with each row of the largest activation. Of a weight
    with three dimensions, such as the matrices of several experts, each row meets one matrix.
    """
    returned = sum(result.elements for result in call.results if result.is_multiplied)
    multiplied = [tensor for tensor in call.tensors() if tensor.is_multiplied]
    rows = max((tensor.rows for tensor in multiplied if not tensor.is_weight and tensor.elements), default=0)
    weights = [tensor.sizes for tensor in multiplied if tensor.is_weight and len(tensor.sizes) > 1]
    weight_elements = sum(math.prod(sizes[-2:] if len(sizes) == 3 else sizes) for sizes in weights)
    return max(returned, 2 * rows * weight_elements)


def _matrix_product(call: OperatorCall) -> int:
    """Each element of the result is a sum over the last dimension of the first factor, however the second one is packed."""
    # `addmv` and `_addmm_activation` call what they add `self`.
    factor = call.tensor("mat", "mat1", "self", "input", "inp")
    return 2 * call.results[0].elements * factor.last_size


def _added_batch_products(call: OperatorCall) -> int:
    """`addbmm`: products of all matrices of two batches."""
    return 2 * call.tensor("batch1").elements * call.tensor("batch2").last_size


def _grouped_product(call: OperatorCall) -> int:
    """Each row meets one matrix of the group; of two matrices, the groups divide the dimension that is summed over."""
    left, right = call.tensor("self", "input"), call.tensor("mat2", "weight")
    if len(left.sizes) == len(right.sizes) == 2:
        return 2 * left.elements * right.last_size
    return 2 * call.results[0].elements * left.last_size


def _recurrent_layers(call: OperatorCall) -> int:
    """Each matrix of each layer and direction meets each row of each step."""
    weights: Sequence[TensorShape] = call.arguments.get("params") or call.arguments.get("weight") or ()
    matrix_elements = sum(weight.elements for weight in weights if len(weight.sizes) == 2)  # biases are vectors
    return 2 * call.tensor("input", "data").rows * matrix_elements


def _recurrent_reads(call: OperatorCall) -> int:
    """The weights between steps are read for each step, those of the input for all steps together."""
    weights: Sequence[TensorShape] = call.arguments["params"]
    group_count = call.arguments["num_layers"] * (2 if call.arguments["bidirectional"] else 1)
    # Weights of each layer and direction: input matrix, hidden matrix, two biases if it has any, projection if it has one.
    group_size = len(weights) // group_count
    step_weights = [*weights[1::group_size]]
    if group_size % 2:
        step_weights += weights[group_size - 1 :: group_size]
    return (_step_count(call) - 1) * sum(weight.elements * weight.item_size for weight in step_weights)


def _step_count(call: OperatorCall) -> int:
    if "batch_sizes" in call.arguments:
        return call.tensor("batch_sizes").elements
    steps = call.tensor("input")
    return steps.sizes[1] if call.arguments["batch_first"] and len(steps.sizes) == 3 else steps.sizes[0]


def _recurrent_cell(call: OperatorCall) -> int:
    return 2 * call.tensor("input").rows * (call.tensor("w_ih").elements + call.tensor("w_hh").elements)


def _convolution(call: OperatorCall) -> int:
    """Each element of the result is a sum over the filter of its channel; weight ``[out, in / groups, *kernel]``."""
    return 2 * call.results[0].elements * math.prod(call.tensor("weight").sizes[1:])


def _transposed_convolution(call: OperatorCall) -> int:
    """Each element of the input is spread by the filters of its channel; weight ``[in, out / groups, *kernel]``."""
    return 2 * call.tensor("self", "input").elements * math.prod(call.tensor("weight").sizes[1:])


def _convolution_over_time(call: OperatorCall) -> int:
    """`conv_tbc`: weight ``[kernel, in, out]``."""
    return 2 * call.results[0].elements * math.prod(call.tensor("weight").sizes[:2])


def _attention(call: OperatorCall) -> int:
    """Two batches of matrix products, whether causal or not; query ``[..., heads, queries, size]``."""
    query, key, value = call.tensor("query", "q"), call.tensor("key", "k"), call.tensor("value", "v")
    return 2 * query.rows * key.sizes[-2] * (query.last_size + value.last_size)


def _projected_attention(call: OperatorCall) -> int:
    """Multi-head attention with the projections around it, and the two further layers of an encoder layer where there are any."""
    source = call.tensor("query", "src")
    keys = call.tensor("key", "src")
    matrices = ("qkv_weight", "proj_weight", "ffn_weight_1", "ffn_weight_2")
    weight_elements = sum(call.tensor(parameter).elements for parameter in matrices if parameter in call.arguments)
    return 2 * source.rows * weight_elements + 4 * source.elements * keys.sizes[-2]


def _distances(call: OperatorCall) -> int:
    """`cdist` and `pdist`: a difference, a power and an addition for each feature of each pair."""
    return 3 * call.results[0].elements * call.tensor("x1", "self").last_size


def _complex_transform(call: OperatorCall) -> int:
    """5 N log2(N) operations for N points (fftw.org/speed/method.html)."""
    sizes = max(call.tensor("self").sizes, call.results[0].sizes, key=math.prod)
    point_count = math.prod(sizes[dim] for dim in _transformed_dims(call.arguments, len(sizes)))
    return round(5 * math.prod(sizes) * math.log2(max(point_count, 2)))


def _real_transform(call: OperatorCall) -> int:
    """Half of a complex transform, where one side is real."""
    return _complex_transform(call) // 2


def _transformed_dims(arguments: Mapping[str, Any], rank: int) -> Sequence[int]:
    """The dimensions of a Fourier transform; those of the sizes `s`, or all, where the call names none."""
    dims = arguments.get("dim")
    if dims is None:
        return range(rank - len(arguments.get("s") or range(rank)), rank)
    return [dims] if isinstance(dims, int) else dims


def _short_time_transform(call: OperatorCall) -> int:
    """`stft`: a transform of real numbers for each frame of the spectrum ``[..., frequencies, frames]``."""
    return _frame_transforms(call.results[0], int(call.arguments["n_fft"]))


def _inverse_short_time_transform(call: OperatorCall) -> int:
    return _frame_transforms(call.tensor("self"), int(call.arguments["n_fft"]))


def _frame_transforms(spectrum: TensorShape, window: int) -> int:
    frame_count = spectrum.elements // (window // 2 + 1)
    return round(2.5 * frame_count * window * math.log2(max(window, 2)))


def _factorization(thirds: int) -> FlopFormula:
    """Return the formula of an algorithm on matrices: so many thirds of ``rows * columns * min(rows, columns)``."""

    def formula(call: OperatorCall) -> int:
        matrices = call.tensor("self", "A", "input")
        return thirds * matrices.elements * min(matrices.sizes[-2:]) // 3

    return formula


def _linear_system(call: OperatorCall) -> int:
    """An LU factorization, and two triangular solves for each right side."""
    matrices = call.tensor("A")
    return 2 * matrices.elements * matrices.last_size // 3 + 2 * call.tensor("B").elements * matrices.last_size


def _factorized_system(call: OperatorCall) -> int:
    """Two triangular solves for each right side."""
    return 2 * call.results[0].elements * call.tensor("LU", "LD", "LU_data", "input2").last_size


def _triangular_system(call: OperatorCall) -> int:
    """`triangular_solve` calls the right side ``self`` and the matrix ``A``, `linalg_solve_triangular` the matrix ``self``."""
    return call.results[0].elements * call.tensor("A", "self").last_size


def _matrix_power(call: OperatorCall) -> int:
    """By repeated squaring."""
    matrices = call.tensor("self")
    return 2 * matrices.elements * matrices.last_size * abs(int(call.arguments["n"])).bit_length()


# Operators of ATen, without overload and without the underscore of those that write in place.
# The factors of dense linear algebra come from Golub and Van Loan, Matrix Computations, 4th edition, chapters 3 to 8.
_ATEN_FORMULAS: Final[tuple[tuple[FlopFormula, str], ...]] = (
    (
        _matrix_product,
        (
            "_int_mm _scaled_mm _scaled_mm_v2 _weight_int4pack_mm _weight_int4pack_mm_for_cpu "
            "_weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _mixed_dtypes_linear _dyn_quant_matmul_4bit mv dot vdot "
            "mkldnn_linear fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_fp16_weight "
            "fbgemm_linear_fp16_weight_fp32_activation _sparse_semi_structured_mm _sparse_semi_structured_linear addmv "
            "_addmm_activation"
        ),
    ),
    (_added_batch_products, "addbmm"),
    (_grouped_product, "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
    (_recurrent_layers, f"{_RECURRENT_LAYERS} quantized_lstm quantized_gru _cudnn_rnn miopen_rnn"),
    (_recurrent_cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell quantized_lstm_cell"),
    (
        _convolution,
        (
            "_conv_depthwise2d conv_depthwise3d thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d "
            "_convolution_mode mkldnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
            "miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution _nnpack_spatial_convolution"
        ),
    ),
    (
        _transposed_convolution,
        "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d",
    ),
    (_convolution_over_time, "conv_tbc"),
    (
        _attention,
        (
            "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
            "_scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention"
        ),
    ),
    (_projected_attention, "_native_multi_head_attention _triton_multi_head_attention _transformer_encoder_layer_fwd"),
    (_distances, "cdist _cdist_forward _euclidean_dist pdist _pdist_forward"),
    (_complex_transform, "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn _fft_c2c"),
    (
        _real_transform,
        (
            "fft_rfft fft_irfft fft_hfft fft_ihfft fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 fft_rfftn fft_irfftn fft_hfftn fft_ihfftn "
            "_fft_r2c _fft_c2r"
        ),
    ),
    (_short_time_transform, "stft"),
    (_inverse_short_time_transform, "istft"),
    (_matrix_power, "linalg_matrix_power matrix_power"),
    (_factorization(1), "cholesky linalg_cholesky linalg_cholesky_ex linalg_ldl_factor linalg_ldl_factor_ex"),
    (_linear_system, "linalg_solve linalg_solve_ex _linalg_solve_ex"),
    (_factorized_system, "linalg_lu_solve lu_solve linalg_ldl_solve cholesky_solve"),
    (_triangular_system, "linalg_solve_triangular triangular_solve"),
    (
        _factorization(2),
        (
            "det linalg_det _linalg_det logdet slogdet linalg_slogdet _linalg_slogdet linalg_lu linalg_lu_factor "
            "linalg_lu_factor_ex _lu_with_info"
        ),
    ),
    (_factorization(4), "linalg_eigvalsh geqrf linalg_lstsq linalg_householder_product orgqr"),
    (_factorization(6), "inverse linalg_inv linalg_inv_ex cholesky_inverse"),
    (_factorization(8), "qr linalg_qr"),
    (_factorization(12), "linalg_svdvals linalg_matrix_rank linalg_cond"),
    (_factorization(27), "linalg_eigh _linalg_eigh"),
    (_factorization(30), "linalg_eigvals _linalg_eigvals"),
    (_factorization(60), "linalg_matrix_exp matrix_exp"),
    (_factorization(66), "svd linalg_svd _linalg_svd linalg_pinv pinverse"),
    (_factorization(75), "linalg_eig"),
)
# By namespace and name.
FLOP_FORMULAS: Final[Mapping[str, FlopFormula]] = {
    **{
        f"aten.{operator_name}": formula
        for formula, operator_names in _ATEN_FORMULAS
        for operator_name in operator_names.split()
    },
    "transformers.grouped_mm_fallback": _grouped_product,
    "torchvision.deform_conv2d": _convolution,
    "higher_order.flex_attention": _attention,
}
# The bytes that operators read again and again, beside one read of each argument.
REPEATED_READS: Final[Mapping[str, FlopFormula]] = {
    f"aten.{operator_name}": _recurrent_reads for operator_name in _RECURRENT_LAYERS.split()
}
