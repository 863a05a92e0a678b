"""A bundle -> one HTML page.

All names in it are the bundle's, and may be anybody's: they become text of elements that `xml.etree` writes, or JSON in which
no markup can begin; the page's policy lets no script or style run but the two that it carries.
"""

import base64
import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.resources import files
from typing import Any
from xml.etree.ElementTree import Element, tostring

from stagepack.cli.bundle_facts import bundle_facts
from stagepack.cli.cut_facts import DEVICES, bubble, cut_facts
from stagepack.cli.quantities import format_bytes, format_flops, format_time
from stagepack.cli.report.html_element import Child, element
from stagepack.cli.report.svg_drawing import bar, columns, pipeline
from stagepack.errors import CutError
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape

_MICROBATCHES = 32


def page(bundle: Bundle) -> str:
    """The page of a bundle.

    Raises:
        CutError: the bundle carries no plan, so that nothing is known of its costs.
        DigestError, FormatError: a graph is damaged, or breaks a rule of the format.
    """
    plan = bundle.manifest.plan
    if plan is None:
        raise CutError(f"{bundle.path}: the bundle carries no plan: cut it again with `stagepack recut`")
    facts = cut_facts(plan, bundle.edges, bundle.manifest.symbols)
    whole = bundle_facts(bundle)
    for edge, known in zip(facts["edges"], whole["edges"], strict=True):
        edge["result"] = known["result"]
    times = [stage.time for stage in plan.stages]
    style, script = _asset("report.css"), _asset("report.js")
    policy = f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; base-uri 'none'; form-action 'none'"
    name = bundle.path.name or str(bundle.path)
    html = element(
        "html",
        element(
            "head",
            element("meta", charset="utf-8"),
            element("meta", http_equiv="Content-Security-Policy", content=policy),
            element("meta", name="viewport", content="width=device-width, initial-scale=1"),
            element("title", f"{name}: stages"),
            _raw("style", style),
        ),
        element(
            "body",
            element("h1", name),
            _summary(whole, facts),
            element("h2", "Stages"),
            _wide(_stages(facts)),
            element("h2", "Pipeline"),
            element(
                "p",
                "Bytes of one call. Above, in red: what skips stages. Below: inputs and results that pass by others.",
            ),
            _wide(pipeline(facts)),
            element("h2", "Edges"),
            _wide(_edges(facts)),
            element("h2", "Balance"),
            _balance(facts, [bubble(times, count) for count in range(1, _MICROBATCHES + 1)]),
            element("h2", "Nodes"),
            _nodes(),
            _raw("script", _as_data(list(_node_rows(bundle))), type="application/json", id="nodes"),
            _raw("script", script),
        ),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + tostring(html, encoding="unicode", method="html") + "\n"


def _summary(whole: dict[str, Any], facts: dict[str, Any]) -> Element:
    producer = f"stagepack {whole['producer']['stagepack']}, torch {whole['producer']['torch']}"
    sizes = ", ".join(f"{name} = {size}" for name, size in facts["sizes"].items())
    lines: list[list[Child]] = [
        [
            f"Format {whole['version']}, {format_bytes(whole['bytes'])}, {len(facts['stages'])} stages, made by {producer}."
        ],
        ["sha256 ", element("code", whole["digest"])],
        ["Costs are estimates for one call" + (f" with {sizes}" if sizes else "") + f", on {DEVICES}."],
    ]
    return element("div", [element("p", line) for line in lines])


def _stages(facts: dict[str, Any]) -> Element:
    stages = facts["stages"]
    kinds = (
        ("weights", "weight_bytes", format_bytes),
        ("compute", "flops", format_flops),
        ("memory", "memory", format_bytes),
        ("time", "picoseconds", format_time),
    )
    most = {field: max((stage[field] for stage in stages), default=0) or 1 for _, field, _ in kinds}
    rows: list[list[Element]] = []
    for stage in stages:
        row = [
            _number(str(stage["stage"])),
            element("td", element("code", stage["starts_at"] or "the model")),
            _number(str(stage["nodes"])),
        ]
        for kind, field, readable in kinds:
            limit = f" of {format_bytes(stage['memory_limit'])}" if kind == "memory" and stage["memory_limit"] else ""
            row.append(
                element("td", readable(stage[field]) + limit, bar(kind, stage[field] / most[field]), class_="bar")
            )
        rows.append(row)
    return _table(["#stage", "starts at", "#nodes", "weights", "compute", "memory", "time"], rows)


def _edges(facts: dict[str, Any]) -> Element:
    rows = []
    for edge in facts["edges"]:
        targets = [f"stage {consumer}" for consumer in edge["consumers"]] + (["result"] if edge["result"] else [])
        source = "input" if edge["producer"] is None else f"stage {edge['producer']}"
        to = (", ".join(targets) or "nobody") + (" (skip)" if edge["skips"] else "")
        cells: list[Child] = [element("code", edge["name"]), element("code", edge["value"]), source, to]
        rows.append([*(element("td", cell) for cell in cells), _number(format_bytes(edge["bytes"]))])
    return _table(["name", "value", "from", "to", "#bytes"], rows)


def _balance(facts: dict[str, Any], bubbles: list[float]) -> Element:
    title = f"Part of the time that devices wait, for 1 to {len(bubbles)} microbatches"
    rows = [[_number(count), _number(f"{part:.1%}")] for count, part in facts["bubble"].items()]
    narrow = _table(["#microbatches", "#waiting"], rows)
    narrow.set("class", "narrow")
    return element(
        "div",
        element(
            "p", "Slowest stage over the mean of all: ", element("strong", f"{facts['slowest_over_mean']:.2f}"), "."
        ),
        element("p", "Between stages, in one call: ", element("strong", format_bytes(facts["traffic"])), "."),
        element("p", title, " (the pipeline bubble):"),
        element("div", columns(bubbles, title), class_="wide"),
        narrow,
    )


def _nodes() -> Element:
    table = _table(["#stage", "#node", "module", "operator", "makes", "#compute"], [])
    table[1].set("id", "node-rows")
    return element(
        "div",
        element("p", element("label", "Search by module, operator, value or shape:", for_="node-search")),
        element("input", type="search", id="node-search", autocomplete="off", spellcheck="false"),
        element("p", "The list needs JavaScript.", id="node-count", aria_live="polite"),
        _wide(table),
        element("button", "Show more", type="button", id="node-more", hidden="hidden"),
    )


def _node_rows(bundle: Bundle) -> Iterator[list[str]]:
    for stage in range(len(bundle.stages)):
        graph = bundle.graph(stage)
        for index, node in enumerate(graph.nodes):
            made = ", ".join(f"{v.name} {v.dtype}{format_shape(v.shape)}" for v in node.outputs if v is not None)
            yield [
                str(stage),
                str(index),
                graph.scopes[node.scope].path,
                graph.ops[node.op].name,
                made,
                format_flops(node.cost.flops),
            ]


def _table(names: Sequence[str], rows: Sequence[Sequence[Element]]) -> Element:
    """A table; numbers (columns that begin with '#') stand on the right."""
    heads = [
        element("th", name.lstrip("#"), scope="col", **({"class_": "number"} if name.startswith("#") else {}))
        for name in names
    ]
    return element(
        "table", element("thead", element("tr", heads)), element("tbody", [element("tr", row) for row in rows])
    )


def _number(text: str) -> Element:
    return element("td", text, class_="number")


def _wide(inner: Element) -> Element:
    """What is too wide for a small screen scrolls by itself."""
    return element("div", inner, class_="wide")


def _raw(tag: str, content: str, **attributes: object) -> Element:
    """A script or a style, whose content is written as it stands."""
    made = element(tag, **attributes)
    made.text = content
    return made


def _as_data(value: Any) -> str:
    """JSON in which no markup can begin or end."""
    text = json.dumps(value, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(name: str) -> str:
    return files("stagepack.cli.report").joinpath(name).read_text(encoding="utf-8")


def _digest(content: str) -> str:
    """How a policy names what may run: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
