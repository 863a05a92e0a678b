"""`stagepack diff`."""

import sys
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING

from stagepack.adapter.compare import AdapterDifferences, compare_adapters
from stagepack.adapter.opened import OpenAdapter
from stagepack.cli.command import BundleType, argument, option_object, subcommand
from stagepack.cli.output import count_of, print_json, print_line, print_table
from stagepack.cli.shared_flags import JSON
from stagepack.deltas.delta import Delta
from stagepack.documents import Listed, of_kind
from stagepack.format.reader import Bundle
from stagepack.opening import opened_listed, with_deltas

if TYPE_CHECKING:
    from stagepack.roads.compare import Differences

# Rows of the table of weights; --json has all.
_SHOWN_WEIGHTS = 40


@option_object
class _Options:
    first_path: str = argument("A", type=BundleType())
    second_path: str = argument("B", type=BundleType())
    as_json: bool = JSON


@subcommand(
    "diff", examples=["stagepack diff net.stagepack tuned.stagepack", "stagepack diff a.stagepack b.stagepack --json"]
)
def command(options: _Options) -> None:
    """Show what differs between two bundles or adapters, or in a delta.

    Compared are the graph of the whole model, whatever its cut, the weights by name, the cut, and the other files. Bundles of one digest
    are equal; otherwise the weights are read whose files differ. A#NAME and B#NAME compare one entry point of each. B may be a delta on A,
    which is compared with the bundle that it makes of it. Of two adapters, compared are the base, and the rank, the scale and the values of
    each change. Needs no torch.

    The exit status is 0 if both are equal, and 1 if they differ.
    """
    first = opened_listed(options.first_path)
    second = opened_listed(options.second_path)
    differences: AdapterDifferences | Differences
    if isinstance(first, OpenAdapter):
        differences = compare_adapters(first, of_kind(second, OpenAdapter))
    else:
        differences = _compare_bundles(of_kind(first, Bundle), second)
    facts = {field.name: getattr(differences, field.name) for field in fields(differences)}
    if options.as_json:
        print_json({"equal": not differences} | facts)
    elif not differences:
        print_line("equal")
    else:
        for title, part in facts.items():
            if isinstance(part, Mapping):
                _print_weights(part)
            else:
                _print_lines(title, part)
    sys.exit(1 if differences else 0)


def _compare_bundles(first: Bundle, second: Listed) -> "Differences":
    """Compare a bundle with another one, or with the one that a delta makes of it."""
    from stagepack.roads.compare import compare_bundles  # noqa: PLC0415 - numpy, after the arguments are checked

    return compare_bundles(
        first, with_deltas(first, [second]) if isinstance(second, Delta) else of_kind(second, Bundle)
    )


def _print_lines(title: str, lines: tuple[str, ...]) -> None:
    print_line(f"{title}: {'same' if not lines else ''}".rstrip())
    for line in lines:
        print_line(f"  {line}")


def _print_weights(weights: Mapping[str, str]) -> None:
    if not weights:
        print_line("weights: same")
        return
    rows = [[weight_name, difference] for weight_name, difference in weights.items()]
    print_table(f"weights: {count_of('difference', len(rows))}", ["weight", "A and B"], rows[:_SHOWN_WEIGHTS])
    if len(rows) > _SHOWN_WEIGHTS:
        print_line(f"  and {len(rows) - _SHOWN_WEIGHTS} more; --json shows all")
