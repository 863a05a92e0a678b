"""Run bundles that one version of torch wrote under another: ``write`` under each version, then ``replay`` under each.

`write` exports models of the zoo in three stages, with their examples, into a folder of the version. `replay` loads the bundles of every
other version there is, runs their examples, and compares the results, bit for bit, with those that were recorded, and with those that the
bundle of the running version gives on the same inputs. It prints a row of the table in ``docs/compatibility.md`` for each pair.
"""

import argparse
import importlib
from collections import Counter
from pathlib import Path

import torch

import stagepack
from stagepack.errors import StagepackError
from stagepack.partition.cut_options import CutOptions
from stagepack.roads.capture_writer import ExportOptions, export_capture
from stagepack_loaders.example import compare_results, read_example, run_on_inputs
from stagepack_loaders.local_pipeline import Pipeline
from tests.zoo.case import Case
from tests.zoo.cases import ARCHITECTURES, EXAMPLES, ROWS
from tests.zoo.test_zoo import namespaces

AS_RECORDED = "as recorded"
AS_WRITTEN_HERE = "equal to the answer of a bundle that the loading torch has exported"
OTHER = "another answer"


def main() -> None:
    """Write bundles, or replay those of other versions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("action", choices=["write", "replay"])
    parser.add_argument("folder", type=Path, help="the folder of the folders of the versions")
    parser.add_argument("--every", type=int, default=10, help="of the architectures of transformers, take every Nth")
    options = parser.parse_args()
    cases = [*EXAMPLES, *ROWS, *ARCHITECTURES[:: options.every]]
    options.folder.mkdir(exist_ok=True)
    own_folder = options.folder / torch.__version__.partition("+")[0]
    if options.action == "write":
        own_folder.mkdir(exist_ok=True)
        for case in cases:
            write_bundle(case, own_folder)
        return
    for folder in sorted(options.folder.iterdir()):
        if folder != own_folder:
            answers = [replay(case, folder, own_folder) for case in cases]
            print_row(folder.name, own_folder.name, Counter(answer for answer in answers if answer is not None))


def write_bundle(case: Case, folder: Path) -> None:
    """Export a model, and print why where it cannot be exported."""
    if not case.is_supported:
        return
    try:
        path = folder / f"{case.name}.stagepack"
        export_capture(
            case.capture(), out=path, cut_options=CutOptions(stages=3), options=ExportOptions(overwrite=True)
        )
    except Exception as error:  # noqa: BLE001 - the models of the zoo themselves may need another torch
        print(f"{case.name}: {type(error).__name__}: {str(error)[:200]}")


def replay(case: Case, folder: Path, own_folder: Path) -> str | None:
    """How the results of a bundle compare with those of the own one, as a phrase; None where one of them does not exist."""
    path, own_path = (version_folder / f"{case.name}.stagepack" for version_folder in (folder, own_folder))
    if not path.exists() or not own_path.exists():
        return None
    if case.operators:
        importlib.import_module(case.operators)
    try:
        pipeline, own_pipeline = load(path), load(own_path)
    except StagepackError as error:
        print(f"{case.name}: {type(error).__name__}: {error}")
        return type(error).__name__
    inputs, recorded = read_example(pipeline, stagepack.open(path))
    results = run_on_inputs(pipeline, inputs)
    if compare_results(pipeline, results, recorded).largest == 0:
        return AS_RECORDED
    inputs, _ = read_example(pipeline, stagepack.open(path))
    own_results = run_on_inputs(own_pipeline, inputs)
    answer = AS_WRITTEN_HERE if compare_results(pipeline, results, own_results).largest == 0 else OTHER
    print(f"{case.name}: {answer}, largest difference {compare_results(pipeline, results, recorded).largest:g}")
    return answer


def load(path: Path) -> Pipeline:
    """Load a bundle with the custom operators that it names."""
    bundle = stagepack.open(path)
    return stagepack.load(bundle, allow_ops=namespaces(bundle))


def print_row(exported_with: str, loaded_with: str, counts: Counter[str]) -> None:
    """Print a row of the table."""
    errors = {answer: count for answer, count in counts.items() if answer.endswith("Error")}
    error_text = ", ".join(f"{count} {error_class}" for error_class, count in errors.items()) or 0
    print(
        f"| {exported_with} | {loaded_with} | {counts.total()} | {counts[AS_RECORDED]} | {counts[AS_WRITTEN_HERE]} | {counts[OTHER]} | "
        f"{error_text} |"
    )


if __name__ == "__main__":
    main()
