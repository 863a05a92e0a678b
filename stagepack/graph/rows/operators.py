"""The rule of each operator by its name, without overload and without the underscore of those that write in place.

An operator that has no rule here is not known to keep rows apart: a model that calls it on rows is not batched.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stagepack.graph.rows import alignment, lookups, rearrangement
from stagepack.graph.rows.alignment import Rule, leading, product_of, trailing
from stagepack.graph.rows.rearrangement import along, exchange, permuted

# As torch tags them (``torch.Tag.pointwise``), with those that it does not tag although they are.
_ELEMENTWISE = """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _conj_physical _masked_scale
    _prelu_kernel abs absolute acos acosh add addcdiv addcmul angle arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan
    atan2 atanh bitwise_and bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu clamp clamp_max clamp_min
    clip complex conj_physical copy copysign cos cosh deg2rad digamma div divide elu eq erf erfc erfinv exp exp2 expm1 fill fix float_power
    floor floor_divide fmax fmin fmod frac frexp gcd ge gelu greater greater_equal gt hardshrink hardsigmoid hardswish hardtanh heaviside
    hypot i0 igamma igammac isclose isfinite isinf isnan isneginf isposinf isreal lcm ldexp le leaky_relu lerp less less_equal lgamma log
    log10 log1p log2 log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit lt
    masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal polar polygamma pow rad2deg
    reciprocal relu relu6 remainder round rsqrt rsub selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink special_entr
    special_erf special_erfc special_erfcx special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc
    special_gammaln special_i0 special_i0e special_i1 special_i1e special_log1p special_log_ndtr special_logit special_multigammaln
    special_ndtr special_ndtri special_polygamma special_psi special_round special_sinc special_xlog1py special_xlogy special_zeta sqrt
    square sub subtract tan tanh threshold true_divide trunc xlogy zero
    alpha_dropout dropout feature_dropout native_dropout rrelu
"""
_ROW_MAJOR = """
    _lazy_clone _reshape_alias _reshape_copy _to_copy _to_cpu _unsafe_view alias alias_copy atleast_1d atleast_2d atleast_3d clone conj
    contiguous detach detach_copy flatten imag lift lift_fresh lift_fresh_copy pin_memory positive ravel real reshape reshape_as
    resolve_conj resolve_neg squeeze squeeze_copy to type_as unflatten unsqueeze unsqueeze_copy view view_as view_copy
    _autocast_to_full_precision _autocast_to_reduced_precision _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int
    _cast_Long _cast_Short
"""
_NEW = """
    empty empty_like empty_permuted empty_strided full full_like new_empty new_empty_strided new_full new_ones new_zeros ones ones_like
    rand rand_like randint randint_like randn randn_like zeros zeros_like bernoulli exponential normal uniform random
"""
_REDUCTIONS = """
    all amax amin aminmax any argmax argmin count_nonzero frobenius_norm kthvalue linalg_matrix_norm linalg_norm linalg_vector_norm
    logsumexp max mean median min mode nanmean nanmedian nanquantile nansum norm nuclear_norm prod quantile special_logsumexp std std_mean
    sum trapezoid trapz var var_mean
"""
# Along a dimension: the shape stays.
_SCANS = """
    _log_softmax _logcumsumexp _safe_softmax _softmax argsort cummax cummin cumprod cumsum glu log_softmax logcumsumexp softmax sort
    special_log_softmax special_softmax topk fft_fft fft_fft2 fft_fftn fft_fftshift fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ifftshift
    _fft_c2c _fft_c2r _fft_r2c fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn
"""
# The last two dimensions, a matrix, are computed together.
_MATRICES = """
    _linalg_det _linalg_slogdet _linalg_svd cholesky cholesky_inverse det inverse linalg_cholesky linalg_cholesky_ex linalg_cond linalg_det
    linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_inv linalg_inv_ex linalg_lu linalg_lu_factor linalg_lu_factor_ex
    linalg_matrix_exp linalg_matrix_power linalg_qr linalg_slogdet linalg_svd linalg_svdvals logdet matrix_exp matrix_power slogdet tril
    triu
"""
_POOLS = """
    _adaptive_avg_pool adaptive_avg_pool adaptive_max_pool avg_pool max_pool _upsample_nearest_exact upsample_bicubic upsample_bilinear
    upsample_linear upsample_nearest upsample_trilinear _upsample_bicubic _upsample_bilinear reflection_pad replication_pad
"""
_LOSSES = """
    binary_cross_entropy binary_cross_entropy_with_logits huber_loss kl_div l1_loss mse_loss poisson_nll_loss smooth_l1_loss
    soft_margin_loss
"""
_INDEX_WRITES = "index_add index_copy index_fill index_reduce"
_RECURRENT = "gru lstm rnn_relu rnn_tanh"
_CELLS = "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"
_CONVOLUTIONS = """
    _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _slow_conv2d_forward slow_conv3d
    thnn_conv2d cudnn_convolution mkldnn_convolution
