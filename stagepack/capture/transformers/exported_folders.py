"""The folder that transformers' exporters write: a manifest, and a ``.pt2`` file for each component of a model."""

import collections
import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec
from torch.export import ExportedProgram

from stagepack.capture.imports import import_transformers
from stagepack.capture.programs import load_program
from stagepack.capture.transformers.model_folders import EXPORT_MANIFEST, export_folder
from stagepack.capture.united_weights import UnitedWeights
from stagepack.errors import CaptureError
from stagepack.format.rules import is_identifier
from stagepack.torch_internals import input_spec_text, register_transformers_class

_NEWEST_SCHEMA: Final = 1
_FORMAT: Final = "dynamo"
# A class of transformers in the text of a container spec.
_CLASS: Final = re.compile(r'"type": "(transformers(?:\.\w+)*)[.:](\w+)"')


class _Metadata(msgspec.Struct):
    """What an exporter has recorded of a component, as far as it is used here."""

    in_spec: str | None = None
    out_spec: str | None = None


class _Component(msgspec.Struct):
    file: str
    metadata: _Metadata = msgspec.field(default_factory=_Metadata)


class _Manifest(msgspec.Struct):
    export_format: str
    components: dict[str, _Component]
    schema_version: int = 1


def read_exported_folder(source: str) -> dict[str, ExportedProgram]:
    """Return the programs of a folder by the names of their components; each weight is one tensor under one name in all of them.

    Do not pass a folder that you do not trust, as with a ``.pt2`` file: torch reads parts of these files with pickle.
    """
    folder = Path(export_folder(source) or source)
    components = _read_manifest(folder / EXPORT_MANIFEST)
    for name, component in components.items():
        if not (folder / component.file).is_file():
            raise CaptureError(
                f"{folder / component.file}: no such file: it has the component {name} of {EXPORT_MANIFEST}"
            )
    # The largest first, which has the weights of the whole model: those of each further one are freed before the next is read.
    names = sorted(components, key=lambda name: -(folder / components[name].file).stat().st_size)
    programs, weights = {}, UnitedWeights()
    for name in names:
        programs[name] = _read_component(folder, name, components[name])
        try:
            weights.add(name, programs[name])
        except CaptureError as error:
            raise CaptureError(f"{folder}: {error}") from error
    return {name: programs[name] for name in components}


def _read_manifest(path: Path) -> dict[str, _Component]:
    try:
        fields = json.loads(path.read_bytes(), object_pairs_hook=_distinct)
        # A newer manifest may have other fields: its version is looked at first.
        version = fields.get("schema_version", 1) if isinstance(fields, dict) else None
        if isinstance(version, int) and version > _NEWEST_SCHEMA:
            raise CaptureError(
                f"{path}: expected schema_version {_NEWEST_SCHEMA}, found {version}: export the model again with a transformers that "
                "writes it, or update stagepack"
            )
        manifest = msgspec.convert(fields, _Manifest)
    except (OSError, ValueError, RecursionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CaptureError(f"{path}: expected the manifest of an export of transformers: {reason}") from error
    if manifest.export_format != _FORMAT:
        raise CaptureError(
            f"{path}: expected export_format {_FORMAT!r}, found {manifest.export_format!r}: export the model with DynamoExporter of "
            "transformers.exporters"
        )
    if not manifest.components:
        raise CaptureError(f"{path}: expected at least one component, found none")
    _check_components(path, manifest.components)
    return manifest.components


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    counts = collections.Counter(key for key, _ in pairs)
    if repeated := [key for key, count in counts.items() if count > 1]:
        raise ValueError(f"expected {repeated[0]!r} once, found it {counts[repeated[0]]} times")
    return dict(pairs)


def _check_components(path: Path, components: dict[str, _Component]) -> None:
    """Refuse names that are no entry points, and files that are outside of the folder or of several components."""
    lowercase_names: dict[str, str] = {}
    component_of_file: dict[str, str] = {}
    for name, component in components.items():
        if not is_identifier(name):
            raise CaptureError(
                f"{path}: expected names of components that are ASCII identifiers, as those of entry points are, found {name[:80]!r}"
            )
        if other := lowercase_names.get(name.lower()):
            raise CaptureError(f"{path}: the components {other!r} and {name!r} have one name, where case is ignored")
        lowercase_names[name.lower()] = name
        file_name = component.file
        if not file_name.endswith(".pt2") or "\0" in file_name or re.search(r"[/\\:]", file_name):
            raise CaptureError(
                f"{path}: component {name}: expected the name of a .pt2 file in this folder, found {file_name[:80]!r}"
            )
        if other := component_of_file.get(file_name):
            raise CaptureError(f"{path}: the components {other} and {name} have one file, {file_name}")
        component_of_file[file_name] = name


def _read_component(folder: Path, name: str, component: _Component) -> ExportedProgram:
    specs = (component.metadata.in_spec, component.metadata.out_spec)
    for module_name, class_name in _classes(*specs):
        _register(folder, module_name, class_name)
    path = folder / component.file
    program = load_program(path)
    if specs[0] is not None and input_spec_text(program) != specs[0]:
        raise CaptureError(
            f"{path}: its inputs are other than those that {EXPORT_MANIFEST} states for the component {name}: it is the file of another "
            "component, or was written by another export"
        )
    return program


def _classes(*specs: str | None) -> Iterator[tuple[str, str]]:
    for spec in specs:
        yield from _CLASS.findall(spec or "")


def _register(folder: Path, module_name: str, class_name: str) -> None:
    """Let torch read a class of transformers: results register themselves when their module is imported, caches do not."""
    import_transformers()
    try:
        register_transformers_class(getattr(importlib.import_module(module_name), class_name))
    except (ImportError, AttributeError) as error:
        raise CaptureError(
            f"{folder / EXPORT_MANIFEST}: this transformers has no {module_name}.{class_name}: install the version that {EXPORT_MANIFEST} "
            "names under packages"
        ) from error
