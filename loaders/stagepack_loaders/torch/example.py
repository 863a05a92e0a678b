"""Replay the recorded example of a bundle, and run a pipeline on tensors from a file."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.utils import _pytree as pytree

from stagepack.errors import InputError, StagepackError, WriteError
from stagepack.format.dtypes import SCALARS
from stagepack.format.manifest import Manifest
from stagepack.format.reader import Bundle, raise_digest_problems
from stagepack.format.tree import ConstantLeaf, NonFiniteLeaf, ValueLeaf, constant, tree_leaves, unflatten
from stagepack.format.weights import PADDING, read_index
from stagepack_loaders.pipeline import Pipeline

INPUT = "input."
OUTPUT = "output."


def replay(pipeline: Pipeline, bundle: Bundle) -> float:
    """Run the recorded example; return the largest absolute difference from the recorded result.

    0.0 says that every bit is equal, infinity that a shape or a dtype differs.

    Raises:
        InputError: the bundle has no example.
        DigestError: the example's file is not the one listed.
    """
    given, expected = read_example(bundle)
    return largest_difference(call(pipeline, given), expected)


def read_example(bundle: Bundle) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The recorded inputs by edge name, and the recorded results as `call` gives them. Seeds torch as the recording did.

    Raises:
        InputError: the bundle has no example.
        DigestError: the example's file is not the one listed.
        FormatError: it breaks rules.
    """
    if bundle.example is None:
        raise InputError(f"{bundle.path}: the bundle has no example to run")
    raise_digest_problems(bundle.check_digest(bundle.example.name))
    read_index(bundle.example)
    tensors = load_file(bundle.example)
    torch.manual_seed(bundle.manifest.seed)
    given = {name.removeprefix(INPUT): tensor for name, tensor in tensors.items() if name.startswith(INPUT)}
    return given, {name: tensor for name, tensor in tensors.items() if name.startswith(OUTPUT)}


def largest_difference(results: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference between results and what was expected of them; see `replay`."""
    if results.keys() != expected.keys():
        return math.inf
    return max((_difference(results[name], expected[name]) for name in expected), default=0.0)


def call(pipeline: Pipeline, given: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Call a pipeline with its inputs by edge name; the results by number, ``output.0`` for the first leaf.

    Numbers go in and come out as 0-dimensional tensors.

    Raises:
        InputError: an input is missing or unknown, or does not fit, or the model fails on the inputs.
    """
    manifest = pipeline.manifest
    edges = {edge.name: edge for edge in manifest.edges if edge.producer is None}
    if given.keys() != edges.keys():
        raise InputError(f"expected the inputs {', '.join(edges) or '(none)'}, found {', '.join(given) or '(none)'}")
    numbers = [name for name in given if edges[name].dtype in SCALARS]
    for name in numbers:
        if given[name].numel() != 1:
            raise InputError(f"{name}: expected one number, found the shape {list(given[name].shape)}")
    args, kwargs = _call_of(manifest, {**given, **{name: given[name].item() for name in numbers}})
    try:
        with torch.no_grad():
            results = pytree.tree_leaves(pipeline(*args, **kwargs))
    except StagepackError:
        raise
    except Exception as error:  # what an operator raises: an index out of range, memory that is not there
        raise InputError(f"the model fails on these inputs: {type(error).__name__}: {error}") from error
    leaves = tree_leaves(manifest.signature.result)
    pairs = enumerate(zip(leaves, results, strict=True))
    return {
        f"{OUTPUT}{number}": torch.as_tensor(result) for number, (leaf, result) in pairs if isinstance(leaf, ValueLeaf)
    }


def read_inputs(path: Path) -> dict[str, torch.Tensor]:
    """The inputs in a safetensors file: tensors by edge name, with or without the prefix ``input.``.

    Outputs and padding are left alone, so that the example of a bundle is such a file too.

    Raises:
        InputError: the file is not there, or is no safetensors file.
    """
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise InputError(f"{path}: expected a safetensors file with the inputs: {error}") from None
    # Copies, since what is mapped from a file may begin at any byte, where some kernels add in another order.
    others = (OUTPUT, PADDING)
    return {name.removeprefix(INPUT): tensor.clone() for name, tensor in tensors.items() if not name.startswith(others)}


def write_outputs(results: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write the results of `call` as a safetensors file.

    Raises:
        WriteError: the file cannot be written.
    """
    try:
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in results.items()}, path)
    except (OSError, SafetensorError) as error:
        raise WriteError(f"{path}: could not be written: {error}") from None
    except KeyError as error:
        raise WriteError(f"{path}: could not be written: a safetensors file holds no {error}") from None


def _call_of(manifest: Manifest, values: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call that gives the values to the places where the signature has them."""

    def leaf(found: ValueLeaf | ConstantLeaf | NonFiniteLeaf) -> Any:
        return values[found.name] if isinstance(found, ValueLeaf) else constant(found)

    trees = manifest.signature.parameters
    args = tuple(unflatten(parameter.tree, leaf) for parameter in trees if parameter.positional)
    kwargs = {parameter.name: unflatten(parameter.tree, leaf) for parameter in trees if not parameter.positional}
    return args, kwargs


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return math.inf
    found = found.detach().cpu()
    same = (found == expected) | ((found != found) & (expected != expected))
    if bool(same.all()):
        return 0.0
    wide = torch.complex128 if found.is_complex() else torch.float64
    apart = (found.to(wide) - expected.to(wide)).abs()[~same]
    return float(apart.nan_to_num(nan=math.inf).max())
