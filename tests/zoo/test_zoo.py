"""Every model of the zoo, cut, answers bit for bit as the captured program does, three calls in a row."""

import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

import stagepack
from stagepack.capture.programs import capture_program
from stagepack.errors import CaptureError, CutError
from stagepack.format.dtypes import SCALAR_DTYPES
from stagepack.format.graph import Cost, Graph, Node, value_bytes
from stagepack.format.operators import ALLOWED_NAMESPACES, operator_namespace, without_overload
from stagepack.format.reader import Bundle
from stagepack.format.shapes import example_sizes
from stagepack.format.traversal import input_names, output_names
from stagepack.graph.analysis import GraphAnalysis
from stagepack.graph.rows.operator_rules import METADATA
from stagepack.partition.costs import estimated_operators
from stagepack.partition.cut_options import CutOptions, PolicyNode
from stagepack.partition.joined_bundle import join_bundle
from stagepack.partition.operator_costs import cost_source
from stagepack.roads.capture_writer import export_capture
from stagepack.roads.recut import whole_graph
from tests.zoo.apart import load_apart
from tests.zoo.architectures.refused import REASON, REFUSED
from tests.zoo.case import Case, answers, assert_equal, captured_answers, files, most_stages, other_size, stages_at_most
from tests.zoo.cases import CASES, QUICK, ROWS, named


def slow(cases: Iterable[Case]) -> list[Any]:
    """Cases that run with `make test-zoo` alone."""
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def each_nth(cases: Sequence[Case], step: int) -> list[Any]:
    """Cases of which `make test` runs each nth, and `make test-zoo` all."""
    return [*cases[::step], *slow(case for number, case in enumerate(cases) if number % step)]


def name_of(case: Case) -> str:
    """How a case is called in the name of its test."""
    return case.name


