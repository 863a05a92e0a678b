"""Names in the file of an adapter -> names in a bundle: alike, or with one prefix more or less before all of them."""

from collections.abc import Collection, Mapping

from stagepack.errors import AdapterError
from stagepack.format.graph import Weight
from stagepack.format.name_prefixes import placements
from stagepack.format.reader import Bundle

_SHOWN = 5


def weights_by_name(bundle: Bundle) -> dict[str, Weight]:
    """Return the weights of all entry points of a bundle, by each of their names."""
    return {
        name: weight
        for entry_point in bundle.entry_points
        for graph in bundle.select(entry_point.name).graphs()
        for weight in graph.weights
        for name in weight.names
    }


def place_names(names: Collection[str], weights: Mapping[str, Weight], source: str) -> dict[str, str]:
    """Return the name in the bundle of each name of a weight, all with the same prefix added or left out.

    source: the adapter, for messages.
    """
    placed = placements(names, weights)
    if len(placed) == 1:
        return placed[0]
    if placed:
        [name, *_] = names
        places = ", ".join(sorted(found[name] for found in placed)[:_SHOWN])
        raise AdapterError(f"{source}: {name[:80]} fits several weights of the bundle: {places}")
    missing = [name for name in names if name not in weights]
    more = f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else ""
    raise AdapterError(
        f"{source}: expected the adapter of the bundle, which has no weights {', '.join(name[:120] for name in missing[:_SHOWN])}{more}: "
        "give the bundle of the model that the adapter was trained on"
    )
