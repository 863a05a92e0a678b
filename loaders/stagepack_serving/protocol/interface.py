"""What a client sees of a bundle: named tensors in and out."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from stagepack.errors import InputError
from stagepack.format.contract import BoundArgument, check_values
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Edge, Manifest
from stagepack.format.tree import DictTree, ObjectTree, SequenceTree, Tree, ValueLeaf
from stagepack_loaders.elements import COMPLEX
from stagepack_serving.protocol.datatypes import datatype_of

ANY_SIZE: Final = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class InterfaceTensor:
    """An input or an output.

    Attributes:
        name: an input has the name of its edge; an output is named by its place in the result, such as ``logits`` or ``output.0``.
        edge: the value of the model that it carries.
    """

    name: str
    edge: Edge

    @property
    def datatype(self) -> str:
        """Its type in the words of the protocol."""
        return datatype_of(self.edge.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape, -1 for a size that may vary. A number is a tensor of one element, a complex number a pair."""
        sizes = tuple(dim if isinstance(dim, int) else ANY_SIZE for dim in self.edge.shape)
        pair = (2,) if self.edge.dtype in COMPLEX else ()
        return (*sizes, *pair) or (1,)

    def shape_of_edge(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the model's value for one that a client states.

        Raises:
            InputError: no value has it.
        """
        if self.edge.dtype in COMPLEX:
            if not shape or shape[-1] != 2:
                raise InputError(
                    f"{self.name}: complex numbers come in pairs: expected a last dimension of 2, found {list(shape)}"
                )
            return shape[:-1]
        if self.edge.dtype in SCALAR_DTYPES or not self.edge.shape:
            if shape not in ((), (1,)):
                raise InputError(f"{self.name}: expected one number, of the shape [1], found {list(shape)}")
            return ()
        return shape


@dataclass(frozen=True, slots=True)
class _Shaped:
    """A value as the boundary contract looks at it."""

    shape: tuple[int, ...]
    dtype: str


class Interface:
    """The inputs and outputs of a bundle.

    Attributes:
        inputs: by name, in the order of the signature.
        outputs: by name, in the order of the result. What the model always gives the same, such as None, is not among them.
    """

    def __init__(self, manifest: Manifest) -> None:
        """Read them off the manifest."""
        self._symbols = manifest.symbols
        edges = {edge.name: edge for edge in manifest.edges}
        self.inputs: Mapping[str, InterfaceTensor] = {
            edge.name: InterfaceTensor(name=edge.name, edge=edge) for edge in manifest.edges if edge.producer is None
        }
        outputs: dict[str, InterfaceTensor] = {}
        for path, leaf in _leaves(manifest.signature.result, ()):
            begin = () if path and isinstance(path[0], str) else ("output",)
            name = ".".join(map(str, (*begin, *path)))
            while name in outputs or name in self.inputs:
                name = f"output.{name}"
            outputs[name] = InterfaceTensor(name=name, edge=edges[leaf.name])
        self.outputs: Mapping[str, InterfaceTensor] = outputs

    def check(self, name: str, datatype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Check one input as a client states it; return the shape of the model's value.

        Raises:
            InputError: there is no such input, or it has another type, or a shape that no value has.
        """
        if name not in self.inputs:
            raise InputError(f"there is no input {name!r}: the model takes {', '.join(self.inputs) or 'none'}")
        spec = self.inputs[name]
        if datatype != spec.datatype:
            raise InputError(f"{name}: expected the datatype {spec.datatype}, found {datatype}")
        return spec.shape_of_edge(shape)

    def check_all(self, shapes: Mapping[str, tuple[int, ...]], numbers: Mapping[str, bool | float]) -> None:
        """Check that all inputs are there, and their shapes, or the numbers that they are, with what the bundle allows.

        Raises:
            InputError: the first input that is missing or does not fit.
        """
        if missing := [name for name in self.inputs if name not in shapes]:
            raise InputError(f"the input {missing[0]!r} is missing: the model takes {', '.join(self.inputs)}")
        edges = [spec.edge for spec in self.inputs.values()]
        given = {
            edge.name: BoundArgument(
                edge.name, numbers[edge.name] if edge.dtype in SCALAR_DTYPES else _Shaped(shapes[edge.name], edge.dtype)
            )
            for edge in edges
        }
        check_values(edges, given, self._symbols)

    def check_outputs(self, names: Iterable[str]) -> None:
        """Check the names of outputs that a client asks for.

        Raises:
            InputError: there is no such output.
        """
        for name in names:
            if name not in self.outputs:
                raise InputError(f"there is no output {name!r}: the model gives {', '.join(self.outputs) or 'none'}")


def _leaves(
    tree: Tree, path: tuple[bool | int | float | str | None, ...]
) -> Iterator[tuple[tuple[object, ...], ValueLeaf]]:
    """The values of a result, and where each stands: keys, names of fields, positions."""
    if isinstance(tree, ValueLeaf):
        yield path, tree
    elif isinstance(tree, SequenceTree):
        for position, item in enumerate(tree.items):
            yield from _leaves(item, (*path, position))
    elif isinstance(tree, DictTree):
        for key, item in tree.items:
            yield from _leaves(item, (*path, key))
    elif isinstance(tree, ObjectTree):
        for name, item in tree.fields:
            yield from _leaves(item, (*path, name))
