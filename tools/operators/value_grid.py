"""Calls of operators, and the grid of values at which two runtimes are compared on them.

The calls are those of the samples of torch's own tests, in each dtype that torch takes, with each number of a grid in the place of the
scalars. An elementwise operator gets each combination of the grid; all others get tensors of the shapes of the sample, of six profiles.
"""

import functools
import itertools
import math
import random
from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, Final

import torch

from stagepack.format.operators import RUN_BY_DEFAULT, is_random_operator, operator_verdict
from stagepack.torch_internals import OperatorOverload, operator_schema, tree_flatten, tree_unflatten
from tools.operators.hostile_arguments import Call, bind
from tools.operators.valid_calls import find_operator

FLOATS: Final = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS: Final = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
TYPES: Final = (*FLOATS, *INTEGERS, torch.bool, torch.complex64)
# The operator that casts, and the further types that it is compared for.
CAST: Final = "aten._to_copy.default"
FLOATS_OF_8_BITS: Final = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
CAST_TYPES: Final = (*FLOATS_OF_8_BITS, torch.uint16, torch.uint32, torch.uint64)
# The type in which the values of others are written, by whether these are floats, and complex.
_WIDEST: Final = {(True, False): torch.float64, (False, False): torch.int64, (False, True): torch.complex128}
_MIXED: Final = (
    (torch.float32, torch.int64),
    (torch.int64, torch.float32),
    (torch.int32, torch.int64),
    (torch.uint8, torch.int8),
    (torch.float16, torch.float32),
)
_NUMBERS: Final = (0, 1, -1, 2, -2, 3, 0.5, 1.5, 2.5, 5, 7, 0.1, 1e-4, 30, 100, 1e4)
_FEW: Final = (0.0, -0.0, 0.5, 1.0, -1.5, 3.0, -30.0, 1e4, math.inf, -math.inf, math.nan)
_SCALARS: Final = (0, -0.0, 1, -1, 2, 3, -2, 0.5, 0.1, -2.5, 30.0, math.inf, -math.inf, math.nan)
_FEW_SCALARS: Final = (0, -1, 2, 0.5, math.inf)
_TRIALS: Final = 12
_LARGE_PROFILE: Final = 4
_CALLS_OF_DTYPE: Final = {torch.float32: 8, torch.int64: 3}
_CALLS_OF_OTHERS: Final = 1
_MAX_ELEMENTS: Final = 512
# Without the tag of elementwise operators in torch 2.13.
_ELEMENTWISE: Final = frozenset({"floor_divide", "hardswish", "log_sigmoid", "_to_copy", "to", "type_as"})
_NOT_ELEMENTWISE_PRIMS: Final = frozenset({"broadcast_in_dim", "reshape", "squeeze", "sum", "transpose", "var"})
# Operators that draw only with a chance that their calls do not give.
_MAY_DRAW: Final = ("scaled_dot_product", "_scaled_dot_product", "lstm", "gru", "rnn_")
_UNDEFINED: Final = ("empty", "resize", "rand", "dropout", "bernoulli", "multinomial", "normal", "poisson", "rrelu")


@dataclass(frozen=True, slots=True)
class ValueCall:
    """A call with fixed scalars and types; its tensors are inputs."""

    operator_name: str
    # Name of each argument, the structure and the leaves of all arguments; a tensor is an example.
    names: tuple[str, ...]
    leaves: tuple[Any, ...]
    structure: Any

    @property
    def operator(self) -> OperatorOverload:
        """The operator."""
        return find_operator(self.operator_name)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of the example."""
        return [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor)]

    @property
    def types(self) -> tuple[torch.dtype, ...]:
        """The dtypes of the tensors."""
        return tuple(tensor.dtype for tensor in self.tensors)

    @property
    def is_elementwise(self) -> bool:
        """Whether the values of each element decide that of the result."""
        namespace, packet_name, _ = self.operator_name.split(".")
        if namespace == "prims":
            return packet_name not in _NOT_ELEMENTWISE_PRIMS
        return torch.Tag.pointwise in self.operator.tags or packet_name in _ELEMENTWISE

    def __call__(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Call the operator with other tensors."""
        remaining = iter(tensors)
        leaves = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.leaves]
        return self.operator(**dict(zip(self.names, tree_unflatten(leaves, self.structure), strict=True)))

    def __str__(self) -> str:
        parts = [
            f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}"
            if isinstance(leaf, torch.Tensor)
            else str(leaf)
            for leaf in self.leaves
            if leaf is not None
        ]
        return f"{self.operator_name}({', '.join(parts)})"


