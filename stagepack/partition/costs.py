"""Estimated costs of the nodes, values and weights of a graph, at the sizes of the example.

Times are those of a reference device, in picoseconds: 50 TFLOP/s, 1 TB/s of memory bandwidth, 2 µs to launch an operator. Once launched,
a node takes as long as the slower of arithmetic and memory (the roofline model: Williams, Waterman, Patterson, 2009,
doi:10.1145/1498765.1498785). Only the proportions of these times, and of those of sending values, decide where a model is cut.

- Formulas for the cost of operators, from the shapes of their tensors: floating-point operations, and bytes that are read repeatedly.
  They cover the operators that torch's own counter (``torch.utils.flop_counter``) does not count. A multiplication and an addition are
  two operations. Terms of lower order, such as the addition of a bias, are left out.
- The times of a profile in the place of estimates.
- The memory of the values that are alive while each node runs.
"""

# Long because a table of formulas, one for each kind of operator.

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from stagepack.errors import CutError
from stagepack.format.example_sizes import example_sizes, value_bytes
from stagepack.format.graph import Graph, Node
from stagepack.graph.analysis import GraphAnalysis
from stagepack.partition.assignment import NodeOrder
from stagepack.partition.profile import Profile, model_digest

_FLOPS_PER_PICOSECOND = 50
_BYTES_PER_PICOSECOND = 1
_LAUNCH_PICOSECONDS = 2_000_000
# 25 GB/s: PCIe 4.0 x16, as measured.
_PICOSECONDS_PER_BYTE_SENT = 40
_PICOSECONDS_PER_VALUE_SENT = 5_000_000
_RECURRENT_LAYERS: Final = "lstm gru rnn_tanh rnn_relu"
_PICOSECONDS = 10**12  # in a second


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkCosts:
    """What it costs to send a value from one device to another, in picoseconds; by default between reference devices.

    Attributes:
        per_value: the latency of a value.
        per_byte: the time of each byte.
    """

    per_value: int = _PICOSECONDS_PER_VALUE_SENT
    per_byte: float = _PICOSECONDS_PER_BYTE_SENT

    def sending_time(self, byte_count: int) -> int:
        """Return the time to send one value.

        byte_count: bytes of the value.
        """
        return round(self.per_value + byte_count * self.per_byte)


REFERENCE_LINK = LinkCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphCosts:
    """The costs of a graph.

    Attributes:
        node_times: time of each node in picoseconds, at least 1.
        value_bytes: bytes of each input of the graph and of each value that a node defines, by name.
        weight_bytes: bytes of the stored tensor of each weight, by the name of its value.
        link: the cost of sending values between stages.
    """

    node_times: tuple[int, ...]
    value_bytes: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    link: LinkCosts = REFERENCE_LINK


def graph_costs(graph: Graph, stored_bytes: Mapping[str, int]) -> GraphCosts:
    """Estimate the costs of a graph.

    stored_bytes: the bytes of each stored tensor, by its name.
    """
    sizes = example_sizes(graph.symbols)
    node_values = (value for node in graph.nodes for value in node.outputs if value is not None)
    return GraphCosts(
        node_times=tuple(map(node_time, graph.nodes)),
        value_bytes={value.name: value_bytes(value, sizes) for value in (*graph.inputs, *node_values)},
        weight_bytes={weight.value: stored_bytes[weight.stored] for weight in graph.weights},
    )


