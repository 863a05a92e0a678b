"""The rule of each operator by its name, without overload and without the underscore of those that write in place.

An operator that has no rule here is not known to keep rows apart: a model that calls it on rows is not batched.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from stagepack.graph.rows import alignment, lookups, rearrangement
from stagepack.graph.rows.alignment import Rule, leading, product_of, trailing
from stagepack.graph.rows.layout import ALONG
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
_CONVOLUTIONS = """
    _convolution conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _slow_conv2d_forward slow_conv3d
    thnn_conv2d cudnn_convolution mkldnn_convolution
"""
_BATCH_NORMS = """
    _batch_norm_impl_index _batch_norm_no_update _native_batch_norm_legit _native_batch_norm_legit_no_training batch_norm cudnn_batch_norm
    native_batch_norm
"""
_SPLITS = """
    chunk split split_copy split_with_sizes split_with_sizes_copy tensor_split unsafe_chunk unsafe_split unsafe_split_with_sizes
"""
_ATTENTION = """
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_fused_attention_overrideable scaled_dot_product_attention
"""

# Rules with the names of their operators in ATen.
_ATEN: Final[tuple[tuple[Rule, str], ...]] = (
    (alignment.elementwise, _ELEMENTWISE),
    (rearrangement.row_major, _ROW_MAJOR),
    (rearrangement.like, _NEW),
    (rearrangement.reduced, _REDUCTIONS),
    (along("dim", reason=ALONG), _SCANS),
    (trailing(2, "self", "input", "A"), _MATRICES),
    (alignment.unreduced_loss, _LOSSES),
    (lookups.index_write, "index_add index_copy index_fill index_reduce"),
    (lookups.recurrent, "gru lstm rnn_relu rnn_tanh"),
    (leading("input", "hx"), "gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell"),
    (alignment.convolution, _CONVOLUTIONS),
    (lookups.batch_norm, _BATCH_NORMS),
    (alignment.attention, _ATTENTION),
    (product_of("zik,zkj->ij", "batch1", "batch2", added="self"), "addbmm"),
    (product_of("ik,kj->ij", "mat1", "mat2", added="self"), "addmm"),
    (product_of("ik,k->i", "mat", "vec", added="self"), "addmv"),
    (product_of("i,j->ij", "vec1", "vec2", added="self"), "addr"),
    (leading("theta"), "affine_grid_generator"),
    (rearrangement.numbered, "arange"),
    (product_of("zik,zkj->zij", "batch1", "batch2", added="self"), "baddbmm"),
    (alignment.bilinear, "bilinear"),
    (product_of("zik,zkj->zij", "self", "mat2"), "bmm"),
    (rearrangement.broadcast_list, "broadcast_tensors"),
    (rearrangement.expanded, "broadcast_to expand expand_as expand_copy"),
    (lookups.first_only, "bucketize isin prelu searchsorted"),
    (rearrangement.joined, "cat concat concatenate"),
    (trailing(2, "x1", "x2"), "_cdist_forward cdist"),
    (leading(), "channel_shuffle col2im im2col native_channel_shuffle"),
    (rearrangement.padded, "constant_pad_nd pad"),
    (lookups.cosine_similarity, "cosine_similarity"),
    (lookups.crossed, "cross linalg_cross"),
    (lookups.classification_loss, "cross_entropy_loss nll_loss nll_loss2d nll_loss_nd"),
    (rearrangement.diagonal, "diagonal"),
    (rearrangement.differences, "diff"),
    (product_of("k,k->", "self", "tensor"), "dot"),
    (alignment.einsum, "einsum"),
    (lookups.embedding, "embedding"),
    (lookups.embedding_bag, "embedding_bag _embedding_bag _embedding_bag_forward_only"),
    (along("dims", reason="reverses the rows"), "flip"),
    (alignment.normalized, "_fused_rms_norm layer_norm native_layer_norm rms_norm"),
    (lookups.gather, "gather take_along_dim"),
    (leading("input", "grid"), "grid_sampler grid_sampler_2d grid_sampler_3d"),
    (leading("input"), "group_norm native_group_norm"),
    (rearrangement.joined_along(1), "hstack"),
    (lookups.index, "index _unsafe_index"),
    (lookups.index_put, "index_put _unsafe_index_put _index_put_impl"),
    (lookups.index_select, "index_select"),
    (product_of("ik,jk->ij", "self", "other"), "inner"),
    (lookups.instance_norm, "instance_norm"),
    (trailing(2, "self"), "istft"),
    (alignment.matmul, "linalg_matmul matmul"),
    (trailing(2, "self", "A"), "linalg_pinv"),
    (trailing(2, "self", "B"), "linalg_solve_triangular"),
    (alignment.linear, "linear"),
    (rearrangement.meshed, "meshgrid"),
    (permuted(rearrangement.exchange_last), "mH mT adjoint"),
    (product_of("ik,kj->ij", "self", "mat2"), "mm"),
    (permuted(rearrangement.moved), "movedim moveaxis"),
    (product_of("ik,k->i", "self", "vec"), "mv"),
    (rearrangement.sliced, "narrow slice slice_copy"),
    (permuted(rearrangement.reversal), "numpy_T t t_copy"),
    (lookups.one_hot, "one_hot"),
    (product_of("i,j->ij", "self", "vec2"), "outer"),
    (trailing(1, "x1", "x2"), "pairwise_distance"),
    (permuted(rearrangement.permutation), "permute permute_copy"),
    (trailing(3), "pixel_shuffle pixel_unshuffle"),
    (rearrangement.repeated, "repeat tile"),
    (rearrangement.interleaved, "repeat_interleave"),
    (along("dims", reason="moves the rows"), "roll"),
    (along("dims", reason="turns the rows"), "rot90"),
    (lookups.scatter, "scatter scatter_add scatter_reduce"),
    (rearrangement.selected, "select select_copy unbind unbind_copy"),
    (lookups.select_scatter, "select_scatter slice_scatter"),
    (rearrangement.split, _SPLITS),
    (rearrangement.stacked, "stack"),
    (trailing(1, "self"), "stft"),
    (permuted(exchange("axis0", "axis1")), "swapaxes"),
    (permuted(exchange("dim0", "dim1")), "swapdims transpose transpose_copy"),
    (alignment.tensordot, "tensordot"),
    (along("dimension", reason="takes windows over the rows"), "unfold unfold_copy"),
    (rearrangement.retyped, "view_as_complex view_as_real"),
    (rearrangement.joined_along(0), "vstack"),
    (alignment.elementwise, "where"),
)


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        f"aten.{operator_name}{dims}d{suffix}": trailing(dims)
        for operator_name in _POOLS.split()
        for dims in (1, 2, 3)
        for suffix in ("", "_with_indices", "_aa")
    }
    | {f"aten.{operator_name}": rule for rule, operator_names in _ATEN for operator_name in operator_names.split()}
    | {
        "prims.convert_element_type": alignment.elementwise,
        "quantized_decomposed.choose_qparams": rearrangement.reduced,
        "quantized_decomposed.choose_qparams_per_token": trailing(1, "input"),
        "quantized_decomposed.choose_qparams_per_token_asymmetric": trailing(1, "input"),
        "quantized_decomposed.choose_qparams_symmetric": rearrangement.reduced,
        "quantized_decomposed.dequantize_per_tensor": alignment.elementwise,
        "quantized_decomposed.dequantize_per_token": alignment.elementwise,
        "quantized_decomposed.quantize_per_tensor": alignment.elementwise,
        "quantized_decomposed.quantize_per_token": alignment.elementwise,
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

# Rules that understand the numbers of rows, which ``arange`` makes; for other rules, a row number ties the answer to the place of a row.
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

# Operators that look at sizes and types, and give no tensor.
_METADATA_NAMES: Final = """
    _assert_tensor_metadata dim is_same_size numel size storage_offset stride sym_constrain_range sym_constrain_range_for_size sym_numel
    sym_size sym_storage_offset sym_stride
"""
METADATA: Final = frozenset(f"aten.{operator_name}" for operator_name in _METADATA_NAMES.split())