def is_swept(operator_name: str) -> bool:
    """Whether a bundle may call an operator whose answer is defined, and which writes nothing."""
    verdict = operator_verdict(operator_name)
    packet_name = operator_name.split(".")[1]
    may_draw = is_random_operator(operator_name) and not packet_name.startswith(_MAY_DRAW)
    if verdict not in RUN_BY_DEFAULT or may_draw:
        return False
    operator = find_operator(operator_name)
    return not operator_schema(operator).is_mutable and not any(word in packet_name for word in _UNDEFINED)


def value_calls(
    operator_name: str, samples: Sequence[Call], dtypes: AbstractSet[torch.dtype] = frozenset(TYPES)
) -> list[ValueCall]:
    """Return the calls of an operator that are compared: those that torch can make."""
    calls: dict[str, ValueCall] = {}
    counts: dict[Any, int] = {}
    for sample in samples:
        for call in _variants(operator_name, sample):
            types = call.types
            if (
                not types
                or types[0] not in dtypes
                or (operator_name != CAST and counts.get(types, 0) >= _CALLS_OF_DTYPE.get(types[0], _CALLS_OF_OTHERS))
            ):
                continue
            kind = (
                f"{call.operator_name} {types} {[leaf for leaf in call.leaves if not isinstance(leaf, torch.Tensor)]}"
            )
            if str(call) in calls or counts.get(kind, 0) > 1 or not _works(call):
                continue
            for counted in (types, kind):
                counts[counted] = counts.get(counted, 0) + 1
            calls[str(call)] = call
    return sorted(calls.values(), key=lambda call: str(call.types))


def _variants(operator_name: str, sample: Call) -> Iterator[ValueCall]:
    """A sample in each dtype, and with other scalars."""
    leaves, structure = tree_flatten(list(sample.values()))
    call = ValueCall(operator_name, tuple(sample), tuple(leaves), structure)
    tensors = call.tensors
    if any(tensor.numel() > _MAX_ELEMENTS for tensor in tensors):
        return
    if any(tensor.is_quantized or tensor.layout != torch.strided for tensor in tensors):
        return
    if call.is_elementwise:
        yield from _elementwise_variants(call)
        return
    are_wide = [tensor.is_floating_point() or tensor.is_complex() for tensor in tensors]
    for dtype in TYPES if any(are_wide) else (None,):
        yield _retyped(call, [dtype if is_wide else None for is_wide in are_wide])


def _elementwise_variants(call: ValueCall) -> Iterator[ValueCall]:
    tensors = call.tensors
    mixed = [types for types in _MIXED if len(tensors) == 2]
    # A mask stays one beside tensors of other types.
    are_masks = [tensor.dtype == torch.bool for tensor in tensors]
    are_masks = [is_mask and not all(are_masks) for is_mask in are_masks]
    alike = [[torch.bool if is_mask else dtype for is_mask in are_masks] for dtype in TYPES]
    for types in (*alike, *mixed):
        flat = _retyped(call, list(types), size=len(_grid_columns(tuple(types))[0]))
        yield flat
        is_usual = list(types) in ([torch.float32], [torch.int64]) and len(tensors) == 1
        for position, leaf in enumerate(call.leaves):
            if type(leaf) in (int, float) and _takes_any_number(call, position):
                for scalar in _SCALARS if is_usual else _FEW_SCALARS:
                    changed = list(flat.leaves)
                    changed[position] = scalar
                    yield ValueCall(call.operator_name, call.names, tuple(changed), call.structure)


