"""Compile the stages of a bundle: at the first call, or ahead of time into a folder.

What is compiled as one is a *unit*: a region that a stage calls several times, or a whole stage. Ahead of time, AOTInductor compiles the
units of a bundle into a folder, which is no bundle and is in none: ``compiled.json`` names the bundle that it was compiled from and what
the code runs on, and each distinct unit is a file. Weights are passed at each call, so one file serves all calls of a region.
"""

# Long because regions are compiled at loading and ahead of it by the same steps.
import hashlib
import json
import os
import platform
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule

from stagepack.errors import CompiledError, OutputExistsError, WriteError, first_line
from stagepack.format.chunks import sha256_of_file
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.output_file import TemporaryFolder
from stagepack.format.own_folders import check_outside_bundles
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack.opening import BundleSource, errors_name_bundle, opened
from stagepack.torch_internals import compile_to_package, load_package
from stagepack_loaders.base import Loading
from stagepack_loaders.options import Compile, LoadOptions
from stagepack_loaders.torch.build import INPUT_TYPES, NODE_COUNT
from stagepack_loaders.torch.devices import parse_device
from stagepack_loaders.torch.prepare import PreparedTorchStage, prepare_stages
from stagepack_loaders.torch.stage_module import module_of_fx
from stagepack_loaders.torch.torch_attributes import torch_attribute

LIST_NAME = "compiled.json"
_ALIGNMENT = 16  # bytes, which vectorized code relies on


@dataclass(frozen=True, slots=True)
class CompilationUnit:
    """A region of a stage, by the name of its module in the module of the stage; or the whole stage, with an empty name."""

    stage_module: GraphModule
    region_name: str

    @property
    def module(self) -> GraphModule:
        """The module that is compiled."""
        module = self.stage_module.get_submodule(self.region_name) if self.region_name else self.stage_module
        assert isinstance(module, GraphModule)
        return module


def compilation_units(stage_module: GraphModule, graph: Graph) -> list[CompilationUnit]:
    """Return the units of a stage: the regions that it calls several times, or the stage if most of its nodes are outside of these."""
    calls = Counter(str(node.target) for node in stage_module.graph.nodes if node.op == "call_module")
    call_counts = {
        CompilationUnit(stage_module, region_name): count for region_name, count in calls.items() if count > 1
    }
    nodes_in_regions = sum(unit.module.meta[NODE_COUNT] * count for unit, count in call_counts.items())
    return list(call_counts) if 2 * nodes_in_regions >= len(graph.nodes) else [CompilationUnit(stage_module, "")]


def content_key(module: GraphModule) -> tuple[Any, ...]:
    """Return a key that is equal for modules that compute the same: their code, and the strings and modules that it uses."""
    used_names = dict.fromkeys(
        str(node.target) for node in module.graph.nodes if node.op in ("get_attr", "call_module")
    )
    attributes = {attribute_name: getattr(module, attribute_name) for attribute_name in used_names}
    keys = [content_key(value) if isinstance(value, GraphModule) else value for value in attributes.values()]
    return (module.code, *zip(attributes, keys, strict=True))


def replace_units(stage: GraphModule, replacements: Mapping[CompilationUnit, torch.nn.Module]) -> torch.nn.Module:
    """Replace units of a stage by other modules; return the module of the stage, or that which replaces the whole stage."""
    for unit, module in replacements.items():
        if not unit.region_name:
            return module
        setattr(stage, unit.region_name, module)
    return stage


class TorchCompiler:
    """Compiles stages unit by unit, equal units once, however often and in however many stages they are called."""

    def __init__(self, mode: Compile) -> None:
        self._mode = mode
        self._compiled: dict[tuple[Any, ...], torch.nn.Module] = {}

    def compile_stage(self, stage: PreparedTorchStage) -> torch.nn.Module:
        """Return the module of a stage that runs compiled."""
        if (adapted := stage.code.adapted) is not None:
            adapted.compile_with(self.compile_module)
            return adapted
        return self.compile_module(stage.code.graph_module, stage.code.graph)

    def compile_module(self, stage_module: GraphModule, graph: Graph) -> torch.nn.Module:
        """Return the module of a graph that runs compiled."""
        if not self._mode:
            return stage_module
        whole = CompilationUnit(stage_module, "")
        units = [whole] if self._mode == "whole" else compilation_units(stage_module, graph)
        return replace_units(stage_module, {unit: self._compile(unit, bool(graph.symbols)) for unit in units})

    def _compile(self, unit: CompilationUnit, is_dynamic: bool) -> torch.nn.Module:
        key = (content_key(unit.module), is_dynamic)
        if key not in self._compiled:
            self._compiled[key] = torch.compile(module_of_fx(unit.module), dynamic=is_dynamic)  # type: ignore[assignment]
        return self._compiled[key]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileTarget:
    """What compiled code runs on: a type of device, its architecture, and a version of torch."""

    device: str
    arch: str
    torch_version: str

    @classmethod
    def of(cls, device: torch.device) -> "CompileTarget":
        """Return the target that a device of this machine is."""
        if device.type == "cuda":
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        else:
            arch = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}".lower()
        return cls(device=device.type, arch=arch, torch_version=str(torch.__version__))

    def __str__(self) -> str:
        return f"{self.device} ({self.arch}) with torch {self.torch_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledUnit:
    """A distinct unit of a bundle: the file with its code, or the reason why it has none and runs without being compiled.

    Attributes:
        locations: the units that are equal: the stage number, and the name of the region's module, empty for the whole stage.
    """

    locations: tuple[tuple[int, str], ...]
    file_name: str = ""
    sha256: str = ""
    reason: str = ""


