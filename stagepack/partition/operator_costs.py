"""Where the recorded cost of a node comes from, told by the name of its operator alone.

No operator is free unless it moves no data. Operators have their namespace and name here, without overload and without the underscore of
those that write in place: ``aten.add`` for ``aten.add_.Tensor``.
"""

from typing import Final, Literal

from stagepack.partition.flop_formulas import FLOP_FORMULAS

# Families of operators that are all memory-bound, unless a table names them.
MEMORY_BOUND_PREFIXES: Final = (
    "aten._foreach_",
    "aten.special_",
    "prims.",
    "quantized_decomposed.",
    "torchao.choose_qparams",
    "torchao.dequantize",
    "torchao.quantize",
    "torchvision.nms",
    "torchvision.ps_roi_",
    "torchvision.roi_",
)
# An operator moves no data; its bytes tell; its operations are counted, by torch or by a formula; a guess from the shapes.
CostSource = Literal["free", "memory", "counted", "estimated"]
# Arithmetic on symbolic scalars.
_FREE_NAMESPACES: Final = frozenset({"operator", "math", "torch"})
# Operators that execute a subgraph a known number of times; the nodes of the subgraph have costs of their own.
_CONTROL_FLOW: Final = frozenset(
    f"higher_order.{operator_name}"
    for operator_name in ("associative_scan", "cond", "invoke_subgraph", "map_impl", "scan")
)


