"""A function that makes a module, and a checkpoint of its weights -> the module with these weights, which stay in the checkpoint."""

import contextlib
import math
import mmap
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
from torch.nn.modules.module import register_module_parameter_registration_hook

from stagepack.capture.checkpoint import CheckpointTensor, DeferredTensors, read_checkpoint
from stagepack.errors import CaptureError
from stagepack.format.name_prefixes import name_prefixes
from stagepack.torch_internals import FakeTensor, TorchDispatchMode, tree_leaves, tree_map_tensors

Made = TypeVar("Made")
# Tensors of this size and more are mapped one by one, in bytes.
_MIN_MAPPED_BYTES = 2**20
_Tensor = TypeVar("_Tensor")
# Names and prefixes in an error message; the other ones are counted.
_SHOWN = 3
# Before all names in a checkpoint of PEFT.
_ADAPTER_PREFIX = "base_model.model."


@contextlib.contextmanager
def _parameters_without_data(deferred: DeferredTensors) -> Iterator[list["weakref.ref[torch.Tensor]"]]:
    """Replace each parameter by one without data as soon as a module gets it. Buffers keep their data."""
    replaced: list[weakref.ref[torch.Tensor]] = []

    def replace_parameter(_: torch.nn.Module, __: str, parameter: torch.nn.Parameter | None) -> Any:
        is_plain = type(parameter) is torch.nn.Parameter and parameter.device.type == "cpu"
        if parameter is None or not is_plain:
            return None
        replaced.append(weakref.ref(parameter))
        return deferred.replace(parameter)

    hook = register_module_parameter_registration_hook(replace_parameter)
    try:
        with _ConstructionMode():
            yield replaced
    finally:
        hook.remove()