def _takes_any_number(call: ValueCall, position: int) -> bool:
    """Whether an argument without a nested list is a number of any kind."""
    if len(call.leaves) != len(call.names):
        return False
    parameter = next(
        argument for argument in operator_schema(call.operator).arguments if argument.name == call.names[position]
    )
    return any(word in str(parameter.type) for word in ("number", "float", "Scalar"))


def _retyped(call: ValueCall, dtypes: Sequence[torch.dtype | None], size: int | None = None) -> ValueCall:
    remaining = iter(dtypes)
    leaves = []
    for leaf in call.leaves:
        if isinstance(leaf, torch.Tensor):
            dtype = next(remaining) or leaf.dtype
            leaves.append(leaf.detach().to(dtype).contiguous() if size is None else torch.ones(size, dtype=dtype))
        else:
            leaves.append(leaf)
    return ValueCall(call.operator_name, call.names, tuple(leaves), call.structure)


def _works(call: ValueCall) -> bool:
    try:
        first, second = (results(call, call.tensors) for _ in range(2))
    except Exception:  # noqa: BLE001 - operators raise any class
        return False
    # Memory that nothing has written.
    return bool(first) and all(map(_are_same, first, second))


def _are_same(first: torch.Tensor, second: torch.Tensor) -> bool:
    if first.dtype in CAST_TYPES:
        first, second = first.to(torch.float32), second.to(torch.float32)
    first, second = parts(first), parts(second)
    return torch.equal(first.nan_to_num(), second.nan_to_num()) if first.dtype in TYPES else False