"""
_BATCH_NORMS = """
    _batch_norm_impl_index _batch_norm_no_update _native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm cudnn_batch_norm
    native_batch_norm
"""
_ATTENTION = """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention
"""

_NAMED: Final[Mapping[str, Rule]] = {
    "addbmm": product_of("zik,zkj->ij", "batch1", "batch2", added="self"),
    "addmm": product_of("ik,kj->ij", "mat1", "mat2", added="self"),
    "addmv": product_of("ik,k->i", "mat", "vec", added="self"),
    "addr": product_of("i,j->ij", "vec1", "vec2", added="self"),
    "affine_grid_generator": leading("theta"),
    "arange": rearrangement.numbered,
    "baddbmm": product_of("zik,zkj->zij", "batch1", "batch2", added="self"),
    "bilinear": alignment.bilinear,
    "bmm": product_of("zik,zkj->zij", "self", "mat2"),
    "broadcast_tensors": rearrangement.broadcast_list,
    "broadcast_to": rearrangement.expanded,
    "bucketize": lookups.first_only,
    "cat": rearrangement.joined,
    "_cdist_forward": trailing(2, "x1", "x2"),
    "cdist": trailing(2, "x1", "x2"),
    "channel_shuffle": leading(),
    "col2im": leading(),
    "concat": rearrangement.joined,
    "concatenate": rearrangement.joined,
    "constant_pad_nd": rearrangement.padded,
    "cosine_similarity": lookups.cosine_similarity,
    "cross": lookups.crossed,
    "diagonal": rearrangement.diagonal,
    "cross_entropy_loss": lookups.classification_loss,
    "diff": rearrangement.differences,
    "dot": product_of("k,k->", "self", "tensor"),
    "einsum": alignment.einsum,
    "embedding": lookups.embedding,
    "embedding_bag": lookups.embedding_bag,
    "_embedding_bag": lookups.embedding_bag,
    "_embedding_bag_forward_only": lookups.embedding_bag,
    "expand": rearrangement.expanded,
    "expand_as": rearrangement.expanded,
    "expand_copy": rearrangement.expanded,
    "flip": along("dims", reason="reverses the rows"),
    "_fused_rms_norm": alignment.normalized,
    "gather": lookups.gather,
    "grid_sampler": leading("input", "grid"),
    "grid_sampler_2d": leading("input", "grid"),
    "grid_sampler_3d": leading("input", "grid"),
    "group_norm": leading("input"),
    "hstack": rearrangement.joined_along(1),
    "im2col": leading(),
    "index": lookups.index,
    "index_put": lookups.index_put,
    "index_select": lookups.index_select,
    "inner": product_of("ik,jk->ij", "self", "other"),
    "instance_norm": lookups.instance_norm,
    "isin": lookups.first_only,
    "istft": trailing(2, "self"),
    "layer_norm": alignment.normalized,
    "linalg_cross": lookups.crossed,
    "linalg_matmul": alignment.matmul,
    "linalg_pinv": trailing(2, "self", "A"),
    "linalg_solve_triangular": trailing(2, "self", "B"),
    "linear": alignment.linear,
    "mH": permuted(rearrangement.exchange_last),
    "mT": permuted(rearrangement.exchange_last),
    "adjoint": permuted(rearrangement.exchange_last),
    "matmul": alignment.matmul,
    "meshgrid": rearrangement.meshed,
    "mm": product_of("ik,kj->ij", "self", "mat2"),
    "movedim": permuted(rearrangement.moved),
    "moveaxis": permuted(rearrangement.moved),
    "mv": product_of("ik,k->i", "self", "vec"),
    "narrow": rearrangement.sliced,
    "native_channel_shuffle": leading(),
    "native_group_norm": leading("input"),
    "native_layer_norm": alignment.normalized,
    "nll_loss": lookups.classification_loss,
    "nll_loss2d": lookups.classification_loss,
    "nll_loss_nd": lookups.classification_loss,
    "numpy_T": permuted(rearrangement.reversal),
    "one_hot": lookups.one_hot,
    "outer": product_of("i,j->ij", "self", "vec2"),
    "pad": rearrangement.padded,
    "pairwise_distance": trailing(1, "x1", "x2"),
    "permute": permuted(rearrangement.permutation),
    "permute_copy": permuted(rearrangement.permutation),
    "pixel_shuffle": trailing(3),
    "pixel_unshuffle": trailing(3),
    "prelu": lookups.first_only,
    "repeat": rearrangement.repeated,
    "repeat_interleave": rearrangement.interleaved,
    "rms_norm": alignment.normalized,
    "roll": along("dims", reason="moves the rows"),
    "rot90": along("dims", reason="turns the rows"),
    "scatter": lookups.scatter,
    "scatter_add": lookups.scatter,
    "scatter_reduce": lookups.scatter,
    "searchsorted": lookups.first_only,
    "select": rearrangement.selected,
    "select_copy": rearrangement.selected,
    "select_scatter": lookups.select_scatter,
    "slice": rearrangement.sliced,
    "slice_copy": rearrangement.sliced,
    "slice_scatter": lookups.select_scatter,
    "split": rearrangement.split,
    "split_copy": rearrangement.split,
    "split_with_sizes": rearrangement.split,
    "split_with_sizes_copy": rearrangement.split,
    "chunk": rearrangement.split,
    "tensor_split": rearrangement.split,
    "unsafe_chunk": rearrangement.split,
    "unsafe_split": rearrangement.split,
    "unsafe_split_with_sizes": rearrangement.split,
    "stack": rearrangement.stacked,
    "stft": trailing(1, "self"),
    "swapaxes": permuted(exchange("axis0", "axis1")),
    "swapdims": permuted(exchange("dim0", "dim1")),
    "t": permuted(rearrangement.reversal),
    "t_copy": permuted(rearrangement.reversal),
    "take_along_dim": lookups.gather,
    "tensordot": alignment.tensordot,
    "tile": rearrangement.repeated,
    "transpose": permuted(exchange("dim0", "dim1")),
    "transpose_copy": permuted(exchange("dim0", "dim1")),
    "unbind": rearrangement.selected,
    "unbind_copy": rearrangement.selected,
    "unfold": along("dimension", reason="takes windows over the rows"),
    "unfold_copy": along("dimension", reason="takes windows over the rows"),
    "_unsafe_index": lookups.index,
    "_unsafe_index_put": lookups.index_put,
    "_index_put_impl": lookups.index_put,
    "view_as_complex": rearrangement.retyped,
    "view_as_real": rearrangement.retyped,
    "vstack": rearrangement.joined_along(0),
    "where": alignment.elementwise,
}


def _rules(operator_names: str, rule: Rule) -> dict[str, Rule]:
    return dict.fromkeys(operator_names.split(), rule)


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        f"aten.{operator_name}": rule
        for operator_name, rule in {
            **_rules(_ELEMENTWISE, alignment.elementwise),
            **_rules(_ROW_MAJOR, rearrangement.row_major),
            **_rules(_NEW, rearrangement.like),
            **_rules(_REDUCTIONS, rearrangement.reduced),
            **_rules(_SCANS, along("dim", reason="computes along the rows")),
            **_rules(_MATRICES, trailing(2, "self", "input", "A")),
            **_rules(_LOSSES, alignment.unreduced_loss),
            **_rules(_INDEX_WRITES, lookups.index_write),
            **_rules(_RECURRENT, lookups.recurrent),
            **_rules(_CELLS, leading("input", "hx")),
            **_rules(_CONVOLUTIONS, alignment.convolution),
            **_rules(_BATCH_NORMS, lookups.batch_norm),
            **_rules(_ATTENTION, alignment.attention),
            **{
                f"{operator_name}{dims}d{suffix}": trailing(dims)
                for operator_name in _POOLS.split()
                for dims in (1, 2, 3)
                for suffix in ("", "_with_indices", "_aa")
            },
            **_NAMED,
        }.items()
    }
    | {"prims.convert_element_type": alignment.elementwise}
    | _rules(
        "quantized_decomposed.quantize_per_tensor quantized_decomposed.dequantize_per_tensor quantized_decomposed.quantize_per_token "
        "quantized_decomposed.dequantize_per_token",
        alignment.elementwise,
    )
    | {
        "quantized_decomposed.choose_qparams": rearrangement.reduced,
        "quantized_decomposed.choose_qparams_symmetric": rearrangement.reduced,
        "quantized_decomposed.choose_qparams_per_token": trailing(1, "input"),
        "quantized_decomposed.choose_qparams_per_token_asymmetric": trailing(1, "input"),
    }
)

# Overloads that do something else than the other overloads of their name.
OVERLOADS: Final[Mapping[str, Rule | None]] = MappingProxyType(
    {
        "aten.max.other": alignment.elementwise,
        "aten.min.other": alignment.elementwise,
        "aten.view.dtype": rearrangement.retyped,
        "aten.view_copy.dtype": rearrangement.retyped,
        "aten.where.default": None,
        "aten.normal.Tensor_Tensor": alignment.elementwise,
        "aten.normal.Tensor_float": alignment.elementwise,
        "aten.normal.float_Tensor": alignment.elementwise,
    }
)

# Rules that understand the numbers of rows, which ``arange`` makes; for others, such a number ties the answer to the place of a row.
POSITION_RULES: Final = frozenset(
    {
        rearrangement.row_major,
        rearrangement.expanded,
        rearrangement.meshed,
        rearrangement.numbered,
        rearrangement.like,
        rearrangement.sliced,
        lookups.index,
        lookups.index_put,
        lookups.index_select,
        lookups.embedding_bag,
    }
)

# They look at sizes and types, and give no tensor.
METADATA: Final = frozenset(
    f"aten.{operator_name}"
    for operator_name in [
        "_assert_tensor_metadata",
        "dim",
        "is_same_size",
        "numel",
        "size",
        "storage_offset",
        "stride",
        "sym_constrain_range",
        "sym_constrain_range_for_size",
        "sym_numel",
        "sym_size",
        "sym_storage_offset",
        "sym_stride",
    ]
)
