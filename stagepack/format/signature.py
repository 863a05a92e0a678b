"""How a model or a module is called (SPEC section 6)."""

from collections.abc import Callable

from msgspec import Struct
from msgspec.structs import replace

from stagepack.format.tree import Tree, rename_values


class Parameter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter of a call.

    Attributes:
        positional: may be given by position; positional parameters come first, in order.
        keyword: may be given by name.
    """

    name: str
    tree: Tree
    positional: bool = False
    keyword: bool = True


class Signature(Struct, frozen=True, kw_only=True):
    """How a model or a module is called, and what it gives back."""

    parameters: tuple[Parameter, ...]
    result: Tree

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The containers of the parameters, and those of the result."""
        return (*(parameter.tree for parameter in self.parameters), self.result)

    def renamed(self, name: Callable[[str], str]) -> "Signature":
        """The same with other names of values; `name` is asked in the order of the trees."""
        parameters = [replace(parameter, tree=rename_values(parameter.tree, name)) for parameter in self.parameters]
        return Signature(parameters=tuple(parameters), result=rename_values(self.result, name))
