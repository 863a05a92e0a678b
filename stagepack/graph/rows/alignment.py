"""Rules for operators that broadcast their arguments, or multiply and sum over named dimensions."""

from collections.abc import Callable, Iterable, Sequence

from stagepack.graph.rows.call import NodeCall, Tracked
from stagepack.graph.rows.layout import BY_POSITION, INSIDE, ONE, PAIRS, UNKNOWN, Rows, RowsMeetError

# The rows of all results, or of each.
Rule = Callable[[NodeCall], Rows | list[Rows | None] | None]
# The rows of all results.
SharedRule = Callable[[NodeCall], Rows | None]


def broadcast_rows(operands: Iterable[Tracked], lead_rank: int, core_rank: int = 0) -> Rows | None:
    """The rows of a result whose leading dimensions are the operands' dimensions, aligned from the right as torch broadcasts them."""
    placed: list[Rows] = []
    shared: list[Tracked] = []
    for operand in operands:
        own_lead_rank = operand.rank - core_rank
        if operand.rows is None:
            shared.append(operand)
        elif operand.rows.dim >= own_lead_rank:
            raise RowsMeetError(INSIDE)
        else:
            placed.append(operand.rows.at(lead_rank - own_lead_rank + operand.rows.dim))
    if not placed:
        return None
    rows = same_rows(placed)
    for operand in shared:
        dim = rows.dim - (lead_rank - (operand.rank - core_rank))
        if 0 <= dim < operand.rank - core_rank and operand.shape[dim] != ONE:
            raise RowsMeetError(BY_POSITION)
    return rows


def same_rows(placed: Sequence[Rows]) -> Rows:
    """The rows that all operands have at the same place."""
    if any(rows != placed[0] for rows in placed):
        raise RowsMeetError(PAIRS)
    return placed[0]


def elementwise(call: NodeCall) -> Rows | None:
    """Each element of the result is computed from the elements at its position."""
    return broadcast_rows((value for _, value in call.all_tensors()), len(call.shape))


def unreduced_loss(call: NodeCall) -> Rows | None:
    """A loss; with a reduction it is one number of all rows."""
    if call.option("reduction") != 0:
        return reduced_to_nothing(call)
    return elementwise(call)


def reduced_to_nothing(call: NodeCall) -> Rows | None:
    """One result is computed from all elements."""
    if any(value.rows is not None for _, value in call.all_tensors()):
        raise RowsMeetError(INSIDE)
    return None


def trailing(core_rank: int, *parameters: str) -> SharedRule:
    """The last dimensions are computed together, and the dimensions before them apart. Other tensors are shared by all rows."""
    operand_names = parameters or ("self", "input")

    def rule(call: NodeCall) -> Rows | None:
        call.need_shared(*operand_names)
        operands = call.tensors(*operand_names)
        return broadcast_rows(operands, max((value.rank - core_rank for value in operands), default=0), core_rank)

    return rule


def normalized(call: NodeCall) -> Rows | None:
    """The last dimensions, as many as ``normalized_shape`` has, are computed together."""
    return trailing(len(call.numbers("normalized_shape") or ()), "input")(call)


def attention(call: NodeCall) -> Rows | None:
    """Scaled dot product attention: the last two dimensions are computed together."""
    return trailing(2, "query", "key", "value", "attn_mask", "attn_bias")(call)


def leading(*parameters: str) -> SharedRule:
    """Each item along dimension 0 is computed by itself. Other tensors are shared by all rows."""
    operand_names = parameters or ("self", "input")

    def rule(call: NodeCall) -> Rows | None:
        call.need_shared(*operand_names)
        operands = call.tensors(*operand_names)
        placed = [value.rows for value in operands if value.rows is not None]
        if not placed:
            return None
        rows = same_rows(placed)
        if rows.dim != 0:
            raise RowsMeetError(INSIDE)
        if len(placed) < len(operands):
            raise RowsMeetError(BY_POSITION)
        return rows

    return rule


def convolution(call: NodeCall) -> Rows | None:
    """A convolution of a batch; an input without a batch dimension begins with its channels."""
    data = call.tensor("input", "self")
    if data.rows is not None and data.rank != call.tensor("weight").rank:
        raise RowsMeetError(INSIDE)
    return leading()(call)


