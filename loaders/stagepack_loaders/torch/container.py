"""The modules of a loaded stage: they hold weights and other modules under the names of the model."""

from collections.abc import Callable, Iterator
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

    # Return when the weights of the stage have arrived, and may be converted; None if all are there, to stay.
    _wait: Callable[[], None] | None = None
    _check_conversion: Callable[[Callable[[torch.Tensor], torch.Tensor]], None] | None = None

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

    def set_wait(
        self, wait: Callable[[], None], check_conversion: Callable[[Callable[[torch.Tensor], torch.Tensor]], None]
    ) -> None:
        """Set what is called before weights are read or replaced, in this module and those inside it.

        Args:
            wait: returns when all weights are there.
            check_conversion: takes a function that converts tensors, and raises an error if weights cannot be converted by it.
        """
        self._wait, self._check_conversion = wait, check_conversion
        for child in self.children():
            if isinstance(child, Container):
                child.set_wait(wait, check_conversion)

    def wait_for_weights(self) -> None:
        """Return when all weights of the stage are loaded, which is at once unless it was loaded with ``stream=True``.

        `state_dict`, `load_state_dict`, `to` and copies wait on their own. `parameters` and `buffers` do not: before this returns, the
        content of a weight is undefined, and what is written into it may be overwritten.

        Raises:
            DigestError: a weight file cannot be read, or is not the one that the manifest lists.
        """
        if self._wait is not None:
            self._wait()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the parameters and persistent buffers by their names in the model, when all are loaded.

        Raises:
            DigestError: see `wait_for_weights`.
        """
        self.wait_for_weights()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wait_for_weights()
        super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        # All conversions, such as `to`, `double` and `share_memory`.
        self.wait_for_weights()
        if self._check_conversion is not None:
            self._check_conversion(fn)
        return super()._apply(fn, *args, **kwargs)  # type: ignore[no-untyped-call]

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes of a copy, when all weights are loaded.

        Raises:
            DigestError: see `wait_for_weights`.
        """
        self.wait_for_weights()
        return {
            attribute: value
            for attribute, value in self.__dict__.items()
            if attribute not in ("_wait", "_check_conversion")
        }

    def forward(self, *_: Any, **__: Any) -> Any:
        """Refuse the call.

        Raises:
            InputError: always.
        """
        raise InputError(
            "this module cannot be called: the model does not call it, or it is not complete in this stage, "
            "or the stage was loaded without modules=True"
        )
