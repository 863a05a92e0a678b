"""The sections of the HTML page of a bundle."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any
from xml.etree.ElementTree import Element

from stagepack.cli.bundle_facts import bundle_facts, size_lines
from stagepack.cli.cut_facts import bubble_share
from stagepack.cli.output import count_of
from stagepack.cli.profile_facts import assumption_lines
from stagepack.cli.quantities import format_bytes, format_flops, format_time
from stagepack.cli.report.charts import bar, column_chart
from stagepack.cli.report.html_element import Child, html_element
from stagepack.format.manifest import format_inputs
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape

_MAX_MICROBATCHES = 32


def summary_section(bundle: Bundle, cut_facts: dict[str, Any], profile_facts: dict[str, Any] | None) -> Element:
    """Return the format, the size, the origin and the inputs of a bundle, and where its costs come from."""
    facts = bundle_facts(bundle)
    producer = f"stagepack {facts['producer']['stagepack']}, torch {facts['producer']['torch']}"
    sizes = ", ".join(f"{symbol} = {size}" for symbol, size in cut_facts["sizes"].items())
    stages = count_of("stage", len(cut_facts["stages"]))
    is_measured = profile_facts is not None and "device" not in profile_facts
    paragraphs: list[list[Child]] = [
        [f"Format {facts['version']}, {format_bytes(facts['bytes'])}, {stages}, written by {producer}."],
        ["sha256 ", html_element("code", facts["digest"])],
        ["Inputs: ", html_element("code", format_inputs(bundle.entry_point)), "."],
        [
            f"{'Memory and transfers' if is_measured else 'Costs'} are estimates for one call"
            + (f" with {sizes}." if sizes else ".")
        ],
    ]
    lines = (*size_lines(bundle), *assumption_lines(profile_facts))
    paragraphs += [[f"{line[0].upper()}{line[1:]}."] for line in lines]
    return html_element("div", [html_element("p", paragraph) for paragraph in paragraphs])


def stage_table(cut_facts: dict[str, Any]) -> Element:
    """Return the stages with their costs, drawn as bars relative to the largest of all stages."""
    stages = cut_facts["stages"]
    cost_columns = (
        ("weights", "weight_bytes", format_bytes),
        ("compute", "flops", format_flops),
        ("memory", "memory", format_bytes),
        ("time", "picoseconds", format_time),
    )
    largest = {key: max((stage[key] for stage in stages), default=0) or 1 for _, key, _ in cost_columns}
    rows: list[list[Element]] = []
    for stage in stages:
        row = [
            number_cell(str(stage["stage"])),
            html_element("td", html_element("code", stage["starts_at"] or "the model")),
            number_cell(str(stage["nodes"])),
        ]
        for column, key, format_cost in cost_columns:
            has_limit = column == "memory" and stage["memory_limit"]
            limit = f" of {format_bytes(stage['memory_limit'])}" if has_limit else ""
            cost_bar = bar(column, stage[key] / largest[key])
            row.append(html_element("td", format_cost(stage[key]) + limit, cost_bar, class_="bar"))
        rows.append(row)
    return data_table(["#stage", "starts at", "#nodes", "weights", "compute", "memory", "time"], rows)


def edge_table(cut_facts: dict[str, Any]) -> Element:
    """Return the edges with their sizes in one call."""
    rows = []
    for edge in cut_facts["edges"]:
        targets = [*_stage_runs(edge["consumers"]), *(["result"] if edge["result"] else [])]
        source = "input" if edge["producer"] is None else f"stage {edge['producer']}"
        target = (", ".join(targets) or "(unused)") + (" (skip)" if edge["skips"] else "")
        rows.append(
            [
                html_element("td", html_element("code", edge["name"])),
                html_element("td", html_element("code", edge["value"])),
                html_element("td", source, class_="short"),
                html_element("td", target),
                number_cell(format_bytes(edge["bytes"])),
            ]
        )
    return data_table(["name", "value", "from", "to", "#bytes"], rows)


def _stage_runs(stage_numbers: Sequence[int]) -> Iterator[str]:
    """Yield the names of stages, three or more in a row as one text; the numbers ascend."""
    for _, run in itertools.groupby(enumerate(stage_numbers), key=lambda entry: entry[1] - entry[0]):
        numbers = [stage_number for _, stage_number in run]
        if len(numbers) > 2:
            yield f"stages {numbers[0]} to {numbers[-1]}"
        else:
            yield from (f"stage {stage_number}" for stage_number in numbers)


def balance_section(cut_facts: dict[str, Any], stage_times: Sequence[float]) -> Element:
    """Return the balance of the stages, the transfer between them, and a chart of the pipeline bubble."""
    bubble_shares = [bubble_share(stage_times, count) for count in range(1, _MAX_MICROBATCHES + 1)]
    title = f"Share of the time that devices are idle, for 1 to {_MAX_MICROBATCHES} microbatches"
    rows = [[number_cell(count), number_cell(f"{share:.1%}")] for count, share in cut_facts["bubble"].items()]
    bubble_table = data_table(["#microbatches", "#idle"], rows)
    bubble_table.set("class", "narrow")
    balance = html_element("strong", f"{cut_facts['slowest_over_mean']:.2f}")
    transfer = html_element("strong", format_bytes(cut_facts["traffic"]))
    return html_element(
        "div",
        html_element("p", "Time of the slowest stage divided by the mean: ", balance, "."),
        html_element("p", "Transfer between stages in one call: ", transfer, "."),
        html_element("p", title, " (the pipeline bubble):"),
        html_element("div", column_chart(bubble_shares, title), class_="wide"),
        bubble_table,
    )


def node_section() -> Element:
    """Return the search field and the empty table of nodes, which the script of the page fills."""
    table = data_table(["#stage", "#node", "module", "operator", "outputs", "#compute"], [])
    table.set("id", "node-list")
    table[1].set("id", "node-rows")
    return html_element(
        "div",
        html_element("p", html_element("label", "Search by module, operator, value or shape:", for_="node-search")),
        html_element("input", type="search", id="node-search", autocomplete="off", spellcheck="false"),
        html_element("p", "The list requires JavaScript.", id="node-count", aria_live="polite"),
        scrollable(table),
        html_element("button", "Show more", type="button", id="node-more", hidden="hidden"),
    )


def node_rows(bundle: Bundle) -> Iterator[list[str]]:
    """Yield the cells of each node, for the table of nodes."""
    prefix = f"{bundle.entry_point.name} " if bundle.fragment else ""
    for stage_number in range(len(bundle.stages)):
        graph = bundle.graph(stage_number)
        for node_index, node in enumerate(graph.nodes):
            outputs = [value for value in node.outputs if value is not None]
            yield [
                f"{prefix}{stage_number}",
                str(node_index),
                graph.scopes[node.scope].path,
                graph.ops[node.op].name,
                ", ".join(f"{value.name} {value.dtype}{format_shape(value.shape)}" for value in outputs),
                format_flops(node.cost.flops),
            ]


def scrollable(content: Element) -> Element:
    """Return an element in a box that scrolls by itself where the screen is too narrow."""
    return html_element("div", content, class_="wide")


def data_table(column_names: Sequence[str], rows: Sequence[Sequence[Element]]) -> Element:
    """Return a table; a column whose name starts with '#' is aligned to the right.

    On a narrow screen each row is shown as a block, in which each cell has the name of its column.
    """
    heads = [
        html_element(
            "th", column_name.lstrip("#"), scope="col", **({"class_": "number"} if column_name.startswith("#") else {})
        )
        for column_name in column_names
    ]
    for row in rows:
        for column_name, cell in zip(column_names, row, strict=True):
            cell.set("data-label", column_name.lstrip("#"))
    return html_element(
        "table",
        html_element("thead", html_element("tr", heads)),
        html_element("tbody", [html_element("tr", row) for row in rows]),
    )


def number_cell(content: str) -> Element:
    """Return a cell that is aligned to the right."""
    return html_element("td", content, class_="number")