def node_time(node: Node) -> int:
    """Estimate the time of a node."""
    return estimated_time(-(-node.cost.flops // _FLOPS_PER_PICOSECOND), memory_time(node.cost.bytes))


def estimated_time(arithmetic_time: int, memory_time: int) -> int:
    """Return the time of a node that is launched, and then takes as long as the slower of arithmetic and memory.

    arithmetic_time: picoseconds of arithmetic.
    memory_time: picoseconds of reading and writing memory.
    """
    busy_time = max(arithmetic_time, memory_time)
    return _LAUNCH_PICOSECONDS + busy_time if busy_time else 1


def memory_time(byte_count: int) -> int:
    """Estimate the time to read or write memory.

    byte_count: bytes that are read or written.
    """
    return -(-byte_count // _BYTES_PER_PICOSECOND)


def transfer_time(byte_count: int) -> int:
    """Estimate the time that bytes take from one device to another, without the latency of a transfer.

    byte_count: bytes that are sent.
    """
    return byte_count * _PICOSECONDS_PER_BYTE_SENT


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorShape:
    """The sizes of one tensor of a call, at the sizes of the example.

    Attributes:
        sizes: the size of each dimension.
        is_multiplied: whether the dtype is one that operators multiply: floating point, complex, or an integer of 8 bits, as
            quantized tensors have. Indices and masks are not.
        is_weight: whether the tensor is a weight of the model.
        item_size: bytes of one element.
    """

    sizes: tuple[int, ...]
    is_multiplied: bool = True
    is_weight: bool = False
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
    """One call of an operator.

    Attributes:
        arguments: the arguments by parameter name, those that the call leaves out too; a `TensorShape` stands for a tensor, and a
            list of them for a list of tensors.
        results: the tensors that the call returns.
    """

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
    """Estimate the operations of an operator that no formula is known for.

    The estimate is one operation for each element that the operator returns; and where it takes weights that are matrices, as
    a layer does, one product of each weight with each row of the largest activation. Of a weight with three dimensions, such
    as the matrices of several experts, each row meets one matrix.

    The result is the estimated number of floating-point operations, at least 0.
    """
    returned = sum(result.elements for result in call.results if result.is_multiplied)
    multiplied = [tensor for tensor in call.tensors() if tensor.is_multiplied]
    rows = max((tensor.rows for tensor in multiplied if not tensor.is_weight and tensor.elements), default=0)
    weights = [tensor.sizes for tensor in multiplied if tensor.is_weight and len(tensor.sizes) > 1]
    weight_elements = sum(math.prod(sizes[-2:] if len(sizes) == 3 else sizes) for sizes in weights)
    return max(returned, 2 * rows * weight_elements)


def _matrix_product(call: OperatorCall) -> int:
    """Each element of the result is a sum over the last dimension of the first factor, however the second one is packed."""
    factor = call.tensor("self", "input", "inp", "mat1")
    return 2 * call.results[0].elements * factor.last_size


def _added_product(call: OperatorCall) -> int:
    """`addmv` and ``_addmm_activation``: the first factor has a name of its own."""
    return 2 * call.results[0].elements * call.tensor("mat", "mat1").last_size


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
    # Of each layer and direction: input matrix, hidden matrix, two biases if it has any, projection if it has one.
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
    """`cdist`: a difference, a power and an addition for each feature of each pair."""
    return 3 * call.results[0].elements * call.tensor("x1").last_size


def _distances_within(call: OperatorCall) -> int:
    return 3 * call.results[0].elements * call.tensor("self").last_size


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


def _named(namespace: str, formula: FlopFormula, operator_names: str) -> dict[str, FlopFormula]:
    return {f"{namespace}.{operator_name}": formula for operator_name in operator_names.split()}


# Operators by namespace and name, without overload and without the underscore of those that write in place.
# The factors of dense linear algebra are those of Golub and Van Loan, Matrix Computations, 4th edition, chapters 3 to 8.
FLOP_FORMULAS: Final[Mapping[str, FlopFormula]] = {
    **_named(
        "aten",
        _matrix_product,
        "_int_mm _scaled_mm _scaled_mm_v2 _weight_int4pack_mm _weight_int4pack_mm_for_cpu "
        "_weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _mixed_dtypes_linear _dyn_quant_matmul_4bit mv dot vdot "
        "mkldnn_linear fbgemm_linear_int8_weight fbgemm_linear_int8_weight_fp32_activation fbgemm_linear_fp16_weight "
        "fbgemm_linear_fp16_weight_fp32_activation _sparse_semi_structured_mm _sparse_semi_structured_linear",
    ),
    **_named("aten", _added_product, "addmv _addmm_activation"),
    **_named("aten", _added_batch_products, "addbmm"),
    **_named("aten", _grouped_product, "_grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2"),
    **_named("transformers", _grouped_product, "grouped_mm_fallback"),
    **_named("aten", _recurrent_layers, f"{_RECURRENT_LAYERS} quantized_lstm quantized_gru _cudnn_rnn miopen_rnn"),
    **_named("aten", _recurrent_cell, "lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell quantized_lstm_cell"),
    **_named(
        "aten",
        _convolution,
        "_conv_depthwise2d conv_depthwise3d thnn_conv2d slow_conv3d slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d "
        "_convolution_mode mkldnn_convolution cudnn_convolution_relu cudnn_convolution_add_relu miopen_convolution "
        "miopen_convolution_relu miopen_convolution_add_relu miopen_depthwise_convolution _nnpack_spatial_convolution",
    ),
    **_named(
        "aten",
        _transposed_convolution,
        "cudnn_convolution_transpose miopen_convolution_transpose slow_conv_transpose2d slow_conv_transpose3d",
    ),
    **_named("aten", _convolution_over_time, "conv_tbc"),
    **_named("torchvision", _convolution, "deform_conv2d"),
    **_named(
        "aten",
        _attention,
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math "
        "_scaled_dot_product_fused_attention_overrideable _triton_scaled_dot_attention",
    ),
    **_named("higher_order", _attention, "flex_attention"),
    **_named(
        "aten",
        _projected_attention,
        "_native_multi_head_attention _triton_multi_head_attention _transformer_encoder_layer_fwd",
    ),
    **_named("aten", _distances, "cdist _cdist_forward _euclidean_dist"),
    **_named("aten", _distances_within, "pdist _pdist_forward"),
    **_named("aten", _complex_transform, "fft_fft fft_ifft fft_fft2 fft_ifft2 fft_fftn fft_ifftn _fft_c2c"),
    **_named(
        "aten",
        _real_transform,
        "fft_rfft fft_irfft fft_hfft fft_ihfft fft_rfft2 fft_irfft2 fft_hfft2 fft_ihfft2 fft_rfftn fft_irfftn fft_hfftn fft_ihfftn "
        "_fft_r2c _fft_c2r",
    ),
    **_named("aten", _short_time_transform, "stft"),
    **_named("aten", _inverse_short_time_transform, "istft"),
    **_named("aten", _matrix_power, "linalg_matrix_power matrix_power"),
    **_named(
        "aten", _factorization(1), "cholesky linalg_cholesky linalg_cholesky_ex linalg_ldl_factor linalg_ldl_factor_ex"
    ),
    **_named("aten", _linear_system, "linalg_solve linalg_solve_ex _linalg_solve_ex"),
    **_named("aten", _factorized_system, "linalg_lu_solve lu_solve linalg_ldl_solve cholesky_solve"),
    **_named("aten", _triangular_system, "linalg_solve_triangular triangular_solve"),
    **_named(
        "aten",
        _factorization(2),
        "det linalg_det _linalg_det logdet slogdet linalg_slogdet _linalg_slogdet linalg_lu linalg_lu_factor "
        "linalg_lu_factor_ex _lu_with_info",
    ),
    **_named("aten", _factorization(4), "linalg_eigvalsh geqrf linalg_lstsq linalg_householder_product orgqr"),
    **_named("aten", _factorization(6), "inverse linalg_inv linalg_inv_ex cholesky_inverse"),
    **_named("aten", _factorization(8), "qr linalg_qr"),
    **_named("aten", _factorization(12), "linalg_svdvals linalg_matrix_rank linalg_cond"),
    **_named("aten", _factorization(27), "linalg_eigh _linalg_eigh"),
    **_named("aten", _factorization(30), "linalg_eigvals _linalg_eigvals"),
    **_named("aten", _factorization(60), "linalg_matrix_exp matrix_exp"),
    **_named("aten", _factorization(66), "svd linalg_svd _linalg_svd linalg_pinv pinverse"),
    **_named("aten", _factorization(75), "linalg_eig"),
}

# The bytes that operators read again and again, beside one read of each argument.
REPEATED_READS: Final[Mapping[str, Callable[[OperatorCall], int]]] = _named("aten", _recurrent_reads, _RECURRENT_LAYERS)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts:
    """The costs of a graph with measured times.

    Attributes:
        costs: the costs; times that were not measured are estimates times `scale`.
        measured_count: the number of nodes whose time was measured.
        scale: the sum of the measured times divided by the sum of the estimates of the same nodes.
    """

    costs: GraphCosts
    measured_count: int
    scale: float


def measured_costs(graph: Graph, costs: GraphCosts, profile: Profile) -> MeasuredCosts:
    """Replace estimated times of nodes by measured ones, and that of sending values if the profile has it. All other costs stay."""
    found_digest = model_digest(graph)
    if profile.model != found_digest:
        raise CutError(
            f"profile: expected times of this model ({found_digest[:12]}), found those of another one ({profile.model[:12]}): "
            "measure this model with 'stagepack profile'"
        )
    measured_times = {
        node_time.node: max(round(node_time.seconds * _PICOSECONDS), 1)
        for node_time in profile.nodes
        if 0 <= node_time.node < len(graph.nodes)
    }
    if not measured_times and graph.nodes:
        raise CutError("profile: expected the time of at least one node, found none: run 'stagepack profile' again")
    estimated_sum = sum(costs.node_times[node_number] for node_number in measured_times)
    scale = sum(measured_times.values()) / estimated_sum if estimated_sum else 1.0
    node_times = tuple(
        measured_times.get(node_number, max(round(estimate * scale), 1))
        for node_number, estimate in enumerate(costs.node_times)
    )
    return MeasuredCosts(
        costs=replace(costs, node_times=node_times, link=_link_costs(profile)),
        measured_count=len(measured_times),
        scale=scale,
    )


def _link_costs(profile: Profile) -> LinkCosts:
    if profile.link is None:
        return REFERENCE_LINK
    return LinkCosts(
        per_value=round(profile.link.seconds_per_value * _PICOSECONDS),
        per_byte=profile.link.seconds_per_byte * _PICOSECONDS,
    )


def activation_bytes(analysis: GraphAnalysis, costs: GraphCosts, order: NodeOrder) -> list[int]:
    """Compute the memory of the values that are alive while each node runs.

    Values that may share memory count once, with the largest of them; weights do not count.
    """
    graph, representative = analysis.graph, analysis.alias_classes.representative
    births = [(0, value.name) for value in graph.inputs]
    last_uses: dict[str, int] = {}
    for position, node_number in enumerate(order.node_numbers):
        births += ((position, value_name) for value_name in analysis.node_outputs[node_number])
        for value_name in analysis.node_inputs[node_number]:
            last_uses[value_name] = position
    last_uses |= dict.fromkeys(graph.outputs, len(graph.nodes))
    first_position: dict[str, int] = {}
    last_position: dict[str, int] = {}
    memory_bytes: dict[str, int] = {}
    for position, value_name in births:
        memory = representative(value_name)
        if memory not in costs.weight_bytes:
            first_position.setdefault(memory, position)
            last_position[memory] = max(last_uses.get(value_name, position), last_position.get(memory, 0))
            memory_bytes[memory] = max(costs.value_bytes[value_name], memory_bytes.get(memory, 0))
    changes = [0] * (len(graph.nodes) + 2)
    for memory, position in first_position.items():
        changes[position] += memory_bytes[memory]
        changes[last_position[memory] + 1] -= memory_bytes[memory]
    return list(itertools.accumulate(changes[: len(graph.nodes)]))
