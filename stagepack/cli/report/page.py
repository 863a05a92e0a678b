"""A bundle -> one HTML page: the function `stagepack.report`, and what a notebook shows.

All names in the page come from the bundle, so they are untrusted. They are written by `xml.etree` as text of elements, or as JSON in
which no markup can begin. The content security policy of the page allows no script or style but those that the page contains.
"""

import base64
import hashlib
import itertools
import json
import os
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

from stagepack.cli.bundle_facts import bundle_facts, each_entry_point, size_lines
from stagepack.cli.cost_facts import assumption_lines, bubble_share, bundle_cut_facts, cost_facts, memory_text
from stagepack.cli.output import count_of, format_bytes, format_flops, format_time
from stagepack.cli.report.html_elements import (
    Child,
    bar,
    column_chart,
    data_table,
    html_element,
    number_cell,
    scrollable,
)
from stagepack.cli.report.pipeline_drawing import pipeline_drawing
from stagepack.cli.report.timeline import timeline_section
from stagepack.cli.shared_flags import folder_name
from stagepack.errors import CutError, OptionError
from stagepack.format.manifest import Plan, format_inputs
from stagepack.format.output_file import check_output_file, output_file
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.opening import BundleSource, opened

if TYPE_CHECKING:
    from stagepack.partition.profile import DeviceProfile, Profile
    from stagepack_loaders.run_trace import RunTrace

_MAX_MICROBATCHES = 32
_FRAME = '<iframe srcdoc="{page}" sandbox style="width: 100%; height: 30em; border: 1px solid #8884"></iframe>'


def write_report(
    bundle: BundleSource,
    *,
    out: str | os.PathLike[str],
    profile: "Profile | DeviceProfile | str | os.PathLike[str] | None" = None,
    trace: "RunTrace | None" = None,
    overwrite: bool = False,
) -> Path:
    """Write a report about a bundle as one HTML page, which requests nothing from the network. Needs no torch.

    Args:
        bundle: the folder of the bundle, its URL, or an opened bundle.
        out: the file to write; it must not exist unless `overwrite` is true.
        profile: the device that the times are of, such as ``"h100"``; or measured times of its nodes, from `stagepack.read_profile`, or
            their file.
        trace: a run of the bundle, from `Pipeline.trace`, which is drawn beside the estimate.
        overwrite: replace a file that exists at `out`.

    Returns:
        The path of the file.

    Raises:
        OutputExistsError: `out` exists and `overwrite` is false.
        OptionError: the trace is of another bundle, or of no stage.
        CutError: the bundle contains no plan, or the profile is of another model.
        WriteError: the file cannot be written, or would be inside a bundle.
        DigestError, FormatError: the bundle is damaged.

    Examples:
        >>> stagepack.report("m.stagepack", out="m.html")
    """
    check_output_file(out, overwrite=overwrite)
    opened_bundle = opened(bundle)
    if trace is not None:
        opened_bundle.entry_point  # noqa: B018 - a trace is of one: it raises if none is selected
        _check_trace(trace, opened_bundle)
    html = bundle_page(opened_bundle, profile, trace)
    with output_file(out) as path:
        path.write_text(html, encoding="utf-8")
    return Path(out)


def _check_trace(trace: "RunTrace", bundle: Bundle) -> None:
    if trace.bundle != bundle.identity:
        raise OptionError(
            f"trace: expected a run of {bundle.location} ({bundle.digest[:12]}), found one of "
            f"{trace.bundle[:12] or 'another bundle'}"
        )
    if all(span.kind != "compute" or span.stage is None for span in trace.spans):
        raise OptionError("trace: expected a run of at least one stage, found none")
    if any(span.stage is not None and span.stage >= len(bundle.stages) for span in trace.spans):
        raise OptionError(f"trace: expected the stages 0 to {len(bundle.stages) - 1}, found others")


def notebook_view(bundle: Bundle) -> str:
    """Return the selected entry point of a bundle as HTML, or if none is selected, each.

    A bundle without a plan, whose costs are unknown, is shown by its text.
    """
    return "".join(
        f"<p><code>{escape(repr(selected))}</code></p>"
        if selected.entry_point.plan is None
        else _FRAME.format(page=escape(bundle_page(selected, with_nodes=False)))
        for selected in each_entry_point(bundle)
    )


def bundle_page(
    bundle: Bundle,
    profile: "Profile | DeviceProfile | str | os.PathLike[str] | None" = None,
    trace: "RunTrace | None" = None,
    *,
    with_nodes: bool = True,
) -> str:
    """Return the HTML page of a bundle."""
    bundle_name = folder_name(bundle.location)
    style, script = _asset("report.css"), _asset("report.js")
    entry_points = each_entry_point(bundle)
    page = html_element(
        "html",
        _head(f"{bundle_name}: stages", style, script),
        html_element(
            "body",
            html_element("h1", bundle_name),
            *(element for selected in entry_points for element in _entry_point(selected, profile, trace)),
            *(_node_section(entry_points, script) if with_nodes else []),
        ),
        lang="en",
    )
    return "<!DOCTYPE html>\n" + tostring(page, encoding="unicode", method="html") + "\n"