def contracted(operands: Sequence[tuple[Tracked, str]], result: str) -> Rows | None:
    """The rows of a product whose dimensions have letters, as in ``einsum``; letters that the result lacks are summed over."""
    placed: list[tuple[str, Rows]] = []
    for operand, letters in operands:
        if operand.rows is not None:
            letter = letters[operand.rows.dim]
            if letters.count(letter) > 1 or result.count(letter) > 1:
                raise RowsMeetError(PAIRS)
            placed.append((letter, operand.rows.at(0)))
    if not placed:
        return None
    if len({letter for letter, _ in placed}) > 1:
        raise RowsMeetError(PAIRS)
    letter, rows = placed[0][0], same_rows([rows for _, rows in placed])
    if letter not in result:
        raise RowsMeetError("sums over the rows")
    for operand, letters in operands:
        if operand.rows is None and letter in letters and operand.shape[letters.index(letter)] != ONE:
            raise RowsMeetError(BY_POSITION)
    return rows.at(result.index(letter))


def product_of(equation: str, *parameters: str, added: str = "") -> SharedRule:
    """A product of tensors whose dimensions have these letters, plus a tensor that is broadcast to it."""
    inputs, _, result = equation.partition("->")
    letters = inputs.split(",")

    def rule(call: NodeCall) -> Rows | None:
        operands = [call.tensor(parameter) for parameter in parameters]
        call.need_shared(*parameters, added)
        if any(operand.rank != len(own) for operand, own in zip(operands, letters, strict=True)):
            raise RowsMeetError(UNKNOWN)
        rows = contracted(list(zip(operands, letters, strict=True)), result)
        return _with_added(call, rows, call.tensors(added))

    return rule


def _with_added(call: NodeCall, rows: Rows | None, added: Sequence[Tracked]) -> Rows | None:
    """The rows of a sum with tensors that are broadcast to the result."""
    product = Tracked("", call.shape, rows)
    return broadcast_rows([product, *added], product.rank) if added else rows


def linear(call: NodeCall) -> Rows | None:
    """``input @ weight.T + bias``."""
    data, weight = call.tensor("input"), call.tensor("weight")
    lead = _letters(data.rank - 1)
    rows = contracted([(data, lead + "k"), (weight, "ok"[-weight.rank :])], lead + "o"[: weight.rank - 1])
    return _with_added(call, rows, call.tensors("bias"))


def matmul(call: NodeCall) -> Rows | None:
    """``torch.matmul``: vectors, matrices, or batches of matrices whose leading dimensions are broadcast."""
    left, right = call.tensor("self"), call.tensor("other")
    lead = _letters(max(left.rank, right.rank, 2) - 2)
    left_letters = "k" if left.rank == 1 else lead[len(lead) - (left.rank - 2) :] + "mk"
    right_letters = "k" if right.rank == 1 else lead[len(lead) - (right.rank - 2) :] + "kn"
    result = lead + "m" * (left.rank > 1) + "n" * (right.rank > 1)
    return contracted([(left, left_letters), (right, right_letters)], result)


def einsum(call: NodeCall) -> Rows | None:
    """``torch.einsum``, whose ellipsis stands for dimensions that are aligned from the right."""
    operands = call.tensors("tensors")
    inputs, arrow, result = str(call.option("equation")).replace(" ", "").partition("->")
    specs = inputs.split(",")
    if len(specs) != len(operands):
        raise RowsMeetError(UNKNOWN)
    ranks = [operand.rank - len(spec.replace("...", "")) for operand, spec in zip(operands, specs, strict=True)]
    lead = _letters(max(ranks, default=0))
    letters = [spec.replace("...", lead[len(lead) - rank :]) for spec, rank in zip(specs, ranks, strict=True)]
    if not arrow:
        used = inputs.replace("...", "").replace(",", "")
        result = "..." + "".join(sorted(letter for letter in set(used) if used.count(letter) == 1))
    return contracted(list(zip(operands, letters, strict=True)), result.replace("...", lead))


def tensordot(call: NodeCall) -> Rows | None:
    """``torch.tensordot``: the listed dimensions are summed over."""
    left, right = call.tensor("self"), call.tensor("other")
    left_letters, right_letters = list(_letters(left.rank)), list(_letters(left.rank + right.rank)[left.rank :])
    pairs = list(zip(call.axes("dims_self", left.rank), call.axes("dims_other", right.rank), strict=True))
    kept_letters = [letter for dim, letter in enumerate(left_letters) if dim not in {dim for dim, _ in pairs}]
    kept_letters += [letter for dim, letter in enumerate(right_letters) if dim not in {dim for _, dim in pairs}]
    for left_dim, right_dim in pairs:
        right_letters[right_dim] = left_letters[left_dim]
    return contracted([(left, "".join(left_letters)), (right, "".join(right_letters))], "".join(kept_letters))


def bilinear(call: NodeCall) -> Rows | None:
    """``torch.bilinear``: the leading dimensions of both inputs are the same."""
    return trailing(1, "input1", "input2")(call)


def _letters(count: int) -> str:
    """Letters that no equation has."""
    return "".join(chr(0x100 + letter_index) for letter_index in range(count))