@pytest.mark.parametrize("case", [*QUICK, *slow(case for case in CASES if case not in QUICK)], ids=name_of)
def test_bit_exact(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    other = other_size(capture.program, capture.inputs)
    calls, others = [capture.inputs] * 3, [other, capture.inputs, other]
    wanted, others_wanted = captured_answers(capture, calls), captured_answers(capture, others)
    bundle = export_capture(
        capture, out=tmp_path / "exported.stagepack", cut_options=CutOptions(stages=stages_at_most(2, capture))
    )
    assert not uncounted_operators(bundle)
    graph = whole_graph(bundle)
    most = most_stages(graph)
    # Other cuts are recut, which by law gives the bytes of an export; a direct export of one of them is the witness.
    cuts = [
        bundle,
        *(stagepack.recut(bundle, out=tmp_path / f"{count}.stagepack", stages=min(count, most)) for count in (3, 5)),
    ]
    direct = export_capture(capture, out=tmp_path / "direct.stagepack", cut_options=CutOptions(stages=min(5, most)))
    assert files(direct.path) == files(cuts[-1].path)
    for cut in cuts:
        pipe = stagepack.load(cut, types=case.classes(), allow_ops=namespaces(bundle))
        assert_equal(answers(pipe, calls), wanted)
        pipe.reset_state()
        assert_equal(answers(pipe, others), others_wanted)
    for counts in joined_counts(len(direct.stages), case.name):
        joined = stagepack.load(join_bundle(direct, counts), types=case.classes(), allow_ops=namespaces(bundle))
        assert_equal(answers(joined, calls), wanted)
    cuts.append(stagepack.recut(bundle, out=tmp_path / "even.stagepack", policy=policy_of(even(graph, stages=3))))
    apart = load_apart(cuts[-1], types=case.classes(), allow_ops=namespaces(bundle), modules=True)
    assert_equal(answers(apart, calls), wanted)
    for cut in cuts:
        assert not needless_sizes(cut)
        assert not tensors_sent_for_sizes(cut)


@pytest.mark.parametrize("case", each_nth(ROWS, 12), ids=name_of)
def test_back_and_forth(case: Case, tmp_path: Path) -> None:
    """Stages that take their nodes from all over the model; a cut that would tear state is refused."""
    capture = case.capture()
    calls = [capture.inputs] * 2
    wanted = captured_answers(capture, calls)
    uncut = export_capture(capture, out=tmp_path / "1.stagepack", cut_options=CutOptions(stages=1))
    for seed in range(3):
        policy = policy_of(scattered(uncut.graph(0), stages=2 + seed % 2, seed=seed))
        try:
            bundle = stagepack.recut(uncut, out=tmp_path / f"cut-{seed}.stagepack", policy=policy)
        except CutError as error:
            assert "must stay in one stage" in str(error) or "random numbers" in str(error)  # noqa: PT017 - both ends are right
            continue
        if seed == 0:
            direct = export_capture(capture, out=tmp_path / "direct.stagepack", cut_options=CutOptions(policy=policy))
            assert files(direct.path) == files(bundle.path)
        joined = stagepack.load(
            join_bundle(bundle, [len(bundle.stages)]), types=case.classes(), allow_ops=namespaces(bundle)
        )
        assert_equal(answers(joined, calls), wanted)
        for load in (stagepack.load, load_apart):
            assert_equal(answers(load(bundle, types=case.classes(), allow_ops=namespaces(bundle)), calls), wanted)


@pytest.mark.parametrize(
    "case",
    named(
        "state-counter-in-the-middle",
        "aliasing-inputs-written",
        "state-batch-norm-that-trains",
        "values-skip-over-stages",
    ),
    ids=name_of,
)
def test_functional_programs_write_their_state_back(case: Case, tmp_path: Path) -> None:
    capture = case.capture()
    functional = capture_program(capture.program.run_decompositions({}), capture.inputs)
    calls = [capture.inputs] * 3
    bundle = export_capture(functional, out=tmp_path / "m.stagepack", cut_options=CutOptions(stages=1))
    wanted = captured_answers(functional, calls)
    assert_equal(answers(stagepack.load(bundle), calls), wanted)


@pytest.mark.parametrize("case", REFUSED, ids=name_of)
def test_what_cannot_be_captured_is_refused_with_the_reason(case: Case) -> None:
    with pytest.raises(CaptureError, match=REASON):
        case.capture()


def joined_counts(stage_count: int, seed: str) -> list[list[int]]:
    """How many consecutive stages are joined: all, and some that are drawn."""
    drawn, rng = list[int](), random.Random(seed)  # noqa: S311 - draws of a test
    while sum(drawn) < stage_count:
        drawn.append(min(rng.randint(1, 3), stage_count - sum(drawn)))
    return [[stage_count], drawn]


def namespaces(bundle: Bundle) -> set[str]:
    """The namespaces of custom operators that a bundle needs."""
    return {name for stage in bundle.stages for name in stage.namespaces}


def needless_sizes(bundle: Bundle) -> list[str]:
    """The sizes that a stage receives from another though a tensor that it receives has them."""
    edges = {edge.name: edge for edge in bundle.edges}
    return [
        name
        for stage in bundle.stages
        for name in stage.inputs
        if edges[name].dtype == "symint" and edges[name].producer is not None
        if any(edges[name].expr in edges[other].shape for other in stage.inputs)
    ]


def tensors_sent_for_sizes(bundle: Bundle) -> list[str]:
    """The tensors that a stage receives only for their sizes, though another stage could send these.

    A stage may receive an input of the model so, if it is the first one with this input. A stage that does nothing else may, and one whose
    values the later stages compute again: it is not emptied.
    """
    edges = {edge.name: edge for edge in bundle.edges}
    sent = []
    for stage_number, stage in enumerate(bundle.stages):
        graph = bundle.graph(stage_number)
        content_nodes = _content_nodes(graph) if graph.outputs else []
        read = {name for node in content_nodes for name in input_names(node)}
        sent += [
            f"{name} -> stage {stage_number}"
            for name in stage.inputs
            if edges[name].dtype not in SCALAR_DTYPES and name not in read and content_nodes
            if edges[name].producer is not None or edges[name].consumers[0] != stage_number
        ]
    return sent


def _content_nodes(graph: Graph) -> list[Node]:
    """The nodes that use more of tensors than their sizes, and do not compute what only others use."""
    read = set(graph.outputs)
    content_nodes = []
    for node in reversed(graph.nodes):
        op, results = graph.ops[node.op], set(output_names(node))
        is_size = without_overload(op.name) in METADATA or op.name == "aten._assert_scalar.default"
        is_pure = operator_namespace(op.name) in {"aten", "prims"} and not op.mutates and not op.random
        is_unread = is_pure and results and read.isdisjoint(results) and not node.cost.flops
        if not is_size and not is_unread:
            read.update(input_names(node))
            if operator_namespace(op.name) not in {"operator", "math", "torch"}:
                content_nodes.append(node)
    return content_nodes


def uncounted_operators(bundle: Bundle) -> set[str]:
    """The operators that cost nothing though they move data, and those of torch whose costs no table or formula tells."""
    sizes = example_sizes(bundle.entry_point.symbols)
    uncounted = set()
    for graph in map(bundle.graph, range(len(bundle.stages))):
        for node in graph.nodes:
            name = graph.ops[node.op].name
            is_free = node.cost == Cost() and any(
                value_bytes(value, sizes) for value in node.outputs if value is not None
            )
            if is_free and cost_source(name) != "free":
                uncounted.add(name)
        uncounted |= {name for name in estimated_operators([graph]) if operator_namespace(name) in ALLOWED_NAMESPACES}
    # How often it runs its body, only the data tells.
    return uncounted - {"higher_order.while_loop"}


def even(graph: Graph, *, stages: int) -> list[int]:
    """A stage for each node: parts of as equal length as state, which must not be torn, allows."""
    groups = GraphAnalysis(graph).colocation_groups
    places = [
        place
        for place in range(len(graph.nodes) + 1)
        if not any(group.nodes[0] < place <= group.nodes[-1] for group in groups)
    ]
    wanted = [len(graph.nodes) * number / stages for number in range(1, stages)]
    cuts = [min(places, key=lambda place: abs(place - target)) for target in wanted]
    return [sum(cut <= number for cut in cuts) for number in range(len(graph.nodes))]


def policy_of(stage_of: Sequence[int]) -> Callable[[PolicyNode], int]:
    """A policy that gives each node the stage at its index."""
    return lambda node: stage_of[node.index]


def scattered(graph: Graph, *, stages: int, seed: int) -> list[int]:
    """A stage for each node: a random order in which values flow forward, cut into equal parts."""
    chance = random.Random(seed)  # noqa: S311 - no secret
    maker = {name: number for number, node in enumerate(graph.nodes) for name in output_names(node)}
    needs = [{maker[name] for name in input_names(node) if name in maker} for node in graph.nodes]
    order: list[int] = []
    left = set(range(len(graph.nodes)))
    while left:
        ready = sorted(number for number in left if not needs[number] & left)
        order.append(chance.choice(ready) if seed else ready[-1])
        left.discard(order[-1])
    stage_of = [0] * len(order)
    for place, number in enumerate(order):
        stage_of[number] = place * stages // len(order)
    return stage_of
