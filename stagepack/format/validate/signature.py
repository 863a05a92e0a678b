"""The rules on a signature, of the model or of a module call (SPEC T1, T4 and T5)."""

from collections.abc import Iterator

from stagepack.format import limits
from stagepack.format.signature import Signature
from stagepack.format.tree import DictTree, ObjectTree, SequenceTree, Tree, child_trees, is_field_name
from stagepack.format.validate.problems import BrokenRule, format_names


def check_depth(signature: Signature, location: str) -> Iterator[BrokenRule]:
    """Yield a problem if the containers of a signature are nested too deep (L2). `check_signature` must not be called then."""
    if any(_too_deep(tree) for tree in signature.trees):
        yield "L2", location, f"containers are nested deeper than {limits.NESTING_DEPTH}"


def check_signature(signature: Signature, location: str) -> Iterator[BrokenRule]:
    """Yield the problems of a signature."""
    parameter_names = [parameter.name for parameter in signature.parameters]
    if len(set(parameter_names)) != len(parameter_names) or any(
        len(parameter_name) > limits.NAME_CHARACTERS for parameter_name in parameter_names
    ):
        yield "T1", location, "duplicate parameter, or a name that is too long"
    positional = [parameter.positional for parameter in signature.parameters]
    if positional != sorted(positional, reverse=True):
        yield "T1", location, "a positional parameter follows one that is not positional"
    if any(not parameter.positional and not parameter.keyword for parameter in signature.parameters):
        yield "T1", location, "a parameter is neither positional nor a keyword"
    for tree in signature.trees:
        yield from _check_containers(tree, location)


def _check_containers(tree: Tree, location: str) -> Iterator[BrokenRule]:
    if isinstance(tree, SequenceTree) and tree.maxlen is not None:
        if tree.kind != "deque" or tree.maxlen < len(tree.items):
            yield "T4", location, f"a {tree.kind} of {len(tree.items)} items has the maxlen {tree.maxlen}"
    elif isinstance(tree, DictTree | ObjectTree):
        keys = [key for key, _ in (tree.items if isinstance(tree, DictTree) else tree.fields)]
        if len(set(keys)) != len(keys):
            yield "T4", location, f"duplicate key in a container: {format_names(keys)}"
    if isinstance(tree, DictTree) and tree.factory is not None and tree.kind != "defaultdict":
        yield "T4", location, f"a {tree.kind} has a factory"
    if isinstance(tree, ObjectTree) and len(tree.class_name) > limits.NAME_CHARACTERS:
        yield "T4", location, "the name of a class is too long"
    if isinstance(tree, ObjectTree) and tree.kind == "tuple":
        wrong_names = [
            field_name for index, (field_name, _) in enumerate(tree.fields) if not is_field_name(field_name, index)
        ]
        if wrong_names:
            yield (
                "T5",
                location,
                f"expected identifiers as the names of the items of a tuple, found {format_names(wrong_names)}",
            )
    for child in child_trees(tree):
        yield from _check_containers(child, location)


def _too_deep(tree: Tree, depth: int = 0) -> bool:
    return depth > limits.NESTING_DEPTH or any(_too_deep(child, depth + 1) for child in child_trees(tree))
