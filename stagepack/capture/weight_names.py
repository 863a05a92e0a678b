"""The names of weights in a checkpoint and in a model, which may differ by a prefix."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

from stagepack.errors import CaptureError

_Tensor = TypeVar("_Tensor")

# Names and prefixes in an error message; the other ones are counted.
_SHOWN = 3
# Before all names in a checkpoint of PEFT.
_ADAPTER_PREFIX = "base_model.model."


def tensors_by_weight_name(
    tensors: Mapping[str, _Tensor], weights: Collection[Collection[str]], source: str
) -> Mapping[str, _Tensor]:
    """Return the tensors of a checkpoint by the names that they have in a model.

    A checkpoint may have more than the model, such as ``{"model": ..., "optimizer": ...}``: the tensors of the model are returned, without
    the prefix that their names have. The model may be in a wrapper, so that all its names have a prefix: the tensors get it.
    """
    if not weights or _has_all(tensors, weights):
        return tensors
    weight_names = {weight_name for weight_names in weights for weight_name in weight_names}
    for prefix in _prefixes(weight_names, tensors):
        prefixed = {prefix + tensor_name: tensor for tensor_name, tensor in tensors.items()}
        if _has_all(prefixed, weights):
            return prefixed
    if not weight_names.isdisjoint(tensors):
        return tensors
    counts = _prefixes(tensors, weight_names)
    most = max(counts.values(), default=0)
    prefixes = [prefix for prefix, count in counts.items() if count == most]
    if not prefixes:
        return tensors
    if len(prefixes) > 1:
        raise CaptureError(
            f"{source}: has the weights of the model {len(prefixes)} times: {shown([f'{prefix}*' for prefix in prefixes])}: "
            "pass a checkpoint that has them once"
        )
    return {
        tensor_name.removeprefix(prefixes[0]): tensor
        for tensor_name, tensor in tensors.items()
        if tensor_name.startswith(prefixes[0])
    }


def _has_all(tensors: Mapping[str, object], weights: Iterable[Collection[str]]) -> bool:
    return all(any(weight_name in tensors for weight_name in weight_names) for weight_names in weights)


def _prefixes(long_names: Iterable[str], short_names: Collection[str]) -> Counter[str]:
    """How many long names are a short name behind a prefix that ends with a dot, by prefix."""
    counts: Counter[str] = Counter()
    for long_name in long_names:
        dot = long_name.find(".")
        while dot >= 0:
            if long_name[dot + 1 :] in short_names:
                counts[long_name[: dot + 1]] += 1
            dot = long_name.find(".", dot + 1)
    return counts


def name_problems(missing: Collection[str], unknown: Collection[str], model: str) -> list[str]:
    """Return how the names in a checkpoint differ from those in a model, and the prefix with which more of them would fit."""
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {shown(missing)}")
    if unknown:
        problems.append(f"{model} lacks {shown(unknown)}")
    for change, counts in (
        ("with {!r} before", _prefixes(missing, set(unknown))),
        ("without {!r} before", _prefixes(unknown, set(missing))),
    ):
        for prefix, count in counts.most_common(1):
            problems.append(
                f"{change.format(prefix)} the names in the checkpoint, {count} of the {len(missing)} would fit"
            )
    if any(weight_name.startswith(_ADAPTER_PREFIX) for weight_name in unknown):
        problems.append("the checkpoint is of an adapter of PEFT: give the folder of the adapter, which is then merged")
    return problems


def shown(texts: Collection[str], separator: str = ", ") -> str:
    """Return some of the texts, and how many there are besides."""
    first_texts = separator.join(list(texts)[:_SHOWN])
    return f"{first_texts} and {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else first_texts
