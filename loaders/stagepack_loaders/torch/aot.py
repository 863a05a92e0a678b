"""Compile the parts of a bundle ahead of time with AOTInductor, and run them.

A folder of compiled parts holds native code, so it is no bundle and lies in none: ``compiled.json`` names the bundle that it was made
of and what it runs on, and each distinct part is a file. Weights are given at the call, so one file serves all places of a region.
"""

import hashlib
import json
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import CompiledError, OutputExistsError, WriteError
from stagepack.format.digest import sha256_of_file
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.reader import Bundle
from stagepack.format.shapes import Symbol, evaluate_dim
from stagepack.torch_internals import compile_to_package, load_package
from stagepack_loaders.torch.build import INPUTS, named
from stagepack_loaders.torch.compile import CompilationUnit, key, parts, replace_parts

_LIST = "compiled.json"
_ALIGNMENT = 16  # bytes, on which vectorized code relies

# Called with one line that says which part is compiled.
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What compiled code runs on."""

    device: str
    arch: str
    torch_version: str

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """The target that a device of this machine is."""
        if device.type == "cuda":
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        else:
            arch = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}".lower()
        return cls(device=device.type, arch=arch, torch_version=str(torch.__version__))

    def __str__(self) -> str:
        """For a message."""
        return f"{self.device} ({self.arch}) with torch {self.torch_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledPart:
    """A part of a bundle: the file that holds its code; or the reason why it has none, and runs as it is.

    Attributes:
        places: where it is called: the stage, and the name of the region there, empty for the whole stage.
        file: the name of its file.
        sha256: of the file's content.
    """

    places: tuple[tuple[int, str], ...]
    file: str = ""
    sha256: str = ""
    reason: str = ""


def compile_parts(
    bundle: Bundle,
    stages: Sequence[tuple[GraphModule, Graph]],
    device: torch.device,
    out: str | os.PathLike[str],
    progress: Progress = lambda _: None,
) -> list[CompiledPart]:
    """Compile each distinct part of the stages of a bundle into a folder.

    Args:
        bundle: what the stages are of.
        stages: all of them, built for `device`.
        device: what to compile for.
        out: the folder to write; it must not exist.
        progress: is told what is done.

    Raises:
        OutputExistsError: `out` exists.
        WriteError: it cannot be written.
    """
    path = Path(out)
    if path.exists():
        raise OutputExistsError(f"{path} exists: choose another name, or remove it")
    distinct: dict[tuple[Any, ...], list[tuple[int, CompilationUnit, Graph]]] = {}
    for number, (module, graph) in enumerate(stages):
        for part in parts(module, graph):
            distinct.setdefault(key(part.module), []).append((number, part, graph))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}: choose another place") from None
    try:
        found = []
        for found_key, places in distinct.items():
            number, part, graph = places[0]
            progress(f"compile {part.name or 'stage'} of stage {number}")
            file = f"{_digest(found_key)[:16]}.pt2"
            reason = _compile(part.module, graph.symbols, device, work / file)
            found.append(
                CompiledPart(
                    places=tuple((stage, part.name) for stage, part, _ in places),
                    file="" if reason else file,
                    sha256="" if reason else sha256_of_file(work / file),
                    reason=reason,
                )
            )
        listed = {"format": "stagepack-compiled", "bundle": bundle.digest, "target": asdict(Target.of(device))}
        content = {**listed, "parts": [asdict(part) for part in found]}
        (work / _LIST).write_text(json.dumps(content, indent=1) + "\n")
        work.chmod(0o755)
        work.rename(path)
    except OSError as error:
        raise WriteError(f"{path}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return found


class CompiledFolder:
    """A folder of compiled parts, opened for a bundle."""

    def __init__(self, path: str | os.PathLike[str], bundle: Bundle) -> None:
        """Read what the folder says of itself.

        Raises:
            CompiledError: it is no such folder, or of another bundle.
        """
        self._path = Path(path)
        try:
            content = json.loads((self._path / _LIST).read_text())
            self._target = Target(**content["target"])
            self._parts = [CompiledPart(**part) for part in content["parts"]]
            made_of = content["bundle"]
        except (OSError, ValueError, TypeError, KeyError):
            raise CompiledError(
                f"{self._path} is no folder that stagepack compile wrote: compile the bundle again"
            ) from None
        if made_of != bundle.digest:
            raise CompiledError(
                f"{self._path} was compiled from the bundle {made_of}, this one is {bundle.digest}: compile it anew"
            )
        self._runners: dict[str, Any] = {}

    def stage(self, number: int, module: GraphModule, graph: Graph, device: torch.device) -> torch.nn.Module:
        """The module of a stage that runs the compiled parts.

        Raises:
            CompiledError: the code is for another target, or a file is not the one listed.
        """
        here = Target.of(device)
        if here != self._target:
            raise CompiledError(f"{self._path} was compiled for {self._target}, this is {here}: compile it anew")
        known = {(stage, name): part for part in self._parts for stage, name in part.places}
        chosen = {part: known.get((number, part.name)) for part in parts(module, graph)}
        return replace_parts(
            module,
            {part: self._load(entry, part.module, device) for part, entry in chosen.items() if entry and entry.file},
        )

    def _load(self, entry: CompiledPart, module: GraphModule, device: torch.device) -> torch.nn.Module:
        name = f"{entry.file} {device}"
        if name not in self._runners:
            file = self._path / Path(entry.file).name
            if not file.is_file() or sha256_of_file(file) != entry.sha256:
                raise CompiledError(f"{file} is missing or was changed: compile the bundle again")
            self._runners[name] = load_package(str(file), device)
        return CompiledModule(self._runners[name], module.meta[INPUTS])


class CompiledModule(torch.nn.Module):
    """Compiled code as the module that it was made of.

    It was compiled for contiguous activations, and would read others wrongly without a word; so it is given copies of these.
    """

    def __init__(self, runner: Any, inputs: Sequence[Value | Weight]) -> None:
        """`runner` is what torch loaded; `inputs` are the inputs of the module."""
        super().__init__()
        self._run = runner.boxed_run
        self._activations = [place for place, value in enumerate(inputs) if isinstance(value, Value)]

    def forward(self, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Run."""
        given = list(inputs)
        for place in self._activations:
            tensor = given[place]
            if not tensor.is_contiguous() or tensor.data_ptr() % _ALIGNMENT:
                given[place] = tensor.clone(memory_format=torch.contiguous_format)
        return tuple(self._run(given))


