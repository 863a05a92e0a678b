"""A bundle -> the same bundle with an ONNX file for each stage that has an ONNX form."""

import logging
import os
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from stagepack.errors import WriteError
from stagepack.format.folded import trivially_folded
from stagepack.format.graph import Graph
from stagepack.format.manifest import Onnx
from stagepack.format.onnx import onnx_element_type
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter
from stagepack.graph.aliasing import alias_classes
from stagepack.onnx.check import Checked, check
from stagepack.onnx.explain import explain
from stagepack.onnx.model import OnnxFiles, Place, finish
from stagepack.onnx.trace import Written, trace
from stagepack_loaders.torch.build import build_graph_module
from stagepack_loaders.torch.operators import resolve_operators
from stagepack_loaders.torch.weights import WeightCache

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class AddedOnnx:
    """What became of a bundle.

    Attributes:
        bundle: the bundle with the ONNX files.
        torch_only: why a stage has none, by its number.
        checked: for each other stage, how far its answer is from that in torch.
    """

    bundle: Bundle
    torch_only: Mapping[int, str]
    checked: Mapping[int, Checked]


def add_onnx(
    bundle: str | os.PathLike[str] | Bundle,
    *,
    allow_ops: Collection[str] = (),
    progress: Callable[[str], None] = lambda _: None,
) -> AddedOnnx:
    """Add an ONNX file to each stage of a bundle, made by ``torch.onnx`` from the stage itself.

    The initializers point into the weight files of the bundle: no weight is copied. Each stage then answers the example in ONNX
    Runtime. One that has no ONNX form, or answers otherwise than in torch, has no file and runs in torch only.

    Args:
        bundle: its folder, or what `stagepack.open` gave. It is replaced when all is done.
        allow_ops: namespaces of custom operators that may run while a stage is traced.
        progress: is told what is done.

    Raises:
        NotABundleError, VersionError: there is no bundle that this stagepack reads.
        DigestError, FormatError: a file is damaged, or breaks a rule of the format.
        OperatorError: an operator is missing here, not allowed, or has another schema.
        WriteError: the disk is full or the like.
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle(bundle)
    opened.check_digests(opened.files)
    torch_only: dict[int, str] = {}
    made: dict[int, OnnxFiles] = {}
    for number in range(len(opened.stages)):
        progress(f"convert stage {number}")
        found = _convert(opened, number, allow_ops)
        if isinstance(found, str):
            torch_only[number] = found
        else:
            made[number] = found
    progress("run the example")
    out = opened.path.resolve()  # what a link stands for
    with _folder_beside(out) as folder:
        _write(opened, made, folder / "checked", overwrite=False)
        checked = dict(enumerate(check(Bundle(folder / "checked"), allow_ops)))
    for number, one in checked.items():
        if number in made and not one.within:
            torch_only[number] = one.reason or f"its answer differs by {one.difference:g}"
            del made[number]
    _write(opened, made, out, overwrite=True)
    kept = {number: checked[number] for number in made}
    return AddedOnnx(bundle=Bundle(opened.path), torch_only=dict(sorted(torch_only.items())), checked=kept)


@contextmanager
def _folder_beside(path: Path) -> Iterator[Path]:
    """A folder that is gone afterwards, where files can be linked to.

    Raises:
        WriteError: it cannot be made.
    """
    try:
        made = tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.", suffix=".part")
    except OSError as error:
        raise WriteError(f"{path}: cannot write there: {error.strerror}: {path.parent}") from None
    with made as folder:
        yield Path(folder)


def _write(bundle: Bundle, made: Mapping[int, OnnxFiles], out: Path, *, overwrite: bool) -> None:
    """Write a bundle with these ONNX files, by the number of their stage, and no others."""
    replaced = {name for stage in bundle.stages for name in stage.onnx_files}
    stages = [msgspec.structs.replace(stage, onnx=None) for stage in bundle.stages]
    with BundleWriter(out, overwrite=overwrite) as writer:
        for file in bundle.manifest.files:
            if file.name not in replaced:
                writer.link_file(bundle.path / file.name, file)
        for number, files in made.items():
            name, own = f"stage-{number}.onnx", _own(number)
            writer.write_file(name, [files.model])
            if files.tensors:
                writer.write_tensors(own, files.tensors, files.read)
            onnx = Onnx(model=name, weights=(own,) if files.tensors else ())
            stages[number] = msgspec.structs.replace(stages[number], onnx=onnx)
        writer.finish(msgspec.structs.replace(bundle.manifest, stages=tuple(stages)))


def _own(number: int) -> str:
    """The weight file for what only the ONNX file of a stage uses."""
    return f"stage-{number}.onnx.safetensors"


def _convert(bundle: Bundle, number: int, allow_ops: Collection[str]) -> OnnxFiles | str:
    """The ONNX files of a stage, or why it has none."""
    graph = bundle.graph(number)
    written = _written(graph)
    if reason := _refused(bundle, number, graph, written):
        return reason
    targets = resolve_operators(graph.ops, allow_ops, bundle.stages[number].graph)
    module = build_graph_module(trivially_folded(graph), graph, targets, _CPU)
    places = bundle.tensors(number, graph)
    cache = WeightCache()
    tensors = {weight.value: cache.read(weight, places, _CPU) for weight in graph.weights}
    edges = {edge.name: edge for edge in bundle.edges}
    place = Place(number=number, stages=len(bundle.stages), tensors=places)
    program = None
    with _quiet():
        try:
            program = trace(module, graph, targets, tensors, written)
            converted = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False)
            assert converted is not None
            return finish(converted.model, graph, edges, written, place, _own(number))
        except Exception as error:  # noqa: BLE001 - tracing, torch's exporter and its libraries raise what they like
            return explain(graph, program, error)


def _written(graph: Graph) -> Written:
    memory = alias_classes(graph)
    return Written(
        state=tuple(weight.value for weight in graph.weights if memory.is_written(weight.value)),
        inputs=tuple(value.name for value in graph.inputs if memory.is_written(value.name)),
    )


def _refused(bundle: Bundle, number: int, graph: Graph, written: Written) -> str | None:
    """What of a stage ONNX cannot say, seen without tracing it."""
    names = {weight.value: weight for weight in graph.weights}
    memory = [names[value].stored for value in written.state]
    if len(set(memory)) < len(memory):
        shared = next(weight.names[0] for weight in graph.weights if memory.count(weight.stored) > 1)
        return f"it writes {shared} in memory that another weight shares"
    edges = {edge.name: edge for edge in bundle.edges}
    stage = bundle.stages[number]
    for name in (*stage.inputs, *stage.outputs):
        if onnx_element_type(edges[name].dtype) is None:
            return f"ONNX has no type for {edges[name].dtype}, of the edge {name}"
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep back what torch's exporter and its libraries say to their own developers."""
    loggers = {logging.getLogger(name) for name in ("torch.onnx", "onnx_ir", "onnxscript")}
    levels = {logger: logger.level for logger in loggers}
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)
