"""Names of weights that another model, or a wrapper of the same one, has behind a prefix."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping


def name_prefixes(long_names: Iterable[str], short_names: Collection[str]) -> Counter[str]:
    """Return how many long names are a short name behind a prefix that ends with a dot, by prefix."""
    counts: Counter[str] = Counter()
    for long_name in long_names:
        dot = long_name.find(".")
        while dot >= 0:
            if long_name[dot + 1 :] in short_names:
                counts[long_name[: dot + 1]] += 1
            dot = long_name.find(".", dot + 1)
    return counts


def placements(names: Collection[str], known_names: Mapping[str, object]) -> list[dict[str, str]]:
    """Return each way in which all names are known ones: as they are, or else with one prefix added to all, or removed from all."""
    candidates = {name: name for name in names}
    if all(name in known_names for name in names):
        return [candidates]
    added = [{name: prefix + name for name in names} for prefix in name_prefixes(known_names, set(names))]
    removed = [
        {name: name.removeprefix(prefix) for name in names if name.startswith(prefix)}
        for prefix in name_prefixes(names, known_names.keys())
    ]
    return [
        found
        for found in (*added, *removed)
        if len(found) == len(names) and all(name in known_names for name in found.values())
    ]
