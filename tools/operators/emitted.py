"""Write the operators that torch.export emits: ``python -m tools.operators.emitted [CASE...]``.

``used_by_models.txt`` has those in the programs that torch.export captures from the models of the zoo, those after their decomposition, and
those in the frozen bundles. ``used_by_functions.txt`` has those that torch calls in the samples of its own tests of public functions. Names
are added to the files; none is removed, since a model that another torch captures otherwise still needs them.
``used_elsewhere.txt`` is written by hand.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule

import stagepack
from stagepack.format.operators import operator_namespace
from stagepack.torch_internals import OperatorOverload
from tests.zoo.case import Case
from tests.zoo.cases import CASES
from tools.operators.valid_calls import recorded_calls

USED_BY_MODELS = Path(__file__).with_name("used_by_models.txt")
USED_ELSEWHERE = Path(__file__).with_name("used_elsewhere.txt")
USED_BY_FUNCTIONS = Path(__file__).with_name("used_by_functions.txt")
_FROZEN_BUNDLES = Path(__file__).parents[2] / "schema" / "frozen"
_LISTED_NAMESPACES = ("aten", "prims")


def read_names(path: Path) -> set[str]:
    """Return the lines of a file of operators, except comments."""
    return {line for line in path.read_text().splitlines() if line and not line.startswith("#")}


def program_operators(program: ExportedProgram) -> set[str]:
    """Return the names of the operators of ATen and prims in a program and its subgraphs."""
    return {
        str(node.target)
        for module in program.graph_module.modules()
        if isinstance(module, GraphModule)
        for node in module.graph.nodes
        if isinstance(node.target, OperatorOverload) and node.target.namespace in _LISTED_NAMESPACES
    }


def case_operators(case: Case) -> Iterator[str]:
    """Yield the names of the operators of a model of the zoo, as it is captured and decomposed."""
    program = case.capture().program
    yield from program_operators(program)
    yield from program_operators(program.run_decompositions())


def frozen_operators() -> Iterator[str]:
    """Yield the names of the operators of the frozen bundles."""
    for path in _FROZEN_BUNDLES.glob("*/*.stagepack"):
        bundle = stagepack.open(path)
        for stage_number in range(len(bundle.stages)):
            for op in bundle.graph(stage_number).ops:
                if operator_namespace(op.name) in _LISTED_NAMESPACES:
                    yield op.name


def function_operators() -> set[str]:
    """Return the names of the operators that public functions of torch call."""
    return {name for name in recorded_calls() if operator_namespace(name) in _LISTED_NAMESPACES}


def add_names(path: Path, operator_names: set[str], source: str) -> None:
    """Add operators to a file, and print those that it does not have.

    Args:
        path: the file.
        operator_names: the names.
        source: what uses them.
    """
    known_names = read_names(path)
    if new_names := operator_names - known_names:
        print(f"{source}: {' '.join(sorted(new_names))}", flush=True)
        header = "# Written by `python -m tools.operators.emitted`.\n"
        path.write_text(header + "".join(f"{name}\n" for name in sorted(known_names | new_names)))


def main() -> None:
    """Capture the models, and add their operators to the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "case_names", nargs="*", metavar="CASE", help="models of the zoo; all of them and the functions without"
    )
    options = parser.parse_args()
    add_names(USED_BY_MODELS, set(frozen_operators()), "the frozen bundles")
    if not options.case_names:
        add_names(USED_BY_FUNCTIONS, function_operators(), "functions of torch")
    for case in CASES:
        if case.is_supported and (not options.case_names or case.name in options.case_names):
            try:
                add_names(USED_BY_MODELS, set(case_operators(case)), case.name)
            except Exception as error:  # noqa: BLE001 - the models of the zoo themselves may need another torch
                print(f"{case.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
