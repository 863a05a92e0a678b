"""The modules of a loaded stage: they hold weights and other modules under the names of the model.

What a module of ours keeps for itself is under a key with a dot, which no name of a model has: the two never meet. Where the model has a
name that a method of the module has too, such as ``half`` or ``run``, the attribute is the method; ``stage["run"]``, `get_submodule`,
`get_parameter`, `get_buffer`, ``state_dict`` and the like give what the model has there.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.graph import Weight
from stagepack.format.rules import split_call_path
from stagepack.torch_internals import child_modules, mark_non_persistent, weight_tensors

_OWN = "stagepack.container"


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a container knows of its stage.

    Attributes:
        called_children: the names of the child modules that the stage calls.
        wait: returns when the weights of the stage have arrived; None if all are there, to stay.
        check_conversion: takes a function that converts tensors, and raises an error if weights cannot be converted by it.
    """

    called_children: frozenset[str] = frozenset()
    wait: Callable[[], None] | None = None
    check_conversion: Callable[[Callable[[torch.Tensor], torch.Tensor]], None] | None = None


class Container(torch.nn.Module):
    """A module that cannot be called. It holds weights and other modules: ``layers[3]`` is the one named ``3``."""

    def __init__(self) -> None:
        super().__init__()
        self.__dict__[_OWN] = _Facts()

    def __getitem__(self, module_name: int | str) -> torch.nn.Module:
        """Return the child module of that name."""
        children = child_modules(self)
        module = children.get(str(module_name))
        if module is None:
            raise KeyError(f"there is no module {str(module_name)!r}: there are {', '.join(children) or 'none'}")
        return module

    def __setitem__(self, module_name: int | str, module: torch.nn.Module) -> None:
        """Replace the child module of that name."""
        setattr(self, str(module_name), module)

    def __iter__(self) -> Iterator[torch.nn.Module]:
        """Yield the child modules; if their names are numbers, in the order of these."""
        return self.children()

    def __setattr__(self, module_name: str, value: Any) -> None:
        """Replace a child module that the stage calls, or set any other attribute."""
        if isinstance(value, torch.nn.Module) and module_name in _facts(self).called_children:
            child_modules(self)[module_name] = value
        elif isinstance(value, torch.nn.Module):
            raise InputError(
                f"the stage would not call a module at {module_name!r}: a module can be replaced if the model calls it outside of branches "
                "and loops, it does something, it is complete in the stage, and the stage was loaded with modules=True"
            )
        else:
            super().__setattr__(module_name, value)

    def get_submodule(self, target: str) -> torch.nn.Module:
        """Return the module of the model at a path."""
        module: torch.nn.Module | None = self
        for module_name in target.split(".") if target else ():
            module = child_modules(module).get(module_name) if module is not None else None
        if module is None:
            raise AttributeError(f"there is no module {target!r} in this stage")
        return module

    def get_parameter(self, target: str) -> torch.nn.Parameter:
        """Return the parameter of the model at a path."""
        parameter: torch.nn.Parameter = self._weight_at(target, parameters=True)
        return parameter

    def get_buffer(self, target: str) -> torch.Tensor:
        """Return the buffer of the model at a path."""
        buffer: torch.Tensor = self._weight_at(target, parameters=False)
        return buffer

    def _weight_at(self, target: str, *, parameters: bool) -> Any:
        module_path, _, weight_name = target.rpartition(".")
        weight = weight_tensors(self.get_submodule(module_path), parameters=parameters).get(weight_name)
        if weight is None:
            raise AttributeError(f"there is no {'parameter' if parameters else 'buffer'} {target!r} in this stage")
        return weight

    def wait_for_weights(self) -> None:
        """Return when all weights of the stage are loaded, which is at once unless it was loaded with ``stream=True``.

        `state_dict`, `load_state_dict`, `to` and copies wait on their own. `parameters` and `buffers` do not: before this returns, the
        content of a weight is undefined, and what is written into it may be overwritten.
        """
        wait = _facts(self).wait
        if wait is not None:
            wait()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters and persistent buffers by their names in the model, when all are loaded."""
        self.wait_for_weights()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wait_for_weights()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # All conversions, such as `to`, `double` and `share_memory`.
        self.wait_for_weights()
        check_conversion = _facts(self).check_conversion
        if check_conversion is not None:
            check_conversion(fn)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, when all weights are loaded."""
        self.wait_for_weights()
        return self.__dict__ | {_OWN: replace(_facts(self), wait=None, check_conversion=None)}

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse the call."""
        raise InputError(
            "this module cannot be called: the model does not call it, or it is not complete in this stage, "
            "or the stage was loaded without modules=True"
        )


def settle(container: Container, called_class: type[Container]) -> None:
    """Order the child modules of a container and note which of them the stage calls, after all of them are added."""
    children = child_modules(container)
    called_children = frozenset(
        module_name for module_name, child in children.items() if isinstance(child, called_class)
    )
    container.__dict__[_OWN] = replace(_facts(container), called_children=called_children)
    if all(split_call_path(module_name)[0].isdecimal() for module_name in children):
        for module_name in sorted(
            children, key=lambda module_name: (int(split_call_path(module_name)[0]), module_name)
        ):
            children[module_name] = children.pop(module_name)


def set_wait(
    container: Container,
    wait: Callable[[], None],
    check_conversion: Callable[[Callable[[torch.Tensor], torch.Tensor]], None],
) -> None:
    """Set what is called before weights are read or replaced, in a container and those inside it."""
    for module in container.modules():
        if isinstance(module, Container):
            module.__dict__[_OWN] = replace(_facts(module), wait=wait, check_conversion=check_conversion)


def _facts(container: Container) -> _Facts:
    facts: _Facts = container.__dict__[_OWN]
    return facts


@dataclass(frozen=True, slots=True)
class Slot:
    """A weight in the modules that hold it. It is looked up at each call, so that a weight which the user puts there is used.

    Attributes:
        names: its names in the model; more than one for a tied weight.
        entries: for each name, the parameters or buffers of a module, and the key in them.
    """

    names: tuple[str, ...]
    entries: tuple[tuple[dict[str, Any], str], ...]

    def get(self) -> torch.Tensor:
        """Return the weight."""
        weight = self._entry(0)
        for index in range(1, len(self.names)):
            tied_weight = self._entry(index)
            if tied_weight is not weight and tied_weight.data_ptr() != weight.data_ptr():
                raise InputError(
                    f"{self.names[0]} and {self.names[index]} are one weight in the model, and hold two: assign the new one to both"
                )
        return weight

    def put(self, weight: torch.Tensor) -> None:
        """Replace the weight, under all its names."""
        for tensors, key in self.entries:
            tensors[key] = weight

    def _entry(self, index: int) -> torch.Tensor:
        tensors, key = self.entries[index]
        weight: torch.Tensor | None = tensors.get(key)
        if weight is None:
            raise InputError(
                f"the weight {self.names[index]} was removed: a loaded stage cannot be pruned or parametrized"
            )
        return weight


def register_weight(stage: torch.nn.Module, weight: Weight, tensor: torch.Tensor) -> Slot:
    """Register a weight in a stage under all its names, in modules that are made where there are none."""
    slot_entries = []
    for weight_name in weight.names:
        *module_path, attribute_name = weight_name.split(".")
        module = submodule(stage, module_path)
        tensors = weight_tensors(module, parameters=weight.kind == "parameter")
        tensors[attribute_name] = tensor
        if weight.kind in ("non_persistent_buffer", "constant"):
            mark_non_persistent(module, attribute_name)
        slot_entries.append((tensors, attribute_name))
    return Slot(weight.names, tuple(slot_entries))


def submodule(root: torch.nn.Module, path: Sequence[str]) -> torch.nn.Module:
    """Return the module at a path, and make containers where there are none."""
    module = root
    for module_name in path:
        module_children = child_modules(module)
        child_module = module_children.get(module_name)
        if child_module is None:
            child_module = module_children[module_name] = Container()
        module = child_module
    return module
