"""The signature of a model or a module (SPEC section 6)."""

from collections.abc import Callable, Iterable

from msgspec import Struct
from msgspec.structs import replace

from stagepack.format.tree import ObjectTree, Tree, child_trees, rename_values


class Parameter(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One parameter of a call.

    Attributes:
        name: the name of the parameter.
        tree: the containers and leaves of its argument.
        positional: whether it may be given by position. Positional parameters come first, in order.
        keyword: whether it may be given by name.
    """

    name: str
    tree: Tree
    positional: bool = False
    keyword: bool = True


class Signature(Struct, frozen=True, kw_only=True):
    """How a model or a module is called, and what it returns.

    Attributes:
        parameters: the parameters in order.
        result: the containers and leaves of the result.
    """

    parameters: tuple[Parameter, ...]
    result: Tree

    @property
    def trees(self) -> tuple[Tree, ...]:
        """The trees of the parameters in order, and then the tree of the result."""
        return (*(parameter.tree for parameter in self.parameters), self.result)

    def renamed(self, rename: Callable[[str], str]) -> "Signature":
        """Return the signature with other value names."""
        parameters = [replace(parameter, tree=rename_values(parameter.tree, rename)) for parameter in self.parameters]
        return Signature(parameters=tuple(parameters), result=rename_values(self.result, rename))


def signature_features(signatures: Iterable[Signature]) -> tuple[str, ...]:
    """Return the features that a reader of some signatures must know (SPEC M3 and T5)."""
    has_tuple = any(_has_named_tuple(tree) for signature in signatures for tree in signature.trees)
    return ("named_tuples",) if has_tuple else ()


def _has_named_tuple(tree: Tree) -> bool:
    is_named = isinstance(tree, ObjectTree) and tree.kind == "tuple"
    return is_named or any(map(_has_named_tuple, child_trees(tree)))
