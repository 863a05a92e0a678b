"""Run a model on its example, and leave it as it was: its attributes, its buffers and the random state of torch.

A container of another class than the built-in ones may refuse its own methods, such as ``update`` of the configuration of a diffusers
model, so containers are read and written by the methods of the built-in class that they derive from.
"""

import contextlib
import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from stagepack.capture.captured_records import with_records
from stagepack.capture.inputs import Inputs, on_device_of
from stagepack.capture.tensor_kinds import plain_tensors, refuse_unreadable_weights, why_unreadable
from stagepack.capture.torch_messages import format_torch_error, suppress_warnings, with_location
from stagepack.errors import CaptureError
from stagepack.torch_internals import (
    NO_DATA_ERRORS,
    computing_shapes,
    storage_identity,
    suppress_log_records,
    tensor_without_data,
    tree_leaves,
    tree_map_tensors,
)

# Random models run under this seed, here and in every self-check.
EXAMPLE_SEED: Final = 0
# The logger that reports each operator which refuses its arguments.
_LOGGER = "torch._subclasses.fake_tensor"
_OF_EVERY_MODULE: Final = frozenset(vars(torch.nn.Module()))
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_WIDE = {float: torch.float64, complex: torch.complex128}
# The classes that a container may derive from, the most derived first.
_DICT_CLASSES = (OrderedDict, dict)
_ITEM_CLASSES = (list, deque, set)
# A part of a module's state: its kind for the error message, and the function that restores it.
_SavedState = tuple[str, Callable[[], None]]


@dataclass(frozen=True, slots=True)
class FakeCall:
    """What a call with shapes alone has told."""

    result: Any = None
    # Why the call failed; None if it did not, or the model asked for data, so that nothing is known.
    error: str | None = None

    @property
    def succeeded(self) -> bool:
        """Whether the model is known to take the inputs."""
        return self.error is None and self.result is not None


