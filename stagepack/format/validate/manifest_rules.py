"""The rules on the manifest (SPEC sections 4 and 6, O1)."""

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.chunks import File, chunk_count, file_digest
from stagepack.format.manifest import Edge, EntryPoint, Manifest, Stage
from stagepack.format.plan import Plan, PlannedStage, Run
from stagepack.format.rules import (
    DIGEST_PATTERN,
    FILE_NAME_PATTERN,
    MANIFEST_NAME,
    SIGNATURE_NAME,
    WORD_PATTERN,
    BrokenRule,
    format_names,
    is_identifier,
)
from stagepack.format.shapes import symbol_names
from stagepack.format.tree import signature_features, value_names
from stagepack.format.validate.types import check_depth, check_guards, check_signature, check_symbols, check_type


def check_manifest(manifest: Manifest) -> Iterator[Problem]:
    """Yield the problems of a manifest by itself. The rules that need other files are checked elsewhere."""
    for rule, location, message in _check(manifest):
        yield Problem(rule=rule, where=f"{MANIFEST_NAME}: {location}", message=message)


def _check(manifest: Manifest) -> Iterator[BrokenRule]:
    if manifest.format != "stagepack":
        yield "M1", "format", f"expected 'stagepack', found {manifest.format[:80]!r}"
    yield from check_files(manifest.files)
    if not WORD_PATTERN.fullmatch(manifest.device):
        yield "M11", "device", f"{manifest.device[:80]!r} is not a device type"
    yield from _check_entry_point_names(manifest.entry_points)
    listed = {file.name for file in manifest.files}
    for entry_point in manifest.entry_points:
        # The location is as short as it can be for the usual bundle, whose only entry point needs no name.
        prefix = f"{entry_point.name[:80]}, " if len(manifest.entry_points) > 1 else ""
        for rule, location, message in _check_entry_point(entry_point, listed, manifest.features):
            yield rule, f"{prefix}{location}", message


def _check_entry_point_names(entry_points: tuple[EntryPoint, ...]) -> Iterator[BrokenRule]:
    names = [entry_point.name for entry_point in entry_points]
    if not 1 <= len(names) <= limits.ENTRY_POINTS:
        yield "M15", "entry_points", f"expected 1 to {limits.ENTRY_POINTS}, found {len(names)}"
    if len({name.lower() for name in names}) != len(names) or not all(map(is_identifier, names)):
        yield "M15", "entry_points", f"a name is not an identifier, or is a duplicate: {format_names(names)}"


def _check_entry_point(entry_point: EntryPoint, listed: set[str], features: Collection[str]) -> Iterator[BrokenRule]:
    if not 1 <= len(entry_point.stages) <= limits.STAGES:
        yield "M4", "stages", f"expected 1 to {limits.STAGES}, found {len(entry_point.stages)}"
    for stage_number, stage in enumerate(entry_point.stages):
        yield from _check_stage_entry(stage, listed, f"stage {stage_number}")
    if repeated := _repeated([stage.graph for stage in entry_point.stages]):
        yield "M6", "stages", f"several stages have the graphs {format_names(repeated)}"
    if repeated := _repeated([stage.onnx.model for stage in entry_point.stages if stage.onnx is not None]):
        yield "O1", "stages", f"several stages have the ONNX models {format_names(repeated)}"
    if entry_point.example is not None and entry_point.example not in listed:
        yield "M6", "example", f"{entry_point.example[:80]!r} is not among the files"
    yield from _check_places(entry_point.stages)
    if entry_point.plan is not None:
        yield from _check_plan(entry_point.plan, entry_point.stages)
    yield from check_symbols(entry_point.symbols)
    yield from _check_input_symbols(entry_point)
    yield from check_guards(entry_point.guards, entry_point.symbols)
    depth_problems = list(check_depth(entry_point.signature, "signature"))
    yield from depth_problems
    if not depth_problems:
        yield from _check_edges(entry_point)
        yield from check_signature(entry_point.signature, "signature")
        yield from _check_signature_edges(entry_point)
        if not set(signature_features([entry_point.signature])) <= set(features):
            yield "T5", "features", "expected named_tuples, which the signature has, found none"