class _ConstructionMode(TorchDispatchMode):
    """Bounds the memory of a constructor whose parameters lose their data, and keeps the random numbers that it draws.

    Large empty tensors have memory of their own, which the operating system gets back with each of them: on the heap, small objects made
    between them would keep it. The random numbers of tensors without data are drawn, too, so that those after them are what they are with
    data.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        # Used again and again, for the same reason.
        self._memory = torch.empty(0, dtype=torch.uint8)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.empty.memory_format:
            return _mapped_empty(func, args, kwargs)
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_random and any(isinstance(leaf, FakeTensor) for leaf in tree_leaves((args, dict(kwargs)))):
            real_args, real_kwargs = tree_map_tensors(self._with_data, (args, dict(kwargs)))
            func(*real_args, **real_kwargs)
        return func(*args, **kwargs)

    def _with_data(self, tensor: torch.Tensor) -> torch.Tensor:
        """Any data for a tensor without."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        byte_count = tensor.untyped_storage().nbytes()
        if len(self._memory) < byte_count:
            self._memory = torch.empty(byte_count, dtype=torch.uint8)
        elements = self._memory[:byte_count].view(tensor.dtype)
        return elements.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _mapped_empty(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    """``torch.empty``; a large tensor of the CPU in a mapping of its own."""
    options = {name: option for name, option in kwargs.items() if option is not None and option is not False}
    dtype = options.get("dtype", torch.get_default_dtype())
    byte_count = math.prod(args[0]) * dtype.itemsize
    is_plain = options.keys() <= {"dtype", "device"} and torch.device(options.get("device", "cpu")).type == "cpu"
    if byte_count < _MIN_MAPPED_BYTES or not is_plain:
        return func(*args, **kwargs)  # type: ignore[no-any-return]
    return torch.frombuffer(mmap.mmap(-1, byte_count), dtype=dtype).view(args[0])


def make_with_checkpoint(
    make_model: Callable[[], Made], module_of: Callable[[Made], torch.nn.Module], path: str | os.PathLike[str]
) -> tuple[Made, DeferredTensors | None]:
    """Make a module with the weights of a checkpoint; also return where its parameters are deferred, None if they are in memory.

    Where `make_model` needs the data of its parameters, it is called a second time, with data.
    """
    tensors = read_checkpoint(path)
    deferred = DeferredTensors()
    random_state = torch.get_rng_state()
    with contextlib.suppress(_MadeWithoutDataError):
        made = _make_without_data(make_model, deferred)
        _load(module_of(made), tensors, os.fspath(path), deferred)
        if all(tensor in deferred for tensor in _tensors_without_data(module_of(made))):
            return made, deferred
    torch.set_rng_state(random_state)
    made = make_model()
    _load(module_of(made), tensors, os.fspath(path), None)
    return made, None


class _MadeWithoutDataError(Exception):
    """A module cannot be made without data; what is wrong with it, its user is told when it is made with data."""


def _make_without_data(make_model: Callable[[], Made], deferred: DeferredTensors) -> Made:
    try:
        with _parameters_without_data(deferred) as replaced:
            made = make_model()
    except Exception as error:
        raise _MadeWithoutDataError from error
    # A parameter in a list of the module is not replaced, and would keep its first data.
    if any(parameter() is not None for parameter in replaced):
        raise _MadeWithoutDataError
    return made


def _tensors_without_data(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    # Parameters and buffers are in dicts among the attributes.
    for submodule in module.modules():
        for leaf in tree_leaves(vars(submodule)):
            if isinstance(leaf, FakeTensor):
                yield leaf


def _load(
    module: torch.nn.Module, tensors: Mapping[str, CheckpointTensor], source: str, deferred: DeferredTensors | None
) -> None:
    """Give a module the tensors of a checkpoint, as ``load_state_dict`` does."""
    state: dict[str, torch.Tensor] = {
        weight_name: tensor
        for weight_name, tensor in module.state_dict(keep_vars=True).items()
        if isinstance(tensor, torch.Tensor)
    }
    # A checkpoint needs only one of several tied weights.
    names_of_weight: dict[int, list[str]] = {}
    for weight_name, tensor in state.items():
        names_of_weight.setdefault(id(tensor), []).append(weight_name)
    tensors = tensors_by_weight_name(tensors, names_of_weight.values(), source)
    missing = [tied_names[0] for tied_names in names_of_weight.values() if tensors.keys().isdisjoint(tied_names)]
    problems = name_problems(missing, [tensor_name for tensor_name in tensors if tensor_name not in state], "the model")
    if shapes := [
        f"{weight_name} {list(tensors[weight_name].shape)} instead of {list(tensor.shape)}"
        for weight_name, tensor in state.items()
        if weight_name in tensors and tensors[weight_name].shape != tuple(tensor.shape)
    ]:
        problems.append(f"the checkpoint has other shapes: {shown(shapes)}")
    if problems:
        raise CaptureError(
            f"{source}: does not fit the model: {'; '.join(problems)}: pass the checkpoint of this model"
        )
    for weight_name, tensor in state.items():
        if weight_name not in tensors:
            continue
        if deferred is not None and isinstance(tensor, FakeTensor):
            deferred.assign(tensor, tensors[weight_name])
        else:
            with torch.no_grad():
                tensor.copy_(tensors[weight_name].read())


def tensors_by_weight_name(
    tensors: Mapping[str, _Tensor], weights: Collection[Collection[str]], source: str
) -> Mapping[str, _Tensor]:
    """Return the tensors of a checkpoint by the names that they have in a model.

    A checkpoint may have more than the model, such as ``{"model": ..., "optimizer": ...}``, or the model may be in a wrapper: the prefix
    that all names of one have is removed or added.
    """
    if not weights or _has_all(tensors, weights):
        return tensors
    weight_names = {weight_name for weight_names in weights for weight_name in weight_names}
    for prefix in name_prefixes(weight_names, tensors):
        prefixed = {prefix + tensor_name: tensor for tensor_name, tensor in tensors.items()}
        if _has_all(prefixed, weights):
            return prefixed
    if not weight_names.isdisjoint(tensors):
        return tensors
    counts = name_prefixes(tensors, weight_names)
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


def name_problems(missing: Collection[str], unknown: Collection[str], model: str) -> list[str]:
    """Return how the names in a checkpoint differ from those in a model, and the prefix with which more of them would fit."""
    problems = []
    if missing:
        problems.append(f"the checkpoint lacks {shown(missing)}")
    if unknown:
        problems.append(f"{model} lacks {shown(unknown)}")
    for change, counts in (
        ("with {!r} before", name_prefixes(missing, set(unknown))),
        ("without {!r} before", name_prefixes(unknown, set(missing))),
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
