"""Compile the units of a bundle ahead of time with AOTInductor, into a folder."""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.digest import sha256_of_file
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack.format.temporary_folder import TemporaryFolder
from stagepack.torch_internals import compile_to_package
from stagepack_loaders.torch.build import INPUT_TYPES
from stagepack_loaders.torch.compilation_units import CompilationUnit, compilation_units, content_key
from stagepack_loaders.torch.compiled_folder import LIST_NAME, CompiledUnit, encode_list
from stagepack_loaders.torch.torch_attributes import torch_attribute

# Called with one line that says which unit is compiled next.
Progress = Callable[[str], None]

# A unit with its stage number and the symbols of its graph.
_Occurrence = tuple[int, CompilationUnit, Sequence[Symbol]]


def compile_to_folder(
    bundle: Bundle,
    stages: Mapping[int, tuple[GraphModule, Graph]],
    device: torch.device,
    out: str | os.PathLike[str],
    progress: Progress,
) -> list[CompiledUnit]:
    """Compile each distinct unit of the stages of a bundle into a folder.

    The folder is written under a temporary name and renamed when it is complete. While a unit is compiled, this process and those that it
    starts have their temporary files in a folder inside of it.

    out: the folder to write; it must not exist.
    """
    path = Path(os.path.abspath(out))
    if path.exists():
        raise OutputExistsError(f"{path} exists: choose another name, or remove it")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryFolder(path)
    except OSError as error:
        raise WriteError(f"{path}: cannot be created: {error.strerror or error}: choose another folder") from None
    with temporary:
        try:
            units = [
                _compile_occurrences(key, unit_occurrences, device, temporary.path, progress)
                for key, unit_occurrences in _distinct_units(stages).items()
            ]
            (temporary.path / LIST_NAME).write_text(encode_list(bundle, device, units))
            temporary.path.rename(path)
        except OSError as error:
            raise WriteError(f"{path}: {error.strerror or error}") from None
    return units


def _distinct_units(
    stages: Mapping[int, tuple[GraphModule, Graph]],
) -> dict[tuple[Any, ...], list[_Occurrence]]:
    """All units of stages; equal ones together."""
    distinct: dict[tuple[Any, ...], list[_Occurrence]] = {}
    for stage_number, (stage_module, graph) in stages.items():
        for unit in compilation_units(stage_module, graph):
            distinct.setdefault(content_key(unit.module), []).append((stage_number, unit, graph.symbols))
    return distinct


def _compile_occurrences(
    key: tuple[Any, ...],
    unit_occurrences: Sequence[_Occurrence],
    device: torch.device,
    folder: Path,
    progress: Progress,
) -> CompiledUnit:
    """Compile equal units into one file."""
    stage_number, first_unit, symbols = unit_occurrences[0]
    progress(f"compile {first_unit.region_name or 'stage'} of stage {stage_number}")
    file_name = f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.pt2"
    failure_reason = _compile_module(first_unit.module, symbols, device, folder / file_name)
    return CompiledUnit(
        locations=tuple((occurrence_stage, unit.region_name) for occurrence_stage, unit, _ in unit_occurrences),
        file_name="" if failure_reason else file_name,
        sha256="" if failure_reason else sha256_of_file(folder / file_name),
        reason=failure_reason,
    )


def _compile_module(module: GraphModule, symbols: Sequence[Symbol], device: torch.device, path: Path) -> str:
    """Compile a module into a file; return the reason if that is not possible."""
    inputs: list[Value | Weight] = module.meta[INPUT_TYPES]
    scalar_names = [value.name for value in inputs if isinstance(value, Value) and value.dtype.startswith("sym")]
    if scalar_names:
        return f"it takes the number {scalar_names[0]}"
    symbol_sizes = {symbol.name: _example_size(symbol) for symbol in symbols}
    symbol_dims = {symbol.name: torch.export.Dim(symbol.name, min=symbol.min, max=symbol.max) for symbol in symbols}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            example = tuple(_example_tensor(value, symbol_sizes, device) for value in inputs)
            dynamic_shapes = tuple(_dynamic_dims(value, symbol_dims) for value in inputs)
            program = torch.export.export(module, example, dynamic_shapes=dynamic_shapes)
            written_inputs = program.run_decompositions({}).graph_signature.user_inputs_to_mutate
            if written_inputs:
                return f"it writes {next(iter(written_inputs.values()))}"
            if any(not isinstance(result, torch.Tensor) for result in _example_results(program)):
                return "it returns numbers"
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary_folder:
                compile_to_package(program, str(path), temporary_folder)
        except Exception as error:  # noqa: BLE001 - the compilers of torch raise errors of any class
            message = str(error).strip()
            return f"{type(error).__name__}: {message.splitlines()[0][:200] if message else ''}"
    return ""


def _example_results(program: torch.export.ExportedProgram) -> Collection[Any]:
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    return [node.meta.get("val") if isinstance(node, torch.fx.Node) else node for node in output.args[0]]


def _example_size(symbol: Symbol) -> int:
    """The size to compile at: that of the example, but neither 0 nor 1, which compilers take for constants."""
    size = max(2, symbol.example or 0, symbol.min or 0)
    return size if symbol.max is None else min(size, symbol.max)


def _example_tensor(value: Value | Weight, symbol_sizes: Mapping[str, int], device: torch.device) -> torch.Tensor:
    dtype = torch_attribute(value.dtype, torch.dtype)
    if isinstance(value, Weight):
        strides = value.strides if value.strides is not None else torch.empty(value.shape, device="meta").stride()
        return torch.empty_strided(value.shape, strides, dtype=dtype, device=device).zero_()
    return torch.zeros([evaluate_dim(dim, symbol_sizes) for dim in value.shape], dtype=dtype, device=device)


def _dynamic_dims(value: Value | Weight, symbol_dims: Mapping[str, Any]) -> dict[int, Any]:
    """The dimensions that may vary: by the name of the symbol, or found by torch where they are arithmetic over symbols."""
    if isinstance(value, Weight):
        return {}
    return {
        index: symbol_dims[dim] if isinstance(dim, str) else torch.export.Dim.AUTO
        for index, dim in enumerate(value.shape)
        if not isinstance(dim, int)
    }