def _check_input_symbols(entry_point: EntryPoint) -> Iterator[BrokenRule]:
    input_dims = [
        dim
        for edge in entry_point.edges
        if edge.producer is None
        for dim in (*edge.shape, *(() if edge.expr is None else (edge.expr,)))
    ]
    input_names = {symbol_name for dim in input_dims for symbol_name in symbol_names(dim)}
    for symbol in entry_point.symbols:
        if symbol.example is None and symbol.name in input_names:
            yield "S1", f"symbol {symbol.name[:80]}", "expected an example, since it is a size of an input of the model"


def check_files(files: tuple[File, ...]) -> Iterator[BrokenRule]:
    """Yield the problems of a list of files."""
    seen = {MANIFEST_NAME, SIGNATURE_NAME}
    for file in files:
        location = f"file {file.name[:80]!r}"
        if not FILE_NAME_PATTERN.fullmatch(file.name):
            yield "M5", location, "not a plain file name"
        elif file.name.lower() in seen:
            yield "M5", location, "duplicate name, where case is ignored, or a reserved name"
        seen.add(file.name.lower())
        if file.size < 0 or not DIGEST_PATTERN.fullmatch(file.blake3):
            yield "M5", location, "the size is negative, or the digest is not 64 hexadecimal digits"
        else:
            yield from _check_chunks(file, location)


def _check_chunks(file: File, location: str) -> Iterator[BrokenRule]:
    """Yield the problem of the chunk digests of a file, if there is one."""
    expected_count = chunk_count(file.size)
    # A file of one chunk has the digest of the chunk, which is not listed again.
    if len(file.chunks) != (expected_count if expected_count > 1 else 0):
        listed = expected_count if expected_count > 1 else "no"
        yield "M14", location, f"expected {listed} chunks for {file.size} bytes, found {len(file.chunks)}"
    elif not all(DIGEST_PATTERN.fullmatch(digest) for digest in file.chunks):
        yield "M14", location, "the digest of a chunk is not 64 hexadecimal digits"
    elif file.chunks and (actual_digest := file_digest(file.chunks)) != file.blake3:
        yield "M14", location, f"the digests of its chunks give blake3 {actual_digest}, the file states {file.blake3}"


def _check_stage_entry(stage: Stage, listed: set[str], location: str) -> Iterator[BrokenRule]:
    for file_name in (stage.graph, *stage.weights):
        if file_name not in listed:
            yield "M6", location, f"uses {file_name[:80]!r}, which is not among the files"
    if repeated := _repeated(stage.weights):
        yield "M6", location, f"names the weight files {format_names(repeated)} several times"
    for file_name in stage.onnx_files:
        if file_name not in listed:
            yield "O1", location, f"its ONNX model uses {file_name[:80]!r}, which is not among the files"
    if stage.onnx is not None and (repeated := _repeated(stage.onnx.weights)):
        yield "O1", location, f"its ONNX model names the weight files {format_names(repeated)} several times"
    if min(stage.nodes, stage.weight_bytes, stage.flops) < 0:
        yield "M7", location, "nodes, weight_bytes or flops is negative"


def _repeated(file_names: Sequence[str]) -> list[str]:
    """The names that occur several times."""
    return [file_name for file_name, count in Counter(file_names).items() if count > 1]


def _check_places(stages: tuple[Stage, ...]) -> Iterator[BrokenRule]:
    for stage_number, stage in enumerate(stages):
        location = f"stage {stage_number}"
        if not _are_ascending(stage.places) or stage.added < 0:
            yield "M12", location, "places are not ascending runs, or added is negative"
        elif stage.places and stage.added + sum(count for _, count in stage.places) != stage.nodes:
            yield "M12", location, f"expected added and places to give {stage.nodes} nodes"
    runs = [run for stage in stages for run in stage.places]
    if runs and any(not stage.places and stage.nodes > stage.added for stage in stages):
        yield "M12", "stages", "some stages have places and others do not"
    covered_end = 0
    for first, count in sorted(runs):
        if first > covered_end:
            yield "M12", "stages", f"node {covered_end} of the whole model is in no stage"
            break
        covered_end = max(covered_end, first + count)


