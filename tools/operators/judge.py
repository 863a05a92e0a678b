"""Keep the list of judged operators, ``stagepack/format/operators.txt``: ``python -m tools.operators.judge [--check]``.

Adds a line for each operator of ATen and prims in the running torch that has none, with a verdict by the rules below; review each. Lines
that exist are kept, also of operators that the running torch does not have. With `--results`, operators whose calls ended the process get
the verdict ``ends-process``. With `--check`, writes nothing, and fails if an operator has no verdict or one that contradicts its schema.

Verdicts on operators that run by default:

- ``writes``: the schema says that it writes into an argument.
- ``random``: torch tags it as one that draws random numbers.
- ``view``: the schema says that a result is a view of an argument.
- ``pure``: none of these.

Verdicts on the others:

- ``denied``: it accesses files, processes, memory past the end of a tensor, or the state of the process. For all its overloads.
- ``ends-process``: a hostile call ended the process, as one that reads past the end of a tensor does, or ran longer than its limit.
- ``unused``: torch.export does not emit it, or it is for a backend, a layout or a backward pass that bundles do not have.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Final

import torch

from stagepack.argument_guards import ARGUMENT_CHECKS
from stagepack.format.operators import DENIED, LIST_FILE, RUN_BY_DEFAULT, listed_verdicts, without_overload
from stagepack.torch_internals import OperatorOverload, dispatched_operators, operator_schema
from tools.operators.emitted import USED_BY_FUNCTIONS, USED_BY_MODELS, USED_ELSEWHERE, read_names

# Parts of names: backward and forward-mode differentiation, layouts that bundles do not hold, kernels of one backend, tests of torch,
# named dimensions, and the settings of autograd.
_UNUSED: Final = re.compile(
    r"inductor|backward|jvp|sparse|nested|jagged|_csr|_csc|_bsr|_bsc|crow_|ccol_|row_indices|coalesce|_nnz|quantize|quantized|q_scale|q_zero|q_per|"
    r"qscheme|int_repr|fbgemm|cudnn|miopen|mkldnn|_mps|xnnpack|nnpack|cslt|vulkan|cuda|triton|_test_|[Dd]imname|names|refine|align_|"
    r"retain_grad|requires_grad|retains_grad|_fw_|_make_dual|_unpack_dual|is_leaf|output_nr|\.data\.|_version"
)
_HEADER: Final = (
    "# Verdicts on operators of ATen and prims. `tools/operators/judge.py` writes them, and says what they mean.\n"
)


def schema_verdict(operator: OperatorOverload) -> str:
    """Return the verdict on an operator that runs by default, as its schema and its tags tell."""
    schema = operator_schema(operator)
    if any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments):
        return "writes"
    if torch.Tag.nondeterministic_seeded in operator.tags:
        return "random"
    return "view" if any(result.alias_info is not None for result in schema.returns) else "pure"


def proposed_verdict(operator: OperatorOverload) -> str:
    """Return the verdict on an operator that nobody has judged."""
    name = str(operator)
    if name in ARGUMENT_CHECKS or name in _used_by_models():
        return schema_verdict(operator)
    if torch.Tag.generated in operator.tags or _UNUSED.search(name):
        return "unused"
    packet_name = name.split(".")[1]
    is_private = packet_name.startswith("_") and not packet_name.startswith("__")
    if is_private and torch.Tag.core not in operator.tags and name not in read_names(USED_BY_FUNCTIONS):
        return "unused"
    return schema_verdict(operator)


def _used_by_models() -> set[str]:
    return read_names(USED_BY_MODELS) | read_names(USED_ELSEWHERE)


def problems() -> list[str]:
    """Return what is wrong with the list, a line each."""
    verdicts = listed_verdicts()
    found = [
        f"{name} is used by models, and listed as {verdicts.get(name)}"
        for name in sorted(_used_by_models())
        if verdicts.get(name) not in RUN_BY_DEFAULT
    ]
    for name, operator in sorted(dispatched_operators().items()):
        verdict = verdicts.get(name) or verdicts.get(without_overload(name))
        if verdict is None:
            found.append(
                f"{name} is not judged: call it with tools.operators.hostile_calls, then run tools.operators.judge"
            )
        elif verdict in RUN_BY_DEFAULT and verdict != schema_verdict(operator):
            found.append(f"{name} is listed as {verdict}, its schema says {schema_verdict(operator)}")
    return found


def judge(results: Path | None) -> None:
    """Add the operators that are missing to the list.

    Args:
        results: outcomes that `tools.operators.hostile_calls` wrote.
    """
    verdicts = dict(listed_verdicts())
    for name, operator in dispatched_operators().items():
        if verdicts.get(without_overload(name)) != DENIED:
            verdicts.setdefault(name, proposed_verdict(operator))
    for line in results.read_text().splitlines() if results is not None else ():
        outcome = json.loads(line)
        if "signals" in outcome and verdicts.get(outcome["operator"]) in RUN_BY_DEFAULT:
            verdicts[outcome["operator"]] = "ends-process"
    LIST_FILE.write_text(_HEADER + "".join(f"{name} {verdict}\n" for name, verdict in sorted(verdicts.items())))


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if the list is not complete")
    parser.add_argument("--results", type=Path, help="a file that tools.operators.hostile_calls wrote")
    options = parser.parse_args()
    if options.check:
        sys.exit("\n".join(problems()) or 0)
    judge(options.results)


if __name__ == "__main__":
    main()