def _entry_point(
    bundle: Bundle, profile: "Profile | DeviceProfile | str | os.PathLike[str] | None", trace: "RunTrace | None"
) -> list[Element]:
    """The sections of an entry point, under its name if the bundle has several."""
    plan = bundle.entry_point.plan
    if plan is None:
        raise CutError(f"{bundle.location}: the bundle contains no plan: cut it again with 'stagepack recut'")
    profile_facts = None
    if profile is not None:
        plan, profile_facts = _profiled_plan(bundle, plan, profile)
    costs = bundle_cut_facts(bundle, plan)
    stage_times = [stage.time for stage in plan.stages]
    return [
        *([html_element("h2", f"Entry point {bundle.entry_point.name}")] if bundle.fragment else []),
        _summary_section(bundle, costs, profile_facts),
        html_element("h2", "Stages"),
        scrollable(_stage_table(costs)),
        html_element("h2", "Pipeline"),
        html_element(
            "p",
            "Each box is a stage with its first module, its weights and its time; its bar is its time beside that of the slowest "
            "stage. Labels are the bytes of one call. In red: values that skip stages. Dashed: inputs and results that pass stages.",
        ),
        scrollable(pipeline_drawing(costs)),
        html_element("h2", "Edges"),
        scrollable(_edge_table(costs)),
        html_element("h2", "Balance"),
        _balance_section(costs, stage_times),
        *([] if trace is None else [html_element("h2", "Timeline"), timeline_section(trace, stage_times)]),
    ]


def _profiled_plan(
    bundle: Bundle, plan: Plan, profile: "Profile | DeviceProfile | str | os.PathLike[str]"
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan of a bundle with the times of a profile, and facts about these."""
    from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - numpy, only for other times
    from stagepack.recutter import plan_bundle  # noqa: PLC0415 - the same

    cut_options = CutOptions(plan=plan, profile=profile)
    partition = plan_bundle(bundle, cut_options)
    return partition.profiled_plan, cost_facts(cut_options, partition)


def _summary_section(bundle: Bundle, cut_facts: dict[str, Any], profile_facts: dict[str, Any] | None) -> Element:
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


def _stage_table(cut_facts: dict[str, Any]) -> Element:
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
            text = memory_text(stage) if key == "memory" else format_cost(stage[key])
            row.append(html_element("td", text, bar(column, stage[key] / largest[key]), class_="bar"))
        rows.append(row)
    return data_table(["#stage", "starts at", "#nodes", "weights", "compute", "memory", "time"], rows)


def _edge_table(cut_facts: dict[str, Any]) -> Element:
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


def _balance_section(cut_facts: dict[str, Any], stage_times: Sequence[float]) -> Element:
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


def _node_section(entry_points: Sequence[Bundle], script: str) -> list[Element]:
    """The search field and the empty table of nodes, which the script of the page fills."""
    rows = json.dumps([row for selected in entry_points for row in _node_rows(selected)], separators=(",", ":"))
    # So no markup can begin or end in it.
    rows = rows.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    table = data_table(["#stage", "#node", "module", "operator", "outputs", "#compute"], [])
    table.set("id", "node-list")
    table[1].set("id", "node-rows")
    return [
        html_element("h2", "Nodes"),
        html_element("p", html_element("label", "Search by module, operator, value or shape:", for_="node-search")),
        html_element("input", type="search", id="node-search", autocomplete="off", spellcheck="false"),
        html_element("p", "The list requires JavaScript.", id="node-count", aria_live="polite"),
        scrollable(table),
        html_element("button", "Show more", type="button", id="node-more", hidden="hidden"),
        _verbatim("script", rows, type="application/json", id="nodes"),
        _verbatim("script", script),
    ]


def _node_rows(bundle: Bundle) -> Iterator[list[str]]:
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


def _head(title: str, style: str, script: str) -> Element:
    policy = (
        f"default-src 'none'; style-src '{_policy_digest(style)}'; script-src '{_policy_digest(script)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return html_element(
        "head",
        html_element("meta", charset="utf-8"),
        html_element("meta", http_equiv="Content-Security-Policy", content=policy),
        html_element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        html_element("title", title),
        _verbatim("style", style),
    )


def _verbatim(tag: str, content: str, **attributes: object) -> Element:
    """Return a script or a style, whose content is written without escapes."""
    element = html_element(tag, **attributes)
    element.text = content
    return element


def _asset(file_name: str) -> str:
    return files("stagepack.cli.report").joinpath(file_name).read_text(encoding="utf-8")


def _policy_digest(content: str) -> str:
    """Return the digest by which a policy allows a script or style: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