def _digest(found: tuple[Any, ...]) -> str:
    return hashlib.sha256(repr(found).encode()).hexdigest()


def _compile(module: GraphModule, symbols: Sequence[Symbol], device: torch.device, file: Path) -> str:
    """Compile a module into a file; return the reason when that cannot be done."""
    inputs: list[Value | Weight] = module.meta[INPUTS]
    numbers = [value.name for value in inputs if isinstance(value, Value) and value.dtype.startswith("sym")]
    if numbers:
        return f"it takes the number {numbers[0]}"
    sizes = {symbol.name: _size(symbol) for symbol in symbols}
    dims = {symbol.name: torch.export.Dim(symbol.name, min=symbol.min, max=symbol.max) for symbol in symbols}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            example = tuple(_tensor(value, sizes, device) for value in inputs)
            program = torch.export.export(module, example, dynamic_shapes=tuple(_dims(value, dims) for value in inputs))
            written = program.run_decompositions({}).graph_signature.user_inputs_to_mutate
            if written:
                return f"it writes {next(iter(written.values()))}"
            if any(not isinstance(leaf, torch.Tensor) for leaf in _results(program)):
                return "it gives numbers"
            compile_to_package(program, str(file))
        except Exception as error:  # noqa: BLE001 - torch's compilers raise whatever they like; the part runs as it is
            return f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error).strip() else ''}"
    return ""


def _results(program: torch.export.ExportedProgram) -> Collection[Any]:
    output = next(node for node in reversed(program.graph.nodes) if node.op == "output")
    return [node.meta.get("val") if isinstance(node, torch.fx.Node) else node for node in output.args[0]]


def _size(symbol: Symbol) -> int:
    """A size to compile at: that of the example, but neither 0 nor 1, which compilers take for constants."""
    wanted = max(2, symbol.example or 0, symbol.min or 0)
    return wanted if symbol.max is None else min(wanted, symbol.max)


def _tensor(value: Value | Weight, sizes: dict[str, int], device: torch.device) -> torch.Tensor:
    dtype = named(value.dtype, torch.dtype)
    if isinstance(value, Weight):
        strides = value.strides if value.strides is not None else torch.empty(value.shape, device="meta").stride()
        return torch.empty_strided(value.shape, strides, dtype=dtype, device=device).zero_()
    return torch.zeros([evaluate_dim(dim, sizes) for dim in value.shape], dtype=dtype, device=device)


def _dims(value: Value | Weight, dims: dict[str, Any]) -> dict[int, Any]:
    """The dimensions that may change: by the name of the symbol, or found by torch where they are computed of symbols."""
    if isinstance(value, Weight):
        return {}
    return {
        place: dims[dim] if isinstance(dim, str) else torch.export.Dim.AUTO
        for place, dim in enumerate(value.shape)
        if not isinstance(dim, int)
    }