def encode_list(bundle: Bundle, device: torch.device, units: Sequence[CompiledUnit]) -> str:
    """Return the content of ``compiled.json``. Law: `decode_list` of it returns the identity of the bundle, the target and the units."""
    parts = [
        {"places": unit.locations, "file": unit.file_name, "sha256": unit.sha256, "reason": unit.reason}
        for unit in units
    ]
    target = asdict(CompileTarget.of(device))
    content = {"format": "stagepack-compiled", "bundle": bundle.identity, "target": target, "parts": parts}
    return json.dumps(content, indent=1) + "\n"


def decode_list(content: str) -> tuple[str, CompileTarget, list[CompiledUnit]]:
    """Return the identity of the bundle, the target and the units of a ``compiled.json``."""
    fields = json.loads(content)
    units = [
        CompiledUnit(
            locations=tuple((stage_number, region_name) for stage_number, region_name in part["places"]),
            file_name=part["file"],
            sha256=part["sha256"],
            reason=part["reason"],
        )
        for part in fields["parts"]
    ]
    return fields["bundle"], CompileTarget(**fields["target"]), units


class CompiledFolder:
    """A folder of native code, opened for a bundle."""

    def __init__(self, path: str | os.PathLike[str], bundle: Bundle) -> None:
        self._path = Path(path)
        try:
            digest, self._target, units = decode_list((self._path / LIST_NAME).read_text())
        except OSError as error:
            raise CompiledError(
                f"{self._path / LIST_NAME}: {error.strerror}: expected a folder that stagepack compile wrote: choose it, or write it "
                f"(stagepack compile {bundle.path} -o {self._path})"
            ) from None
        except (ValueError, TypeError, KeyError, RecursionError):
            raise CompiledError(
                f"{self._path / LIST_NAME}: expected the file that stagepack compile wrote, found another one: compile the bundle again"
            ) from None
        if digest != bundle.identity:
            message = f"was compiled from the bundle {digest}, and this bundle is {bundle.identity}: compile this one"
            if digest == bundle.stored.identity:
                message = "has code of each stage, and stages are joined here: name one device for all, or pass compile=True (--compile)"
            raise CompiledError(f"{self._path} {message}")
        self._units = {location: unit for unit in units for location in unit.locations}
        self._packages: dict[tuple[str, torch.device], Any] = {}

    def load_stage(self, stage: PreparedTorchStage) -> torch.nn.Module:
        """Return the module of a stage that runs the native code of its units."""
        target, code = CompileTarget.of(stage.weights.device), stage.code
        if target != self._target:
            raise CompiledError(
                f"{self._path} was compiled for {self._target}, and this machine is {target}: compile the bundle here"
            )
        replacements = {}
        for unit in compilation_units(code.graph_module, code.graph):
            compiled = self._units.get((code.stage_number, unit.region_name))
            if compiled is not None and compiled.file_name:
                native_code = self._load(compiled, stage.weights.device)
                replacements[unit] = CompiledModule(native_code, unit.module.meta[INPUT_TYPES])
        return replace_units(code.graph_module, replacements)

    def _load(self, unit: CompiledUnit, device: torch.device) -> Any:
        key = (unit.file_name, device)
        if key not in self._packages:
            path = self._path / Path(unit.file_name).name
            if not path.is_file() or sha256_of_file(path) != unit.sha256:
                raise CompiledError(f"{path} is missing or was changed: compile the bundle again")
            self._packages[key] = load_package(str(path), device)
        return self._packages[key]


