"""Call operators with hostile arguments, in processes that may die: ``python -m tools.operators.hostile_calls [OPERATOR...]``.

The calls are made as a loader makes them: first on tensors without memory, so that what the operator refuses there is refused, then on
tensors of the CPU. Each operator has a process of its own, with a limit on its memory. A process that ends by a signal, or a call that
takes too long, is an outcome of the operator. Writes a JSON object a line: the operator, how its calls ended, and the number of a call that
ended the process.
"""

import argparse
import contextlib
import json
import mmap
import os
import resource
import signal
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Forked processes must not wait for threads that they do not have.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import torch

from stagepack.argument_guards import guarded_operator
from stagepack.torch_internals import OperatorOverload, tree_map
from tools.operators.hostile_arguments import Call, copy_tensors, hostile_calls
from tools.operators.valid_calls import find_operator, recorded_calls

CALLS = 200
_CALL_SECONDS = 4
_MEMORY_BYTES = 2 << 30
_DEATHS = 4
OUTCOMES = ("refused", "raised", "returned", "differed")
MakeCall = Callable[[OperatorOverload, Call], str]


@dataclass
class Outcome:
    """How the calls of an operator ended.

    Attributes:
        counts: calls that were refused on tensors without memory, that raised, that returned, and that returned what was in memory before.
        signals: by the signal, how often the process was ended.
        first_deadly: the number of the first call that ended it.
    """

    counts: Counter[str] = field(default_factory=Counter)
    signals: Counter[int] = field(default_factory=Counter)
    first_deadly: int | None = None


def make_call(operator: OperatorOverload, call: Call) -> str:
    """Make a call as a loader makes it; return how it ended, one of `OUTCOMES`."""
    target = guarded_operator(operator)
    if is_refused(operator, target, call):
        return "refused"
    try:
        with torch.no_grad():
            target(**call)
    except Exception:  # noqa: BLE001
        return "raised"
    return "returned"


def call_hostilely(
    name: str, valid_calls: Sequence[Call], call_count: int = CALLS, make_call: MakeCall = make_call
) -> Outcome:
    """Make the calls of an operator, in as many processes as they need.

    Args:
        name: its qualified name.
        valid_calls: valid calls of it.
        call_count: how many calls to make.
        make_call: makes one, and returns how it ended.
    """
    outcome = Outcome()
    progress = mmap.mmap(-1, 8 * (1 + len(OUTCOMES)))
    counters = memoryview(progress).cast("q")
    while counters[0] < call_count and sum(outcome.signals.values()) < _DEATHS:
        process = os.fork()
        if not process:
            _run_calls(find_operator(name), valid_calls, call_count, counters, make_call)
        exit_code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        if exit_code:
            outcome.signals[-exit_code] += 1
            if outcome.first_deadly is None:
                outcome.first_deadly = counters[0]
            counters[0] += 1
    outcome.counts.update(dict(zip(OUTCOMES, counters[1:], strict=True)))
    return outcome


def _run_calls(
    operator: OperatorOverload,
    valid_calls: Sequence[Call],
    call_count: int,
    counters: memoryview,
    make_call: MakeCall,
) -> None:
    """Make the calls that are left, and end this process. `counters` has the number of the next call, and the counts of the outcomes."""
    _restrict_process()
    exit_code = 1
    known_calls = list(valid_calls)
    try:
        for call in hostile_calls(operator, known_calls, counters[0], call_count - counters[0]):
            # Time of the processor, so that other processes do not count; SIGPROF ends this one.
            signal.setitimer(signal.ITIMER_PROF, _CALL_SECONDS)
            original = copy_tensors(call)  # before the operator writes them
            result = make_call(operator, call)
            signal.setitimer(signal.ITIMER_PROF, 0)
            counters[1 + OUTCOMES.index(result)] += 1
            counters[0] += 1
            if result in ("returned", "differed"):
                known_calls.append(original)  # so that others are changed from it
        exit_code = 0
    except BaseException as error:  # noqa: BLE001 - the process must not go on as the one that forked it
        print(f"{operator}: {type(error).__name__}: {error}", file=sys.stderr)
    finally:
        os._exit(exit_code)


def _restrict_process() -> None:
    used_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = used_pages * mmap.PAGESIZE + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def is_refused(operator: OperatorOverload, target: Callable[..., Any], call: Call) -> bool:
    """Whether a loader refuses a call before it reads weights, since the operator does so on tensors without memory."""
    try:
        target(**tree_map(_on_meta, call))
    except NotImplementedError:
        return False  # it has no implementation for `meta`
    except Exception as error:  # noqa: BLE001 - operators raise errors of any kind
        return not _needs_data(operator, error)
    return False


def _on_meta(leaf: object) -> object:
    """An argument of the call that `stagepack_loaders.torch.value_check` makes: no tensor has memory."""
    if isinstance(leaf, torch.device):
        return torch.device("meta")
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") if isinstance(leaf, torch.Tensor) else leaf


def _needs_data(operator: OperatorOverload, error: Exception) -> bool:
    """Whether only the data tells the shape of the result, so that `value_check` leaves the call to the real tensors."""
    data_tags = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
    return not data_tags.isdisjoint(operator.tags) or "meta tensor" in str(error)


def run(
    names: Iterable[str],
    valid_calls: Mapping[str, Sequence[Call]],
    out: Path,
    call_count: int = CALLS,
    make_call: MakeCall = make_call,
) -> None:
    """Call operators, and append a line for each to a file.

    Args:
        names: the qualified names.
        valid_calls: valid calls by the name of the operator.
        out: the file; operators that have a line in it are not called again.
        call_count: how many calls to make of each.
        make_call: makes one, and returns how it ended.
    """
    make_call(
        torch.ops.aten.add.Tensor, {"self": torch.ones(1), "other": torch.ones(1)}
    )  # imports what each process needs
    done = {json.loads(line)["operator"] for line in out.read_text().splitlines()} if out.exists() else set()
    with out.open("a") as lines:
        for name in names:
            if name not in done:
                outcome = call_hostilely(name, valid_calls.get(name, ()), call_count, make_call)
                facts = {"operator": name, "calls": call_count, **outcome.counts}
                if outcome.signals:
                    facts |= {"signals": dict(outcome.signals), "first_deadly": outcome.first_deadly}
                print(json.dumps(facts), file=lines, flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("operators", nargs="*", metavar="OPERATOR", help="qualified names, such as aten.add.Tensor")
    parser.add_argument("--from-file", type=Path, help="a file of names, one a line")
    parser.add_argument("--out", type=Path, required=True, help="the file of results, to which lines are appended")
    parser.add_argument("--calls", type=int, default=CALLS)
    options = parser.parse_args()
    names = options.operators + (options.from_file.read_text().split() if options.from_file else [])
    with contextlib.suppress(KeyboardInterrupt):
        run(names, recorded_calls(), options.out, options.calls)


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    main()