def _named(namespace: str, operator_names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{operator_name}" for operator_name in operator_names.split())


# Views, and operators such as `to` and `reshape` that are views wherever they can be.
_VIEWS = _named(
    "aten",
    """
    _autocast_to_full_precision _autocast_to_reduced_precision _conj _fw_primal _indices _make_dual _neg_view _values
    _nested_get_values _nested_view_from_jagged _sparse_broadcast_to _unpack_dual adjoint alias align_to as_strided
    broadcast_to
    ccol_indices chunk coalesce col_indices conj contiguous crow_indices detach diagonal
    dsplit expand expand_as flatten hsplit imag indices lift lift_fresh linalg_diagonal mH mT matrix_H moveaxis movedim
    narrow numpy_T permute positive ravel real refine_names rename reshape reshape_as resolve_conj resolve_neg row_indices select slice
    slice_inverse split split_with_sizes squeeze swapaxes swapdims t tensor_split to transpose unbind unflatten
    unfold unsqueeze values view view_as view_as_complex view_as_real vsplit
    """,
)

# Questions about sizes and types, and assertions.
_METADATA = _named(
    "aten",
    """
    _assert_async _assert_scalar _assert_tensor_metadata _functional_assert_async _functional_assert_scalar
    _functional_sym_constrain_range _functional_sym_constrain_range_for_size _has_same_storage_numel _is_zerotensor
    _make_dep_token _shape_as_tensor _version can_cast data dense_dim dim get_device is_coalesced is_complex is_conj
    is_contiguous is_floating_point is_inference is_leaf is_neg is_pinned is_same_size is_set_to is_signed numel
    output_nr promote_types requires_grad result_type retain_grad retains_grad size sparse_dim storage_offset stride
    sym_constrain_range sym_constrain_range_for_size sym_is_contiguous sym_numel sym_size sym_storage_offset
    sym_stride
    """,
)

# The views of the decomposed operators.
_PRIMS_VIEWS = _named(
    "prims",
    """
    broadcast_in_dim collapse_view conj slice split_dim squeeze transpose view_of view_of_dtype
    """,
)

# Operators that move no data.
FREE_OPERATORS: Final = _VIEWS | _METADATA | _PRIMS_VIEWS

# Operators that ``torch.utils.flop_counter`` counts, some of them only after it has decomposed them.
TORCH_COUNTED_OPERATORS: Final = _named(
    "aten",
    """
    _convolution _cudnn_attention_forward _efficient_attention_forward _flash_attention_forward
    _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention _scaled_dot_product_flash_attention
    _slow_conv2d_forward _trilinear addmm baddbmm bilinear bmm chain_matmul conv1d conv2d conv3d conv_transpose1d
    conv_transpose2d conv_transpose3d convolution convolution_overrideable cudnn_convolution einsum inner
    linalg_matmul linalg_multi_dot linear matmul mm scaled_dot_product_attention tensordot
    """,
)

# Each element by itself.
_ELEMENTWISE = _named(
    "aten",
    """
    __and__ __iand__ __ilshift__ __ior__ __irshift__ __ixor__ __lshift__ __or__ __rshift__ __xor__ _add_relu
    _conj_physical _masked_scale _prelu_kernel _safe_softmax abs absolute acos acosh add addcdiv addcmul addr angle
    arccos arccosh arcsin arcsinh arctan arctan2 arctanh asin asinh atan atan2 atanh bitwise_and bitwise_left_shift
    bitwise_not bitwise_or bitwise_right_shift bitwise_xor ceil celu chalf clamp clamp_max clamp_min clip clone
    complex conj_physical copysign cos cosh cross deg2rad digamma div divide elu eq equal erf erfc erfinv exp exp2
    expm1 fix float_power floor floor_divide fmax fmin fmod frac frexp gcd ge gelu ger glu greater greater_equal gt
    hardshrink hardsigmoid hardswish hardtanh heaviside hypot i0 igamma igammac isclose isfinite isin isinf isnan
    isneginf isposinf isreal kron lcm ldexp le leaky_relu lerp less less_equal lgamma linalg_cross log log10 log1p
    log2 log_sigmoid log_sigmoid_forward logaddexp logaddexp2 logical_and logical_not logical_or logical_xor logit
    lt masked_fill maximum minimum mish mul multiply mvlgamma nan_to_num ne neg negative nextafter not_equal outer
    polar polygamma pow prelu rad2deg reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sgn sigmoid sign
    signbit silu sin sinc sinh softplus softshrink sqrt square sub subtract tan tanh threshold true_divide trunc
    where xlogy
    """,
)

# Reductions, scans, normalizations and losses.
_REDUCTIONS = _named(
    "aten",
    """
    _aminmax _batch_norm_impl_index _batch_norm_no_update _batch_norm_with_update _batch_norm_with_update_functional
    _ctc_loss _fused_rms_norm _is_all_true _is_any_true _linalg_check_errors _log_softmax _logcumsumexp
    _masked_softmax _native_batch_norm_legit _native_batch_norm_legit_functional
    _native_batch_norm_legit_no_training _softmax _weight_norm _weight_norm_interface all allclose amax amin aminmax
    any argmax argmin batch_norm binary_cross_entropy binary_cross_entropy_with_logits corrcoef
    cosine_embedding_loss cosine_similarity count_nonzero cov cross_entropy_loss ctc_loss cudnn_batch_norm cummax
    cummin cumprod cumsum cumulative_trapezoid diff dist frobenius_norm gradient group_norm hash_tensor
    hinge_embedding_loss huber_loss instance_norm kl_div l1_loss layer_norm linalg__powsum linalg_matrix_norm
    linalg_norm linalg_vecdot linalg_vector_norm log_softmax logcumsumexp logsumexp margin_ranking_loss max mean min
    mse_loss multi_margin_loss multilabel_margin_loss nanmean nansum native_batch_norm native_group_norm
    native_layer_norm native_norm nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd norm
    norm_except_dim nuclear_norm pairwise_distance poisson_nll_loss prod renorm rms_norm segment_reduce
    smooth_l1_loss soft_margin_loss softmax std std_mean sum sum_to_size trace trapezoid trapz triplet_margin_loss
    var var_mean
    """,
)

# Random numbers.
_RANDOM = _named(
    "aten",
    """
    _fused_dropout _philox_key_fold_in _philox_key_split _philox_normal _philox_uniform _sample_dirichlet
    _standard_gamma alpha_dropout bernoulli binomial cauchy dropout exponential feature_alpha_dropout
    feature_dropout geometric log_normal multinomial native_dropout normal normal_functional poisson rand rand_like
    randint randint_like randn randn_like random randperm rrelu_with_noise rrelu_with_noise_functional uniform
    """,
)

# New tensors.
_FACTORIES = _named(
    "aten",
    """
    _efficientzerotensor affine_grid_generator arange bartlett_window blackman_window cartesian_prod combinations
    empty empty_like empty_permuted empty_strided eye fft_fftfreq fft_rfftfreq fill fill_diagonal full full_like
    hamming_window hann_window kaiser_window linalg_vander linspace logspace new_empty new_empty_strided new_full
    new_ones new_zeros ones ones_like range scalar_tensor tril_indices triu_indices vander zero zeros zeros_like
    """,
)

# Copies and rearrangements.
_COPIES = _named(
    "aten",
    """
    _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long _cast_Short _chunk_cat _conj_copy
    _copy_from _jagged_to_padded_dense_forward _lazy_clone _local_scalar_dense _neg_view_copy _nested_from_padded
    _nested_get_values_copy _pack_padded_sequence _pad_circular _pad_enum _pad_packed_sequence
    _padded_dense_to_jagged_forward _reshape_copy _resize_output _stack _to_copy _to_cpu _unsafe_view alias_copy
    as_strided_copy as_strided_scatter atleast_1d atleast_2d atleast_3d block_diag broadcast_tensors cat
    channel_shuffle column_stack concat concatenate constant_pad_nd copy detach_copy diag diag_embed diagflat
    diagonal_copy diagonal_scatter dstack expand_copy fft_fftshift fft_ifftshift flatten_dense_tensors flip fliplr
    flipud hstack is_nonzero item lift_fresh_copy meshgrid narrow_copy native_channel_shuffle
    nested_to_padded_tensor one_hot pad pad_sequence permute_copy pixel_shuffle pixel_unshuffle reflection_pad1d
    reflection_pad2d reflection_pad3d repeat repeat_interleave replication_pad1d replication_pad2d replication_pad3d
    resize resize_as roll rot90 row_stack select_copy select_scatter slice_copy slice_scatter split_copy
    split_with_sizes_copy squeeze_copy stack t_copy tile to_padded_tensor transpose_copy tril triu type_as
    unbind_copy unflatten_dense_tensors unfold_copy unsafe_chunk unsafe_split unsafe_split_with_sizes unsqueeze_copy
    view_as_complex_copy view_as_real_copy view_copy vstack
    """,
)

# Reading and writing by indices or masks.
_LOOKUPS = _named(
    "aten",
    """
    _embedding_bag _embedding_bag_forward_only _index_put_impl _unsafe_index _unsafe_index_put _unsafe_masked_index
    _unsafe_masked_index_put_accumulate argwhere embedding embedding_bag embedding_renorm gather index index_add
    index_copy index_fill index_put index_reduce index_select masked_scatter masked_select nonzero nonzero_numpy
    nonzero_static put scatter scatter_add scatter_reduce take take_along_dim
    """,
)

# Sorting, searching and counting.
_SORTING = _named(
    "aten",
    """
    _unique _unique2 argsort bincount bucketize histc histogram kthvalue median mode msort nanmedian nanquantile
    quantile searchsorted sort topk unique_consecutive unique_dim unique_dim_consecutive
    """,
)

# Pooling, resampling, and windows of images.
_POOLING = _named(
    "aten",
    """
    _adaptive_avg_pool2d _adaptive_avg_pool3d _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_lanczos2d_aa
    _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d adaptive_avg_pool1d
    adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d avg_pool1d
    avg_pool2d avg_pool3d col2im fractional_max_pool2d fractional_max_pool3d grid_sampler grid_sampler_2d
    grid_sampler_3d im2col max_pool1d max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d
    max_pool3d_with_indices max_unpool2d max_unpool3d upsample_bicubic2d upsample_bilinear2d upsample_linear1d
    upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d
    """,
)

# Conversions between numbers and their quantized form.
_QUANTIZATION = _named(
    "aten",
    """
    _choose_qparams_per_tensor _convert_weight_to_int4pack _convert_weight_to_int4pack_for_cpu
    _dyn_quant_pack_4bit_weight _fake_quantize_learnable_per_channel_affine
    _fake_quantize_learnable_per_tensor_affine _fake_quantize_per_tensor_affine_cachemask_tensor_qparams
    _fused_moving_avg_obs_fq_helper choose_qparams_optimized dequantize fake_quantize_per_channel_affine
    fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine
    fake_quantize_per_tensor_affine_cachemask fused_moving_avg_obs_fake_quant int_repr quantize_per_channel
    quantize_per_tensor quantize_per_tensor_dynamic
    """,
)

# Operators with few operations for each byte that they read and write. On the reference device of `stagepack.partition.costs` fewer than 50
# operations a byte mean that memory sets the time, so their bytes are their cost.
MEMORY_BOUND_OPERATORS: Final = (
    _ELEMENTWISE | _REDUCTIONS | _RANDOM | _FACTORIES | _COPIES | _LOOKUPS | _SORTING | _POOLING | _QUANTIZATION
)


def operator_base_name(operator_name: str) -> str:
    """Return the name that the tables have for an operator."""
    namespace, base_name = operator_name.split(".")[:2]
    if not base_name.startswith("__"):
        base_name = base_name.rstrip("_")
    return f"{namespace}.{base_name}"


def cost_source(operator_name: str) -> CostSource:
    """Return where the cost of the nodes that call an operator comes from."""
    base_name = operator_base_name(operator_name)
    if base_name in FREE_OPERATORS or base_name.partition(".")[0] in _FREE_NAMESPACES:
        return "free"
    if base_name in TORCH_COUNTED_OPERATORS or base_name in FLOP_FORMULAS or base_name in _CONTROL_FLOW:
        return "counted"
    if base_name in MEMORY_BOUND_OPERATORS or base_name.startswith(MEMORY_BOUND_PREFIXES):
        return "memory"
    return "estimated"
