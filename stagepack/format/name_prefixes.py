"""Names of weights that another model, or a wrapper of the same one, has behind a prefix."""

from collections import Counter
from collections.abc import Collection, Iterable


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
