"""Replay the recorded example of a bundle, and run a pipeline on tensors from a file. Works on the arrays of the pipeline's runtime."""

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from safetensors import SafetensorError

from stagepack.errors import InputError, StagepackError, WriteError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.manifest import Manifest
from stagepack.format.reader import Bundle
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant_value, flatten_tree, unflatten_tree
from stagepack.format.weights import PADDING_PREFIX, read_weight_header
from stagepack_loaders.base import ArrayOps
from stagepack_loaders.pipeline import Pipeline

INPUT = "input."
OUTPUT = "output."


# How far results may be from those that torch gave, where another runtime computes them: relative, and absolute. What is not here is
# to be equal.
TOLERANCE: Final[Mapping[str, tuple[float, float]]] = {
    "float64": (1e-5, 1e-6),
    "float32": (1e-3, 1e-4),
    "float16": (1e-2, 1e-2),
    "bfloat16": (4e-2, 4e-2),
    "complex64": (1e-3, 1e-4),
    "complex128": (1e-5, 1e-6),
}


class Difference(NamedTuple):
    """How far results are from what was expected.

    Attributes:
        largest: the largest absolute difference; 0.0 says that every bit is equal, infinity that a shape, a dtype or a special value
            differs.
        within: whether all are within `TOLERANCE`.
    """

    largest: float
    within: bool


def replay_example(pipeline: Pipeline, bundle: Bundle) -> Difference:
    """Run the recorded example; compare with the recorded result.

    Raises:
        InputError: the bundle has no example.
        DigestError: the example's file is not the one listed.
    """
    given, expected = read_example(pipeline, bundle)
    return compare(pipeline, run_on_inputs(pipeline, given), expected)


def read_example(pipeline: Pipeline, bundle: Bundle) -> tuple[dict[str, Any], dict[str, Any]]:
    """The recorded inputs by edge name, and the recorded results as `call` gives them. Seeds torch as the recording did.

    Raises:
        InputError: the bundle has no example.
        DigestError: the example's file is not the one listed.
        FormatError: it breaks rules.
    """
    if bundle.example is None:
        raise InputError(f"{bundle.path}: the bundle has no example to run")
    bundle.check_digests([bundle.example.name])
    read_weight_header(bundle.example)
    arrays = pipeline.arrays
    tensors = arrays.load(bundle.example)
    pipeline.seed(bundle.manifest.seed)
    given = {
        name.removeprefix(INPUT): arrays.copy(tensor) for name, tensor in tensors.items() if name.startswith(INPUT)
    }
    return given, {name: tensor for name, tensor in tensors.items() if name.startswith(OUTPUT)}


def compare(pipeline: Pipeline, results: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference:
    """Compare results with what was expected of them."""
    if results.keys() != expected.keys():
        return Difference(math.inf, within=False)
    arrays = pipeline.arrays
    return largest(compare_arrays(arrays, results[name], wanted) for name, wanted in expected.items())


def compare_arrays(arrays: ArrayOps, found: Any, expected: Any) -> Difference:
    """Compare two arrays of a runtime."""
    name = str(expected.dtype).removeprefix("torch.")
    return Difference(*arrays.difference(found, expected, *TOLERANCE.get(name, (0.0, 0.0))))


def largest(differences: Iterable[Difference]) -> Difference:
    """The difference of several arrays from several."""
    found = list(differences)
    return Difference(max((one.largest for one in found), default=0.0), all(one.within for one in found))


def run_on_inputs(pipeline: Pipeline, given: Mapping[str, Any]) -> dict[str, Any]:
    """Call a pipeline with its inputs by edge name; the results by number, ``output.0`` for the first leaf.

    Numbers go in and come out as arrays without dimensions.

    Raises:
        InputError: an input is missing or unknown, or does not fit, or the model fails on the inputs.
    """
    manifest = pipeline.manifest
    edges = {edge.name: edge for edge in manifest.edges if edge.producer is None}
    if given.keys() != edges.keys():
        raise InputError(f"expected the inputs {', '.join(edges) or '(none)'}, found {', '.join(given) or '(none)'}")
    numbers = [name for name in given if edges[name].dtype in SCALAR_DTYPES]
    for name in numbers:
        if math.prod(given[name].shape) != 1:
            raise InputError(f"{name}: expected one number, found the shape {list(given[name].shape)}")
    args, kwargs = _call_of(manifest, {**given, **{name: given[name].item() for name in numbers}})
    arrays = pipeline.arrays
    try:
        with pipeline.inference():
            answer = pipeline(*args, **kwargs)
    except StagepackError:
        raise
    except Exception as error:  # what an operator raises: an index out of range, memory that is not there
        raise InputError(f"the model fails on these inputs: {type(error).__name__}: {error}") from error
    results = enumerate(flatten_tree(manifest.signature.result, answer, "the answer"))
    return {
        f"{OUTPUT}{number}": arrays.array(result)
        for number, (_, leaf, result) in results
        if isinstance(leaf, ValueLeaf)
    }


def read_inputs(pipeline: Pipeline, path: Path) -> dict[str, Any]:
    """The inputs in a safetensors file: tensors by edge name, with or without the prefix ``input.``.

    Outputs and padding are left alone, so that the example of a bundle is such a file too.

    Raises:
        InputError: the file is not there, or is no safetensors file.
    """
    arrays = pipeline.arrays
    try:
        tensors = arrays.load(path)
    except (OSError, SafetensorError) as error:
        reason = "it is a folder" if path.is_dir() else error
        raise InputError(f"{path}: expected a safetensors file with the inputs: {reason}") from None
    others = (OUTPUT, PADDING_PREFIX)
    return {
        name.removeprefix(INPUT): arrays.copy(tensor) for name, tensor in tensors.items() if not name.startswith(others)
    }


def write_outputs(pipeline: Pipeline, results: Mapping[str, Any], path: Path) -> None:
    """Write the results of `call` as a safetensors file.

    Raises:
        WriteError: the file cannot be written.
    """
    try:
        pipeline.arrays.save(results, path)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path}: could not be written: {error}") from None
    except KeyError as error:
        raise WriteError(f"{path}: could not be written: a safetensors file holds no {error}") from None


def _call_of(manifest: Manifest, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that gives the values to the places where the signature has them."""

    def leaf(found: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
        return values[found.name] if isinstance(found, ValueLeaf) else constant_value(found)

    trees = manifest.signature.parameters
    args = tuple(unflatten_tree(parameter.tree, leaf) for parameter in trees if parameter.positional)
    kwargs = {parameter.name: unflatten_tree(parameter.tree, leaf) for parameter in trees if not parameter.positional}
    return args, kwargs
