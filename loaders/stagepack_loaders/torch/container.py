"""The modules of a loaded stage: they hold weights and other modules under the names of the model."""

from collections.abc import Iterator
from typing import Any

import torch

from stagepack.errors import InputError
from stagepack.format.traversal import split_call_path
from stagepack.torch_internals import child_modules


class Container(torch.nn.Module):
    """A module that cannot be called. It holds weights and other modules: ``layers[3]`` is the one named ``3``."""

    # Whether the stage calls modules of this class.
    is_called = False

    _called_children: frozenset[str] = frozenset()

    def __getitem__(self, module_name: int | str) -> torch.nn.Module:
        """Return the child module of that name.

        Raises:
            KeyError: there is none.
        """
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
        """Replace a child module that the stage calls, or set any other attribute.

        Raises:
            InputError: the value is a module, and the stage would not call it.
        """
        if module_name in self._called_children and isinstance(value, torch.nn.Module):
            child_modules(self)[module_name] = value
        elif isinstance(value, torch.nn.Module):
            raise InputError(
                f"the stage would not call a module at {module_name!r}: a module can be replaced if the model calls it outside of branches "
                "and loops, it does something, it is complete in the stage, and the stage was loaded with modules=True"
            )
        else:
            super().__setattr__(module_name, value)

    def settle(self) -> None:
        """Order the child modules and note which of them are called, after all of them are added."""
        children = child_modules(self)
        self._called_children = frozenset(
            module_name for module_name, child in children.items() if isinstance(child, Container) and child.is_called
        )
        if all(split_call_path(module_name)[0].isdecimal() for module_name in children):
            for module_name in sorted(
                children, key=lambda module_name: (int(split_call_path(module_name)[0]), module_name)
            ):
                children[module_name] = children.pop(module_name)

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse the call.

        Raises:
            InputError: always.
        """
        raise InputError(
            "this module cannot be called: the model does not call it, or it is not complete in this stage, "
            "or the stage was loaded without modules=True"
        )
