"""A folder of native code, compiled ahead of time from the units of a bundle.

The folder is no bundle and is in none: ``compiled.json`` names the bundle that it was compiled from and what the code runs on, and each
distinct unit is a file. Weights are passed at each call, so one file serves all calls of a region.
"""

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule

from stagepack.errors import CompiledError
from stagepack.format.digest import sha256_of_file
from stagepack.format.graph import Graph, Value, Weight
from stagepack.format.reader import Bundle
from stagepack.torch_internals import load_package
from stagepack_loaders.torch.build import INPUT_TYPES
from stagepack_loaders.torch.compilation_units import compilation_units, replace_units

LIST_NAME = "compiled.json"
_ALIGNMENT = 16  # bytes, which vectorized code relies on


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What compiled code runs on: a type of device, its architecture, and a version of torch."""

    device: str
    arch: str
    torch_version: str

    @classmethod
    def of(cls, device: torch.device) -> "Target":
        """Return the target that a device of this machine is."""
        if device.type == "cuda":
            arch = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
        else:
            arch = f"{platform.system()} {platform.machine()} {torch.backends.cpu.get_cpu_capability()}".lower()
        return cls(device=device.type, arch=arch, torch_version=str(torch.__version__))

    def __str__(self) -> str:
        """Return the target as a message names it."""
        return f"{self.device} ({self.arch}) with torch {self.torch_version}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledUnit:
    """A distinct unit of a bundle: the file with its code, or the reason why it has none and runs without being compiled.

    Attributes:
        locations: the units that are equal: the stage number, and the name of the region's module, empty for the whole stage.
        file_name: the name of the file; empty if there is none.
        sha256: the digest of the file, in hexadecimal.
        reason: why there is no file.
    """

    locations: tuple[tuple[int, str], ...]
    file_name: str = ""
    sha256: str = ""
    reason: str = ""


def encode_list(bundle: Bundle, device: torch.device, units: Sequence[CompiledUnit]) -> str:
    """Return the content of ``compiled.json``. Law: `decode_list` of it returns the identity of the bundle, the target and the units."""
    content_entries = [
        {"places": unit.locations, "file": unit.file_name, "sha256": unit.sha256, "reason": unit.reason}
        for unit in units
    ]
    header = {"format": "stagepack-compiled", "bundle": bundle.identity, "target": asdict(Target.of(device))}
    return json.dumps({**header, "parts": content_entries}, indent=1) + "\n"


def decode_list(content: str) -> tuple[str, Target, list[CompiledUnit]]:
    """Return the identity of the bundle, the target and the units of a ``compiled.json``."""
    content_entries = json.loads(content)
    units = [
        CompiledUnit(
            locations=tuple((stage_number, region_name) for stage_number, region_name in unit_entry["places"]),
            file_name=unit_entry["file"],
            sha256=unit_entry["sha256"],
            reason=unit_entry["reason"],
        )
        for unit_entry in content_entries["parts"]
    ]
    return content_entries["bundle"], Target(**content_entries["target"]), units


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
            raise CompiledError(
                f"{self._path} was compiled from the bundle {digest}, and this bundle is {bundle.identity}: compile this one"
            )
        self._units = {location: unit for unit in units for location in unit.locations}
        self._packages: dict[tuple[str, torch.device], Any] = {}

    def load_stage(
        self, stage_number: int, stage_module: GraphModule, graph: Graph, device: torch.device
    ) -> torch.nn.Module:
        """Return the module of a stage that runs the native code of its units."""
        target = Target.of(device)
        if target != self._target:
            raise CompiledError(
                f"{self._path} was compiled for {self._target}, and this machine is {target}: compile the bundle here"
            )
        replacements = {}
        for unit in compilation_units(stage_module, graph):
            compiled = self._units.get((stage_number, unit.region_name))
            if compiled is not None and compiled.file_name:
                replacements[unit] = CompiledModule(self._load(compiled, device), unit.module.meta[INPUT_TYPES])
        return replace_units(stage_module, replacements)

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