def call_with_shapes(model: torch.nn.Module, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> FakeCall:
    """Call a function of a model with shapes alone. The model is unchanged afterwards."""
    with (
        preserve_module(model),
        suppress_warnings(),
        suppress_log_records(_LOGGER),
        torch.no_grad(),
        computing_shapes(model) as mode,
    ):
        try:
            kwargs_on_device = on_device_of(model, Inputs(kwargs=kwargs)).kwargs
            fake_kwargs = tree_map_tensors(partial(tensor_without_data, mode), kwargs_on_device)
            return FakeCall(result=function(**fake_kwargs))
        except NO_DATA_ERRORS:
            return FakeCall()
        except Exception as error:  # noqa: BLE001 - the code of the model may raise anything
            return FakeCall(error=with_location(format_torch_error(error), error))


def run_model(
    model: torch.nn.Module, inputs: Inputs, *, written: Iterable[torch.Tensor] = (), changed: list[str] | None = None
) -> Any:
    """Call a model on copies of its inputs, without gradients, and restore the model afterwards."""
    with preserve_module(model, written):
        before = None if changed is None else _attributes(model)
        result = _call(model, inputs)
        if changed is not None and before is not None:
            after = _attributes(model)
            changed += [path for path in after if path not in before or not _is_same(before[path], after[path])]
        return result


def run_model_twice(model: torch.nn.Module, inputs: Inputs) -> tuple[Any, Any]:
    """Call a model twice as `run_model` does; it is restored after the second call."""
    with preserve_module(model):
        return _call(model, inputs), _call(model, inputs)


def _call(model: torch.nn.Module, inputs: Inputs) -> Any:
    args, kwargs = _detached_copy((tuple(inputs.args), dict(inputs.kwargs)))
    with torch.no_grad():
        torch.manual_seed(EXAMPLE_SEED)
        try:
            # Results of some classes of tensors have no copy.
            return _detached_copy(with_records(model(*args, **kwargs)))
        except Exception as error:
            message = f"{type(model).__name__} fails on its example inputs: {format_torch_error(error)}"
            raise CaptureError(with_location(message, error)) from error


def _detached_copy(values: Any) -> Any:
    """Copy nested containers with their tensors, which lose their autograd history."""
    return copy.deepcopy(tree_map_tensors(torch.Tensor.detach, values))


def _attributes(model: torch.nn.Module) -> dict[str, tuple[Any, ...]]:
    """The attributes of all modules, by path, with what is in lists and dicts, but for those of every module."""
    attributes = {}
    for module_path, module in model.named_modules():
        for attribute_name, value in vars(module).items():
            if attribute_name not in _OF_EVERY_MODULE:
                attributes[f"{module_path}.{attribute_name}".removeprefix(".")] = (value, *container_content(value))
    return attributes


def _is_same(values: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether all are the same objects, or equal numbers and texts."""
    return len(values) == len(others) and all(
        value is other
        or (type(value) is type(other) and isinstance(value, bool | int | float | str) and value == other)
        for value, other in zip(values, others, strict=True)
    )


def are_identical(answer: Any, other_answer: Any) -> bool:
    """Whether two answers, of a model and of its captured program, have the same bits; every NaN equals every other."""
    leaves, other_leaves = tree_leaves(answer), tree_leaves(other_answer)
    return len(leaves) == len(other_leaves) and all(map(_is_identical, leaves, other_leaves))


def _is_identical(first: Any, second: Any) -> bool:
    """Whether two leaves of answers are equal bit for bit, except that every NaN equals every other."""
    if type(first) in (float, complex) and type(first) is type(second):
        return _is_identical(
            torch.tensor(first, dtype=_WIDE[type(first)]), torch.tensor(second, dtype=_WIDE[type(first)])
        )
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return type(first) is type(second) and bool(first == second)
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if not (first.is_floating_point() or first.is_complex()):
        return torch.equal(first, second)
    real_tensor, other_real_tensor = map(_as_real, (first, second))
    integers = _INTEGERS[real_tensor.itemsize]
    are_nan = _is_nan(real_tensor) & _is_nan(other_real_tensor)
    return bool(((real_tensor.view(integers) == other_real_tensor.view(integers)) | are_nan).all())


def _as_real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_nan(real_tensor: torch.Tensor) -> torch.Tensor:
    return real_tensor.to(torch.float32).isnan() if real_tensor.itemsize == 1 else real_tensor.isnan()


def preserve_module(
    model: torch.nn.Module, written: Iterable[torch.Tensor] = ()
) -> contextlib.AbstractContextManager[None]:
    """Restore a module after the ``with`` block, whether the block succeeds or fails. Nothing is written that did not change.

    Covered are the attributes of the module, its submodules, and modules in other attributes; the containers that these hold, nested ones
    included; the attributes of the objects that they hold, if their classes come from the packages of the model's classes; the content of
    buffers, of tensors in all these places and of those `written`, but not of other parameters; and the state of torch's random numbers.
    """
    attribute_tensors: list[torch.Tensor] = []
    try:
        containers = list(_save_containers(model, attribute_tensors))
        storages = _save_storages((*model.buffers(), *written, *_outside_of_parameters(model, attribute_tensors)))
        return _restoring(type(model).__name__, [*containers, *storages, *_save_random_state()])
    except Exception:
        refuse_unreadable_weights(model)
        raise


def preserve_tensors(tensors: Iterable[torch.Tensor]) -> contextlib.AbstractContextManager[None]:
    """Restore the content of tensors, and the state of torch's random numbers, after the ``with`` block."""
    return _restoring("the program", [*_save_storages(tensors), *_save_random_state()])


@contextlib.contextmanager
def _restoring(owner: str, saved_states: Sequence[_SavedState]) -> Iterator[None]:
    failures: list[str] = []
    try:
        yield
    finally:
        # The exit stack calls every function, also after an interrupt from the keyboard during one of them.
        with contextlib.ExitStack() as stack:
            for kind, restore in saved_states:
                stack.callback(_try_restore, kind, restore, failures)
        if failures:
            raise CaptureError(f"{owner} is changed, it cannot be restored: {'; '.join(failures)}")


def _try_restore(kind: str, restore: Callable[[], None], failures: list[str]) -> None:
    try:
        restore()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other parts are restored, and the caller gets an error
        failures.append(f"{kind}: {type(error).__name__}: {error}")


def _save_containers(model: torch.nn.Module, tensors: list[torch.Tensor]) -> Iterator[_SavedState]:
    """Save the attributes of all modules, and the containers in them. Append the tensors in these to `tensors`."""
    pending: list[Any] = [vars(module) for module in model.modules()]
    packages = model_packages(model)
    seen_ids: set[int] = set()
    while pending:
        container = pending.pop()
        if id(container) in seen_ids:
            continue
        seen_ids.add(id(container))
        match container:
            case dict():
                dict_content = _dict_content(container)
                pending.extend(dict_content.values())
                yield "attributes", partial(_restore_dict, container, dict_content)
            case list() | deque() | set():
                items = _items(container)
                if not isinstance(container, set):
                    pending.extend(items)
                yield "a set" if isinstance(container, set) else "a list", partial(_restore_items, container, items)
            case torch.Tensor():
                # Else the code of the model has not written it, or torch.export says so.
                if why_unreadable(container) is None:
                    tensors.append(container)
            case tuple():
                pending.extend(tuple.__iter__(container))
            # One that is no submodule, but an attribute like any other.
            case torch.nn.Module():
                pending.append(vars(container))
            case _ if _package(type(container)) in packages:
                # The object may be a cache of positions, which the code fills when it first runs.
                with contextlib.suppress(AttributeError):  # it has slots
                    pending.append(object.__getattribute__(container, "__dict__"))


def model_packages(model: torch.nn.Module) -> set[str]:
    """Return the names of the packages that the classes of a model come from, but for torch."""
    # An entry point is captured as a module of stagepack's own.
    return {_package(type(module)) for module in model.modules()} - {"torch", "builtins", "stagepack"}


def _package(object_class: type) -> str:
    return str(object_class.__module__).partition(".")[0]


def container_content(value: Any) -> tuple[Any, ...]:
    """Return what is in a dict, list, deque or set, by the methods of the built-in classes; nothing for another object."""
    match value:
        case dict():
            content = _dict_content(value)
            return (*content, *content.values())
        case list() | deque() | set():
            return tuple(_items(value))
        case _:
            return ()


def _base_class(container: Any, classes: tuple[type, ...]) -> Any:
    """The first of some built-in classes that a container is an instance of."""
    return next(cls for cls in classes if isinstance(container, cls))


def _dict_content(container: dict[Any, Any]) -> dict[Any, Any]:
    keys = _base_class(container, _DICT_CLASSES).__iter__(container)
    # Not by `values`, which calls the item method of a class derived from OrderedDict.
    return {key: dict.__getitem__(container, key) for key in keys}


def _items(container: Any) -> list[Any]:
    return list(_base_class(container, _ITEM_CLASSES).__iter__(container))


def _restore_dict(container: dict[Any, Any], content: dict[Any, Any]) -> None:
    now = _dict_content(container)
    if _are_same(now, content) and _are_same(now.values(), content.values()):
        return
    dict_class = _base_class(container, _DICT_CLASSES)
    dict_class.clear(container)
    for key, value in content.items():
        dict_class.__setitem__(container, key, value)


def _restore_items(container: Any, items: list[Any]) -> None:
    if not _are_same(_items(container), items):
        item_class = _base_class(container, _ITEM_CLASSES)
        item_class.clear(container)
        (item_class.update if item_class is set else item_class.extend)(container, items)


def _are_same(items: Any, other_items: Any) -> bool:
    """Whether two collections hold the same objects in the same order. ``==`` would compare tensors by element."""
    return len(items) == len(other_items) and all(a is b for a, b in zip(items, other_items, strict=True))


def _outside_of_parameters(model: torch.nn.Module, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that share no memory with a parameter: torch.export writes into those that are constants to it."""
    parameter_storages = {storage_identity(tensor) for tensor in _strided_tensors(model.parameters())}
    return [tensor for tensor in _strided_tensors(tensors) if storage_identity(tensor) not in parameter_storages]


def _save_storages(tensors: Iterable[torch.Tensor]) -> Iterator[_SavedState]:
    """Save the content of tensors, of each memory once."""
    storages: dict[tuple[int, int], torch.UntypedStorage] = {}
    for tensor in _strided_tensors(tensors):
        storage = tensor.untyped_storage()
        # A fake tensor has another device than its storage.
        if storage.device.type != "meta":
            storages[storage.data_ptr(), storage.nbytes()] = storage
    for storage in storages.values():
        yield "the content of a buffer", partial(_restore_storage, storage, storage.clone())


def _strided_tensors(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the strided tensors, and those that tensors of other classes consist of."""
    return (plain for tensor in tensors for plain in plain_tensors(tensor) if plain.layout == torch.strided)


def _restore_storage(storage: torch.UntypedStorage, content: torch.UntypedStorage) -> None:
    # Unchanged memory is not written: it may be mapped from a file for reading only.
    if not torch.equal(_as_bytes(storage), _as_bytes(content)):
        storage.copy_(content)


def _as_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _save_random_state() -> Iterator[_SavedState]:
    cpu_state = torch.get_rng_state()
    yield "the random state", partial(torch.set_rng_state, cpu_state)
    if torch.cuda.is_initialized():
        cuda_states = torch.cuda.get_rng_state_all()
        yield "the random state of CUDA devices", partial(torch.cuda.set_rng_state_all, cuda_states)
