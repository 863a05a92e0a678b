"""The expressions of the alerts in `examples/monitoring`, evaluated on scraped metrics: the forms of PromQL that they use.

Source: https://prometheus.io/docs/prometheus/latest/querying/basics/. `rate` and `increase` do not extrapolate to the ends of their window.
"""

import itertools
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]
Vector = Mapping[Labels, float]
# The samples of all instances at a time, in seconds.
Scrape = tuple[float, Mapping[str, Vector]]
_TOKEN: Final = re.compile(r'\s*("[^"]*"|\d+[smh](?=\])|[\d.]+(?:e\d+)?|\w+|=~|!=|==|[-+*/(){}\[\],=<>])')
_SECONDS: Final = {"s": 1, "m": 60, "h": 3600}
_AGGREGATIONS: Final[Mapping[str, Callable[[list[float]], float]]] = {
    "sum": sum,
    "max": max,
    "count": lambda values: float(len(values)),
}
_OPERATORS: Final[Mapping[str, Callable[[float, float], float | bool]]] = {
    "/": operator.truediv,
    ">": operator.gt,
    "==": operator.eq,
}


def scrape(time: float, pages: Mapping[str, str | None]) -> Scrape:
    """The samples of the pages of instances; None for one that does not answer."""
    samples: dict[str, dict[Labels, float]] = {"up": {}}
    for instance, page in pages.items():
        added = {"job": "stagepack", "instance": instance}
        samples["up"][frozenset(added.items())] = 0.0 if page is None else 1.0
        for family in text_string_to_metric_families(page or ""):
            for sample in family.samples:
                labels = frozenset((sample.labels | added).items())
                samples.setdefault(sample.name, {})[labels] = sample.value
    return time, samples


def firing(expression: str, scrapes: Sequence[Scrape]) -> Vector:
    """The labels and the values for which an alert fires at the last scrape."""
    parser = _Parser(expression, scrapes)
    answer = parser.comparison()
    assert not parser.tokens, f"not understood: {parser.tokens}"
    assert not isinstance(answer, float)
    return answer


class _Parser:
    """Evaluates an expression from left to right."""

    def __init__(self, expression: str, scrapes: Sequence[Scrape]) -> None:
        self.tokens = _TOKEN.findall(expression)
        assert "".join(self.tokens) == re.sub(r"\s", "", expression), expression
        self._scrapes = scrapes

    def _take(self, *expected: str) -> str:
        token: str = self.tokens.pop(0)
        assert not expected or token in expected, (token, expected)
        return token

    def comparison(self) -> Vector | float:
        left = self._quotient()
        while self.tokens and self.tokens[0] in (">", "=="):
            left = _combine(self._take(), left, self._quotient())
        return left

    def _quotient(self) -> Vector | float:
        left = self._term()
        while self.tokens and self.tokens[0] == "/":
            left = _combine(self._take(), left, self._term())
        return left

    def _term(self) -> Vector | float:
        word = self._take()
        if word in _AGGREGATIONS:
            self._take("by")
            names = self._names()
            groups: dict[Labels, list[float]] = {}
            for labels, value in self._argument().items():
                groups.setdefault(frozenset(pair for pair in labels if pair[0] in names), []).append(value)
            return {labels: _AGGREGATIONS[word](values) for labels, values in groups.items()}
        if word == "histogram_quantile":
            self._take("(")
            quantile = float(self._take())
            self._take(",")
            buckets = self.comparison()
            self._take(")")
            assert not isinstance(buckets, float)
            return _quantiles(quantile, buckets)
        if word in ("rate", "increase", "deriv"):
            self._take("(")
            answer = self._over_time(word)
            self._take(")")
            return answer
        return float(word) if word[0].isdigit() else self._selected(self._scrapes[-1], word, self._matchers())

    def _argument(self) -> Vector:
        self._take("(")
        answer = self.comparison()
        self._take(")")
        assert not isinstance(answer, float)
        return answer

    def _names(self) -> list[str]:
        self._take("(")
        names = [self._take()]
        while self._take(",", ")") == ",":
            names.append(self._take())
        return names

    def _matchers(self) -> list[tuple[str, str, str]]:
        matchers = []
        if self.tokens and self.tokens[0] == "{":
            while self._take("{", ",", "}") != "}":
                matchers.append((self._take(), self._take("=", "=~", "!="), self._take().strip('"')))
        return matchers

    def _over_time(self, function: str) -> Vector:
        """The change of each series from the first sample in the window to the last one."""
        name, matchers = self._take(), self._matchers()
        self._take("[")
        window = self._take()
        self._take("]")
        first_time = self._scrapes[-1][0] - float(window[:-1]) * _SECONDS[window[-1]]
        series: dict[Labels, list[tuple[float, float]]] = {}
        for scraped in self._scrapes:
            if scraped[0] >= first_time:
                for labels, value in self._selected(scraped, name, matchers).items():
                    series.setdefault(labels, []).append((scraped[0], value))
        changes = {}
        for labels, points in series.items():
            if len(points) > 1:  # a series that has just appeared has no rate
                values = [value for _, value in points]
                pairs = itertools.pairwise(values)
                is_counter = function != "deriv"
                change = sum(after - before if after >= before or not is_counter else after for before, after in pairs)
                changes[labels] = change if function == "increase" else change / (points[-1][0] - points[0][0])
        return changes

    def _selected(self, scraped: Scrape, name: str, matchers: Sequence[tuple[str, str, str]]) -> Vector:
        return {
            labels: value
            for labels, value in scraped[1].get(name, {}).items()
            if all(_matches(dict(labels).get(label, ""), how, wanted) for label, how, wanted in matchers)
        }


def _matches(value: str, how: str, wanted: str) -> bool:
    return bool(re.fullmatch(wanted, value)) if how == "=~" else (value == wanted) is (how == "=")


def _combine(symbol: str, left: Vector | float, right: Vector | float) -> Vector | float:
    """A binary operator: of vectors, for equal labels; a comparison keeps the values of the left that fulfil it."""
    function = _OPERATORS[symbol]
    if isinstance(left, float):
        assert isinstance(right, float)
        return float(function(left, right))
    pairs = {
        labels: (value, right if isinstance(right, float) else right[labels])
        for labels, value in left.items()
        if isinstance(right, float) or labels in right
    }
    if symbol == "/":
        return {labels: a / b if b else math.nan for labels, (a, b) in pairs.items()}
    return {labels: a for labels, (a, b) in pairs.items() if function(a, b)}


def _quantiles(quantile: float, buckets: Vector) -> Vector:
    """The upper bound of the bucket that holds the quantile; Prometheus interpolates within it."""
    histograms: dict[Labels, list[tuple[float, float]]] = {}
    for labels, count in buckets.items():
        bound = float(dict(labels)["le"])
        histograms.setdefault(frozenset(pair for pair in labels if pair[0] != "le"), []).append((bound, count))
    answer = {}
    for labels, counts in histograms.items():
        total = max(count for _, count in counts)
        if total:
            answer[labels] = min(bound for bound, count in counts if count >= quantile * total)
    return answer