def _check_plan(plan: Plan, stages: Sequence[Stage]) -> Iterator[BrokenRule]:
    if len(plan.stages) != len(stages):
        yield "M13", "plan", f"expected {len(stages)} stages, found {len(plan.stages)}"
    for stage_number, stage in enumerate(plan.stages):
        location = f"plan, stage {stage_number}"
        if not _are_ascending(stage.nodes) or min(_costs(stage)) < 0:
            yield "M13", location, "the nodes are not ascending runs, or a cost is negative"
        if (
            not limits.SLOWEST_SPEED <= stage.speed <= limits.FASTEST_SPEED
            or len(stage.module) > limits.NAME_CHARACTERS
        ):
            yield "M13", location, "the speed is not from 0.000001 to 1000000, or the name of the module is too long"
    covered_end = 0
    for first, count in sorted(run for stage in plan.stages for run in stage.nodes):
        if first != covered_end:
            yield "M13", "plan", f"node {min(first, covered_end)} is in no stage or in two"
            return
        covered_end = first + count
    node_count = max((first + count for stage in stages for first, count in stage.places), default=covered_end)
    if covered_end != node_count:
        yield "M13", "plan", f"expected the {node_count} nodes of the whole model, found {covered_end}"


def _costs(stage: PlannedStage) -> tuple[int, ...]:
    return (
        stage.picoseconds,
        stage.flops,
        stage.bytes,
        stage.weight_bytes,
        stage.received,
        stage.receiving,
        stage.memory,
        stage.memory_limit or 0,
    )


def _are_ascending(runs: tuple[Run, ...]) -> bool:
    """Whether no run is empty, runs ascend, and there is a gap between two runs."""
    valid = all(first >= 0 and count >= 1 for first, count in runs)
    return valid and all(first + count < next_first for (first, count), (next_first, _) in itertools.pairwise(runs))


def _check_edges(entry_point: EntryPoint) -> Iterator[BrokenRule]:
    stages = range(len(entry_point.stages))
    symbols = {symbol.name for symbol in entry_point.symbols}
    result_names = set(value_names(entry_point.signature.result))
    seen: set[str] = set()
    inputs: dict[int, list[str]] = {stage_number: [] for stage_number in stages}
    outputs: dict[int, list[str]] = {stage_number: [] for stage_number in stages}
    for edge in entry_point.edges:
        location = f"edge {edge.name[:80]}"
        if not is_identifier(edge.name) or edge.name in seen:
            yield "M8", location, "the name is not an identifier, or is a duplicate"
        seen.add(edge.name)
        yield from check_type(edge, symbols, "M8", location)
        if not _goes_forward(edge, stages):
            consumers = format_names(edge.consumers)
            yield "M9", location, f"expected consumers after stage {edge.producer}, ascending, found {consumers}"
            continue
        if edge.producer is not None:
            outputs[edge.producer].append(edge.name)
            if not edge.consumers and edge.name not in result_names:
                yield "M9", location, "neither a stage nor the result uses it"
        for consumer in edge.consumers:
            inputs[consumer].append(edge.name)
    for stage_number, stage in enumerate(entry_point.stages):
        if list(stage.inputs) != inputs[stage_number] or list(stage.outputs) != outputs[stage_number]:
            yield "M10", f"stage {stage_number}", "its inputs or outputs differ from those of the edges, in their order"


def _goes_forward(edge: Edge, stages: range) -> bool:
    """Whether producer and consumers exist, and ascend."""
    ends = (*(() if edge.producer is None else (edge.producer,)), *edge.consumers)
    return all(end in stages for end in ends) and all(earlier < later for earlier, later in itertools.pairwise(ends))


def _check_signature_edges(entry_point: EntryPoint) -> Iterator[BrokenRule]:
    """Yield the problems of the signature and the edges together."""
    parameter_names = list(value_names(*(parameter.tree for parameter in entry_point.signature.parameters)))
    input_edges = [edge.name for edge in entry_point.edges if edge.producer is None]
    if sorted(parameter_names) != sorted(input_edges):
        expected = f"the edges into the model are {format_names(input_edges)}"
        yield "T2", "signature", f"its parameters have the values {format_names(parameter_names)}, {expected}"
    edge_names = {edge.name for edge in entry_point.edges}
    for result_name in value_names(entry_point.signature.result):
        if result_name not in edge_names:
            yield "T3", "signature", f"the result has the value {result_name[:80]!r}, which no edge carries"
