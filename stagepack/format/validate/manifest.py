"""The rules on the manifest (SPEC M1 to M13, O1, T1 to T4)."""

import itertools
import math
from collections.abc import Iterator

from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.manifest import File, Manifest, Stage
from stagepack.format.plan import Plan, Run
from stagepack.format.tree import value_names
from stagepack.format.validate.names import (
    FILE_NAME_PATTERN,
    MANIFEST_NAME,
    SHA256_PATTERN,
    SIGNATURE_NAME,
    WORD_PATTERN,
    is_identifier,
)
from stagepack.format.validate.problems import BrokenRule, format_names
from stagepack.format.validate.signature import check_depth, check_signature
from stagepack.format.validate.sizes import check_symbols, check_type


def check_manifest(manifest: Manifest) -> Iterator[Problem]:
    """Yield the rules M, S and T that a manifest breaks."""
    for rule, where, message in _manifest(manifest):
        yield Problem(rule=rule, where=f"{MANIFEST_NAME}: {where}", message=message)


def _manifest(manifest: Manifest) -> Iterator[BrokenRule]:
    if manifest.format != "stagepack":
        yield "M1", "format", f"expected 'stagepack', found {manifest.format[:80]!r}"
    if not 1 <= len(manifest.stages) <= limits.STAGES:
        yield "M4", "stages", f"expected 1 to {limits.STAGES}, found {len(manifest.stages)}"
    yield from _files(manifest.files)
    listed = {file.name for file in manifest.files}
    for number, stage in enumerate(manifest.stages):
        for name in (stage.graph, *stage.weights):
            if name not in listed:
                yield "M6", f"stage {number}", f"uses {name[:80]!r}, which is not among the files"
        for name in stage.onnx_files:
            if name not in listed:
                yield "O1", f"stage {number}", f"its ONNX model uses {name[:80]!r}, which is not among the files"
        if min(stage.nodes, stage.weight_bytes, stage.flops) < 0:
            yield "M7", f"stage {number}", "nodes, weight_bytes or flops is negative"
    yield from _places(manifest.stages)
    if manifest.plan is not None:
        yield from _plan(manifest.plan, len(manifest.stages))
    yield from check_symbols(manifest.symbols)
    deep = list(check_depth(manifest.signature, "signature"))
    yield from deep
    if not deep:
        yield from _edges(manifest, {symbol.name for symbol in manifest.symbols})
        yield from check_signature(manifest.signature, "signature")
        yield from _carried(manifest)
    if not WORD_PATTERN.fullmatch(manifest.device):
        yield "M11", "device", f"{manifest.device[:80]!r} is not a device type"


def _places(stages: tuple[Stage, ...]) -> Iterator[BrokenRule]:
    for number, stage in enumerate(stages):
        where = f"stage {number}"
        if not _ascends(stage.places) or stage.added < 0:
            yield "M12", where, "the places are not runs that ascend, or added is negative"
        elif stage.places and stage.added + sum(count for _, count in stage.places) != stage.nodes:
            yield "M12", where, f"added and the places do not make {stage.nodes} nodes"
    placed = [run for stage in stages for run in stage.places]
    if placed and any(not stage.places and stage.nodes > stage.added for stage in stages):
        yield "M12", "stages", "some stages have places and others do not"
    end = 0
    for first, count in sorted(placed):
        if first > end:
            yield "M12", "stages", f"the node at place {end} of the whole model is in no stage"
            break
        end = max(end, first + count)


def _plan(plan: Plan, stages: int) -> Iterator[BrokenRule]:
    if len(plan.stages) != stages:
        yield "M13", "plan", f"has {len(plan.stages)} stages, the bundle {stages}"
    for number, stage in enumerate(plan.stages):
        costs = (
            stage.picoseconds,
            stage.flops,
            stage.bytes,
            stage.weight_bytes,
            stage.received,
            stage.receiving,
            stage.memory,
        )
        if not _ascends(stage.nodes) or min(*costs, stage.memory_limit or 0) < 0:
            yield "M13", f"plan, stage {number}", "the nodes are not runs that ascend, or a cost is negative"
        if not 0 < stage.speed < math.inf or len(stage.module) > limits.NAME_CHARACTERS:
            yield "M13", f"plan, stage {number}", "the speed is not above 0, or the name of the module is too long"
    end = 0
    for first, count in sorted(run for stage in plan.stages for run in stage.nodes):
        if first != end:
            yield "M13", "plan", f"node {min(first, end)} is in no stage or in two"
            break
        end = first + count


def _ascends(runs: tuple[Run, ...]) -> bool:
    """Whether runs are not empty, ascend, and are apart."""
    known = all(first >= 0 and count >= 1 for first, count in runs)
    return known and all(a + count < b for (a, count), (b, _) in itertools.pairwise(runs))


def _files(files: tuple[File, ...]) -> Iterator[BrokenRule]:
    seen = {MANIFEST_NAME, SIGNATURE_NAME}
    for file in files:
        where = f"file {file.name[:80]!r}"
        if not FILE_NAME_PATTERN.fullmatch(file.name):
            yield "M5", where, "not a plain file name"
        elif file.name.lower() in seen:
            yield "M5", where, "the name stands twice, where case is ignored, or has another use"
        seen.add(file.name.lower())
        if file.size < 0 or not SHA256_PATTERN.fullmatch(file.sha256):
            yield "M5", where, "the size or the digest is not one"


def _edges(manifest: Manifest, symbols: set[str]) -> Iterator[BrokenRule]:
    stages = range(len(manifest.stages))
    seen: set[str] = set()
    results = set(value_names(manifest.signature.result))
    inputs: dict[int, list[str]] = {number: [] for number in stages}
    outputs: dict[int, list[str]] = {number: [] for number in stages}
    for edge in manifest.edges:
        where = f"edge {edge.name[:80]}"
        if not is_identifier(edge.name) or edge.name in seen:
            yield "M8", where, "the name is not an identifier, or stands twice"
        seen.add(edge.name)
        yield from check_type(edge, symbols, "M8", where)
        ends = (*(() if edge.producer is None else (edge.producer,)), *edge.consumers)
        if any(end not in stages for end in ends) or any(a >= b for a, b in itertools.pairwise(ends)):
            yield "M9", where, f"goes from {edge.producer} to {format_names(edge.consumers)}: not later stages in order"
            continue
        if edge.producer is not None:
            outputs[edge.producer].append(edge.name)
            if not edge.consumers and edge.name not in results:
                yield "M9", where, "nobody uses it"
        for consumer in edge.consumers:
            inputs[consumer].append(edge.name)
    for number in stages:
        stage = manifest.stages[number]
        if list(stage.inputs) != inputs[number] or list(stage.outputs) != outputs[number]:
            yield "M10", f"stage {number}", "its inputs or outputs are not those that the edges give, in their order"


def _carried(manifest: Manifest) -> Iterator[BrokenRule]:
    """The rules on the signature and the edges together."""
    given = list(value_names(*(parameter.tree for parameter in manifest.signature.parameters)))
    inputs = [edge.name for edge in manifest.edges if edge.producer is None]
    if sorted(given) != sorted(inputs):
        yield (
            "T2",
            "signature",
            f"its parameters hold {format_names(given)}, the edges into the model are {format_names(inputs)}",
        )
    made = {edge.name for edge in manifest.edges}
    for name in value_names(manifest.signature.result):
        if name not in made:
            yield "T3", "signature", f"the result holds {name[:80]!r}, which no edge carries"