class CompiledModule(torch.nn.Module):
    """Native code with the call of the module that it was compiled from.

    The code expects contiguous activations, and reads others wrongly without an error: it is passed copies of these.
    """

    def __init__(self, native_code: Any, inputs: Sequence[Value | Weight]) -> None:
        super().__init__()
        self._run = native_code.boxed_run
        self._activations = [index for index, value in enumerate(inputs) if isinstance(value, Value)]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run the code."""
        input_tensors = list(inputs)
        for index in self._activations:
            tensor = input_tensors[index]
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                input_tensors[index] = tensor.clone(memory_format=torch.contiguous_format)
        return tuple(self._run(input_tensors))


class _Occurrence(NamedTuple):
    """A unit of a stage, with the symbols of its graph."""

    stage_number: int
    unit: CompilationUnit
    symbols: Sequence[Symbol]


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
            # The loader checks the sizes; torch 2.11 cannot prove the guards of grouped-query attention and would refuse its ranges.
            program = torch.export.export(
                module, example, dynamic_shapes=dynamic_shapes, prefer_deferred_runtime_asserts_over_guards=True
            )
            written_inputs = program.run_decompositions({}).graph_signature.user_inputs_to_mutate
            if written_inputs:
                return f"it writes {next(iter(written_inputs.values()))}"
            [output] = program.graph.find_nodes(op="output")
            results = [node.meta.get("val") if isinstance(node, torch.fx.Node) else node for node in output.args[0]]
            if any(not isinstance(result, torch.Tensor) for result in results):
                return "it returns numbers"
            with tempfile.TemporaryDirectory(dir=path.parent) as temporary_folder:
                compile_to_package(program, str(path), temporary_folder)
        except Exception as error:  # noqa: BLE001 - the compilers of torch raise errors of any class
            return f"{type(error).__name__}: {first_line(str(error).strip())[:200]}"
    return ""


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


def compile_stages(
    bundle: Bundle, stages: Mapping[int, PreparedTorchStage], options: LoadOptions
) -> dict[int, PreparedTorchStage]:
    """Return stages that run compiled; see `stagepack_loaders.base.Runtime.compile_stages`."""
    compiler, folder = TorchCompiler(options.compile), options.compiled
    compile_stage = compiler.compile_stage if folder is None else CompiledFolder(folder, bundle).load_stage
    return {
        stage_number: replace(stage, code=replace(stage.code, compiled_module=compile_stage(stage)))
        for stage_number, stage in stages.items()
    }


@errors_name_bundle
def compile_ahead(
    bundle: BundleSource,
    out: str | os.PathLike[str],
    device: str | torch.device = "cpu",
    *,
    allow_ops: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> list[CompiledUnit]:
    """Compile each distinct unit of a bundle with AOTInductor, for ``load(..., compiled=out)``. Reads no weights.

    A unit is a region that a stage calls several times, or a whole stage if most of its nodes are outside of such regions. A unit that
    cannot be compiled runs without; the result says why.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        out: the folder to write; it must not exist.
        device: a device of the kind that the code will run on.
        allow_ops: as for `stagepack.load`.
        progress: called with a line before each unit.

    Returns:
        The distinct units.

    Raises:
        OutputExistsError: `out` exists.
        WriteError: it cannot be written.
        DigestError, FormatError, DeviceError, OperatorError: see `stagepack.load`.

    Example:
        >>> compile_ahead("m.stagepack", "m.compiled", "cuda")
        >>> pipeline = stagepack.load("m.stagepack", ["cuda"], compiled="m.compiled")
    """
    opened_bundle, target_device = opened(bundle), parse_device(device)
    placement = dict.fromkeys(range(len(opened_bundle.stages)), target_device)
    loading = Loading(options=LoadOptions(allow_ops=allow_ops))
    distinct: dict[tuple[Any, ...], list[_Occurrence]] = {}
    for stage_number, stage in prepare_stages(opened_bundle, placement, loading).items():
        for unit in compilation_units(stage.code.graph_module, stage.code.graph):
            occurrence = _Occurrence(stage_number, unit, stage.code.graph.symbols)
            distinct.setdefault(content_key(unit.module), []).append(occurrence)
    return _compile_to_folder(opened_bundle, distinct, target_device, Path(os.path.abspath(out)), progress)


def _compile_to_folder(
    bundle: Bundle,
    distinct_units: Mapping[tuple[Any, ...], Sequence[_Occurrence]],
    device: torch.device,
    path: Path,
    progress: Callable[[str], None],
) -> list[CompiledUnit]:
    """Compile distinct units, each with a line of progress, into a folder that has a temporary name until it is complete.

    While a unit is compiled, this process and those that it starts have their temporary files in a folder inside of it.
    """
    if path.exists():
        raise OutputExistsError(f"{path} exists: choose another name, or remove it")
    check_outside_bundles(path, "a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = TemporaryFolder(path)
    except OSError as error:
        raise WriteError(f"{path}: cannot be created: {error.strerror or error}: choose another folder") from None
    units = []
    with temporary:
        try:
            for key, occurrences in distinct_units.items():
                first = occurrences[0]
                progress(f"compile {first.unit.region_name or 'stage'} of stage {first.stage_number}")
                file_name = f"{hashlib.sha256(repr(key).encode()).hexdigest()[:16]}.pt2"
                file_path = temporary.path / file_name
                locations = tuple((occurrence.stage_number, occurrence.unit.region_name) for occurrence in occurrences)
                if failure_reason := _compile_module(first.unit.module, first.symbols, device, file_path):
                    units.append(CompiledUnit(locations=locations, reason=failure_reason))
                else:
                    units.append(
                        CompiledUnit(locations=locations, file_name=file_name, sha256=sha256_of_file(file_path))
                    )
            (temporary.path / LIST_NAME).write_text(encode_list(bundle, device, units))
            temporary.path.rename(path)
        except OSError as error:
            raise WriteError(f"{path}: {error.strerror or error}") from None
    return units