def parts(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor, or one of the real and imaginary parts of complex numbers."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def results(call: ValueCall, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that a call in torch returns."""
    with torch.no_grad():
        leaves, _ = tree_flatten(call([tensor.clone() for tensor in tensors]))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def trials(call: ValueCall) -> Iterator[list[torch.Tensor]]:
    """Yield the tensors of the calls that are compared."""
    if call.is_elementwise:
        columns = _grid_columns(call.types)
        is_truncated = "trunc" in call.leaves or call.operator_name == "prims.div.default"
        if is_truncated and not columns[0].is_floating_point():
            # The smallest integer divided by -1 ends the process of torch 2.13 by SIGFPE.
            columns = [torch.where(columns[0] < -100, columns[0] | 1, columns[0]), *columns[1:]]
        yield columns
        if len(columns) == 2 and not columns[1].is_floating_point():
            # A division by 0 raises, and leaves the other values out.
            yield [columns[0], torch.where(columns[1] == 0, 1, columns[1].to(torch.int64)).to(columns[1].dtype)]
        return
    yield call.tensors
    for trial in range(_TRIALS):
        generator = random.Random(f"{call.operator_name} {trial}")  # noqa: S311
        filled = [_filled(tensor, trial, generator) for tensor in call.tensors]
        if trial % 6 == _LARGE_PROFILE and "scaled_dot_product" in call.operator_name:
            # The scores are exponents: the rounding of 1e8 is a factor of 3,000.
            filled = [tensor.clamp(-50, 50) for tensor in filled]
        if "repeat_interleave" in call.operator_name:
            # The sum of the largest integers ends the process of torch 2.13 by SIGSEGV.
            filled = [tensor if tensor.is_floating_point() else tensor.clamp(max=100) for tensor in filled]
        yield filled


@functools.cache
def _grid_columns(types: tuple[torch.dtype, ...]) -> list[torch.Tensor]:
    """Each combination of the values of some dtypes."""
    values = [grid(dtype) if len(types) <= 2 else _few(dtype) for dtype in types]
    if len(types) > 3:
        values = [column if position < 3 else column[3:4] for position, column in enumerate(values)]
    columns = zip(*itertools.product(*values), strict=True)
    return [
        torch.tensor(column, dtype=_WIDEST[dtype.is_floating_point, dtype.is_complex]).to(dtype)
        for column, dtype in zip(columns, types, strict=True)
    ]


def grid(dtype: torch.dtype) -> list[Any]:
    """Return the values of a dtype at which operators are compared."""
    if dtype == torch.bool:
        return [0, 1]
    if dtype.is_complex:
        return [complex(*pair) for pair in itertools.product((*_FEW, 1e-30, 1e25), repeat=2)]
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        edges = [limits.min, limits.min + 1, limits.max - 1, limits.max]
        return [*(n for n in (0, 1, -1, 2, -2, 3, 5, 7, -7, 30, -30, 100) if n >= limits.min), *dict.fromkeys(edges)]
    info = torch.finfo(dtype)
    positive = [0.0, info.smallest_normal / 4, info.tiny, *(n for n in _NUMBERS if n > 0), info.max, math.inf]
    return [*positive, *(-n for n in positive), math.nan]


def _few(dtype: torch.dtype) -> list[Any]:
    if dtype.is_complex:
        return [complex(real, imaginary) for real in _FEW[1:4] for imaginary in (0.0, -2.0, math.inf, math.nan)]
    if dtype.is_floating_point:
        return list(_FEW)
    return (
        [n for n in grid(dtype) if abs(n) < 8 or n in (torch.iinfo(dtype).max, torch.iinfo(dtype).min)]
        if dtype != torch.bool
        else [0, 1]
    )


def _filled(tensor: torch.Tensor, trial: int, generator: random.Random) -> torch.Tensor:
    """A tensor of the same shape with values of a profile."""
    if tensor.is_complex():
        pairs = _filled(torch.empty(*tensor.shape, 2), trial, generator)
        return torch.view_as_complex(pairs).to(tensor.dtype)
    if not tensor.is_floating_point():
        return _filled_integers(tensor, trial, generator)
    profile = trial % 6
    usual = [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, 3.0, 1e-4, -7.0, 30.0, -30.0]
    values = [
        generator.choice(usual) if generator.random() < 0.5 else generator.uniform(-2, 2) for _ in range(tensor.numel())
    ]
    special = {
        1: [math.nan],
        2: [math.inf],
        3: [-math.inf],
        4: [1e4, -1e4, 1000.0, -1000.0],
        5: [math.inf, -math.inf, math.nan],
    }
    if tensor.dtype == torch.float16:
        # Products of larger numbers overflow in one runtime and not in the other, which rounds later.
        special[4] = [50.0, -50.0]
    for position in range(len(values)):
        if profile and generator.random() < (0.15 if profile < 4 else 0.4):
            values[position] = generator.choice(special[profile])
    if trial == 6:
        values = [-0.0] * len(values)
    if trial == 7:
        values = [generator.choice([0.0, -0.0, torch.finfo(tensor.dtype).tiny / 4]) for _ in values]
    return torch.tensor(values, dtype=torch.float64).reshape(tensor.shape).to(tensor.dtype)


def _filled_integers(tensor: torch.Tensor, trial: int, generator: random.Random) -> torch.Tensor:
    if tensor.dtype != torch.bool and trial % 3 == 0:
        return tensor
    # Repeated indices, negative ones, and the values of the grid where they are no indices.
    choices: list[list[float | int]] = [[0, 1, 1, 2], [0, -1, 1, -2], grid(tensor.dtype)]
    if tensor.dtype == torch.bool:
        choices = [[0, 1], [0], [1]]
    values = [generator.choice(choices[trial // 3 % 3]) for _ in range(tensor.numel())]
    return torch.tensor(values, dtype=torch.int64).reshape(tensor.shape).to(tensor.dtype)


def bound_call(operator_name: str, *args: Any, **kwargs: Any) -> ValueCall:
    """Return a call with examples of its tensors; a dtype stands for a tensor of the grid, of an elementwise operator."""
    grids = iter(_grid_columns(tuple(arg for arg in args if isinstance(arg, torch.dtype))))
    filled = [torch.ones_like(next(grids)) if isinstance(arg, torch.dtype) else arg for arg in args]
    arguments = bind(find_operator(operator_name), filled, kwargs)
    leaves, structure = tree_flatten(list(arguments.values()))
    return ValueCall(operator_name, tuple(arguments), tuple(leaves), structure)
