"""The agreement of a stage's graph with the headers of its weight files, and with the weights of other stages (SPEC W7 to W9).

And the agreement of the index of the bundle as a sharded checkpoint with the weights of all stages (SPEC W10).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec.structs import replace

from stagepack.errors import Problem
from stagepack.format.codec import parse_json
from stagepack.format.dtypes import HEADER_DTYPES, ITEM_SIZE, stored_shape
from stagepack.format.graph import Weight
from stagepack.format.manifest import Stage
from stagepack.format.validate.graph import zero_bytes
from stagepack.format.validate.names import INDEX_NAME
from stagepack.format.validate.problems import format_names
from stagepack.format.weights import StoredTensor


class NamedWeights:
    """The weights of the stages that were checked so far, by their names."""

    def __init__(self) -> None:
        self._weights: dict[str, tuple[Weight, str | None]] = {}

    def differing_name(self, weight: Weight, file_name: str | None) -> str | None:
        """Add a weight.

        file_name: the weight file that holds it; None for zeros.
        The result is a name that another weight of an earlier stage has, or the same one in another file; None if there is none.
        """
        stored_weight = (replace(weight, value=""), file_name)
        differing = (name for name in weight.names if self._weights.setdefault(name, stored_weight) != stored_weight)
        return next(differing, None)

    def checkpoint(self) -> dict[str, str]:
        """Return the file of each stored tensor that a checkpoint of the model has (W10)."""
        return {
            weight.stored: file_name
            for weight, file_name in self._weights.values()
            if file_name is not None and weight.base is None and weight.kind in ("parameter", "buffer")
        }


def check_weights(
    weights: Sequence[Weight],
    headers: Iterable[tuple[str, Mapping[str, StoredTensor]]],
    stage: Stage,
    named_weights: NamedWeights,
) -> Iterator[Problem]:
    """Yield the problems of the weights of a stage.

    It yields one problem for each tensor that two files hold, for each weight that does not fit its stored tensor (W7), and for each that
        has the name of another one (W8); and where the manifest states other bytes, or files that the stage does not need (W9).
    """
    stored: dict[str, StoredTensor] = {}
    files: dict[str, str] = {}
    broken_rules: list[tuple[str, str, str]] = []
    for file_name, tensors in headers:
        broken_rules += [
            ("W7", file_name, f"{name[:80]!r} is in another file too")
            for name in sorted(stored.keys() & tensors.keys())
        ]
        stored.update(tensors)
        files.update(dict.fromkeys(tensors, file_name))
    for weight in weights:
        message = _mismatch(weight, stored.get(weight.stored))
        if message is not None:
            broken_rules.append(("W7", stage.graph, message))
        differing_name = named_weights.differing_name(weight, files.get(weight.stored))
        if differing_name is not None:
            message = f"the weight {differing_name[:80]!r} differs from the one of this name in another stage, or is in another file"
            broken_rules.append(("W8", stage.graph, message))
    # What is wrong with a weight makes the sums wrong too.
    broken_rules = broken_rules or [
        ("W9", stage.graph, message) for message in _statement_differences(weights, stored, files, stage)
    ]
    yield from (Problem(rule=rule, where=where, message=message) for rule, where, message in broken_rules)


def check_index(content: bytes, named_weights: NamedWeights) -> Iterator[Problem]:
    """Yield where the index says other than the stages (W10)."""
    fields = parse_json(content, INDEX_NAME)
    stated = fields.get("weight_map") if isinstance(fields, dict) else None
    if not isinstance(stated, dict):
        yield Problem(rule="W10", where=INDEX_NAME, message="expected an object with a weight_map")
        return
    files = named_weights.checkpoint()
    if differing := sorted(name for name in {*stated, *files} if stated.get(name) != files.get(name)):
        message = f"the weight_map has other files than the stages, or none, for {format_names(differing)}"
        yield Problem(rule="W10", where=INDEX_NAME, message=message)


def weight_bytes(weights: Iterable[Weight], stored: Mapping[str, StoredTensor]) -> dict[str, int]:
    """Return the bytes of the stored tensor of each weight, by the name of the stored tensor; those of zeros count too."""
    bytes_of_stored: dict[str, int] = {}
    for weight in weights:
        tensor = stored.get(weight.stored)
        if weight.zeros:
            bytes_of_stored[weight.stored] = zero_bytes(weight)
        elif tensor is not None:
            bytes_of_stored[weight.stored] = tensor.end - tensor.start
    return bytes_of_stored


def _statement_differences(
    weights: Iterable[Weight], stored: Mapping[str, StoredTensor], files: Mapping[str, str], stage: Stage
) -> Iterator[str]:
    """Yield what the manifest states of the weights of a stage that these are not."""
    bytes_of_stored = weight_bytes(weights, stored)
    if (byte_count := sum(bytes_of_stored.values())) != stage.weight_bytes:
        yield f"the manifest counts {stage.weight_bytes} bytes of weights, the graph has {byte_count}"
    needed_files = {files[tensor_name] for tensor_name in bytes_of_stored if tensor_name in files}
    if unneeded := [file_name for file_name in stage.weights if file_name not in needed_files]:
        yield f"the manifest lists the weight files {format_names(unneeded)}, which have no weight of the graph"


def _mismatch(weight: Weight, tensor: StoredTensor | None) -> str | None:
    """The disagreement of a weight with the stored tensor of its name (None: no file has it), or None if they agree."""
    weight_name = weight.names[0][:80]
    if weight.zeros:
        return None if tensor is None else f"the weight {weight_name!r} is all zeros, but a weight file holds it"
    if tensor is None:
        return f"the weight {weight_name!r} is in none of the stage's weight files"
    if weight.base is None:
        expected = (HEADER_DTYPES[weight.dtype], stored_shape(weight.dtype, weight.shape))
        if (tensor.dtype, tensor.shape) != expected:
            shapes = f"{list(weight.shape)}, its file has {tensor.dtype} {list(tensor.shape)}"
            return f"the weight {weight_name!r} is {weight.dtype} {shapes}"
        return None
    strides = weight.strides or ()
    last_element = weight.offset + sum((size - 1) * stride for size, stride in zip(weight.shape, strides, strict=True))
    needed_bytes = 0 if 0 in weight.shape else (last_element + 1) * ITEM_SIZE[weight.dtype]
    if needed_bytes > tensor.end - tensor.start:
        return f"the view {weight_name!r} ends past the last byte of {weight.base[:80]!r}"
    return None
