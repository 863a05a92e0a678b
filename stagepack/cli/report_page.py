"""A bundle -> one HTML page: the function `stagepack.report`, and what a notebook shows.

All names in the page come from the bundle, so they are untrusted: `xml.etree` writes them as text of elements. The content security policy
of the page allows no script, and no style but its own.
"""

import base64
import hashlib
import itertools
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

from stagepack.cli.bundle_facts import bundle_facts, each_entry_point, size_lines
from stagepack.cli.cost_facts import assumption_lines, bubble_share, bundle_cut_facts, cost_facts, memory_text
from stagepack.cli.output import count_of, printable
from stagepack.cli.run_tracing import trace_facts
from stagepack.cli.shared_flags import bundle_folder_name
from stagepack.cli.stage_diagram import mermaid_lines
from stagepack.errors import CutError, OptionError
from stagepack.format.manifest import format_inputs
from stagepack.format.output_file import check_output_file, output_file
from stagepack.format.plan import Plan
from stagepack.format.quantities import format_bytes, format_flops, format_time
from stagepack.format.reader import Bundle
from stagepack.format.shapes import format_shape
from stagepack.opening import BundleSource, opened

if TYPE_CHECKING:
    from stagepack.partition.profile import DeviceProfile, Profile
    from stagepack_loaders.run_trace import RunTrace

Child = str | Element
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
        trace: a run of the bundle, from `Pipeline.trace`, whose idle time is shown beside the estimate.
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
    bundle_name = bundle_folder_name(bundle.location)
    entry_points = each_entry_point(bundle)
    page = _element(
        "html",
        _head(f"{bundle_name}: stages"),
        _element(
            "body",
            _element("h1", bundle_name),
            *(element for selected in entry_points for element in _entry_point(selected, profile, trace)),
            *(_node_section(entry_points) if with_nodes else []),
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
    flowchart = _element("pre", class_="mermaid")
    flowchart.text = "\n".join(map(printable, mermaid_lines(costs)))
    return [
        *([_element("h2", f"Entry point {bundle.entry_point.name}")] if bundle.fragment else []),
        _summary_section(bundle, costs, profile_facts),
        _element("h2", "Stages"),
        _stage_table(costs),
        _element("h2", "Pipeline"),
        _element("p", "A flowchart in Mermaid, which viewers of Markdown draw:"),
        flowchart,
        _element("h2", "Edges"),
        _edge_table(costs),
        _element("h2", "Balance"),
        *_balance_section(costs, stage_times),
        *([] if trace is None else [_element("h2", "Traced run"), *_run_section(trace, stage_times)]),
    ]


def _profiled_plan(
    bundle: Bundle, plan: Plan, profile: "Profile | DeviceProfile | str | os.PathLike[str]"
) -> tuple[Plan, dict[str, Any] | None]:
    """The plan of a bundle with the times of a profile, and facts about these."""
    from stagepack.partition.cut_options import CutOptions  # noqa: PLC0415 - numpy, only for other times
    from stagepack.roads.recut import plan_bundle  # noqa: PLC0415 - the same

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
        ["sha256 ", _element("code", facts["digest"])],
        ["Inputs: ", _element("code", format_inputs(bundle.entry_point)), "."],
        [
            f"{'Memory and transfers' if is_measured else 'Costs'} are estimates for one call"
            + (f" with {sizes}." if sizes else ".")
        ],
    ]
    lines = (*size_lines(bundle), *assumption_lines(profile_facts))
    paragraphs += [[f"{line[0].upper()}{line[1:]}."] for line in lines]
    return _element("div", *(_element("p", *paragraph) for paragraph in paragraphs))


def _stage_table(cut_facts: dict[str, Any]) -> Element:
    """Return the stages with their costs."""
    rows: list[list[Child]] = [
        [
            str(stage["stage"]),
            _element("code", stage["starts_at"] or "the model"),
            str(stage["nodes"]),
            format_bytes(stage["weight_bytes"]),
            format_flops(stage["flops"]),
            memory_text(stage),
            format_time(stage["picoseconds"]),
        ]
        for stage in cut_facts["stages"]
    ]
    return _table(["#stage", "starts at", "#nodes", "#weights", "#compute", "#memory", "#time"], rows)


def _edge_table(cut_facts: dict[str, Any]) -> Element:
    """Return the edges with their sizes in one call."""
    rows: list[list[Child]] = []
    for edge in cut_facts["edges"]:
        targets = [*_stage_runs(edge["consumers"]), *(["result"] if edge["result"] else [])]
        source = "input" if edge["producer"] is None else f"stage {edge['producer']}"
        target = (", ".join(targets) or "(unused)") + (" (skip)" if edge["skips"] else "")
        rows.append(
            [
                _element("code", edge["name"]),
                _element("code", edge["value"]),
                source,
                target,
                format_bytes(edge["bytes"]),
            ]
        )
    return _table(["name", "value", "from", "to", "#bytes"], rows)


def _stage_runs(stage_numbers: Sequence[int]) -> Iterator[str]:
    """Yield the names of stages, three or more in a row as one text; the numbers ascend."""
    for _, run in itertools.groupby(enumerate(stage_numbers), key=lambda entry: entry[1] - entry[0]):
        numbers = [stage_number for _, stage_number in run]
        if len(numbers) > 2:
            yield f"stages {numbers[0]} to {numbers[-1]}"
        else:
            yield from (f"stage {stage_number}" for stage_number in numbers)


def _balance_section(cut_facts: dict[str, Any], stage_times: Sequence[float]) -> list[Element]:
    """The balance of the stages, the transfer between them, and the pipeline bubble."""
    rows: list[list[Child]] = [[count, f"{share:.1%}"] for count, share in cut_facts["bubble"].items()]
    balance = _element("strong", f"{cut_facts['slowest_over_mean']:.2f}")
    transfer = _element("strong", format_bytes(cut_facts["traffic"]))
    return [
        _element("p", "Time of the slowest stage divided by the mean: ", balance, "."),
        _element("p", "Transfer between stages in one call: ", transfer, "."),
        _element("p", "Share of the time that devices are idle (the pipeline bubble):"),
        _table(["#microbatches", "#idle"], rows),
    ]


def _run_section(trace: "RunTrace", stage_times: Sequence[float]) -> list[Element]:
    """What a traced run took, and how long its processes were idle, beside the estimate for as many requests.

    stage_times: the time of each stage in picoseconds, estimated or measured by `stagepack profile`.
    """
    facts = trace_facts(trace)
    requests = count_of("request", facts["requests"])
    processes = {span.stage: span.process for span in trace.spans if span.kind == "compute" and span.stage is not None}
    process_times: defaultdict[int, float] = defaultdict(float)
    for stage_number, process in processes.items():
        process_times[process] += stage_times[stage_number]
    estimated_idle = bubble_share(list(process_times.values()), facts["requests"])
    rows: list[list[Child]] = [
        [process["name"], *(f"{process[f'{kind}_share']:.1%}" for kind in ("compute", "transfer", "wait"))]
        for process in facts["processes"]
    ]
    return [
        _element("p", f"{requests} in {format_time(facts['seconds'] * 1e12)}. Perfetto draws the file of the trace."),
        _element(
            "p",
            "Share of the time that processes computed nothing: measured ",
            _element("strong", f"{facts['idle']:.1%}"),
            f", estimated for {requests} ",
            _element("strong", f"{estimated_idle:.1%}"),
            ".",
        ),
        _table(["process", "#computing", "#transferring", "#waiting"], rows),
    ]


def _node_section(entry_points: Sequence[Bundle]) -> Iterator[Element]:
    """The nodes of each stage, under its number."""
    yield _element("h2", "Nodes")
    for bundle in entry_points:
        prefix = f"{bundle.entry_point.name}, " if bundle.fragment else ""
        for stage_number in range(len(bundle.stages)):
            graph = bundle.graph(stage_number)
            rows: list[list[Child]] = []
            for node_index, node in enumerate(graph.nodes):
                outputs = [value for value in node.outputs if value is not None]
                text = ", ".join(f"{value.name} {value.dtype}{format_shape(value.shape)}" for value in outputs)
                path, operator = graph.scopes[node.scope].path, graph.ops[node.op].name
                rows.append([str(node_index), path, operator, text, format_flops(node.cost.flops)])
            summary = f"{prefix}stage {stage_number}: {count_of('node', len(rows))}"
            table = _table(["#node", "module", "operator", "outputs", "#compute"], rows)
            yield _element("details", _element("summary", summary), table)


def _head(title: str) -> Element:
    style = files("stagepack.cli").joinpath("report.css").read_text(encoding="utf-8")
    # A policy allows a style by its digest: https://www.w3.org/TR/CSP3/#grammardef-hash-source.
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    style_element = _element("style")
    style_element.text = style  # without escapes
    return _element(
        "head",
        _element("meta", charset="utf-8"),
        _element("meta", http_equiv="Content-Security-Policy", content=policy),
        _element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        _element("title", title),
        style_element,
    )


def _table(column_names: Sequence[str], rows: Iterable[Sequence[Child]]) -> Element:
    """A table that scrolls by itself where the screen is too narrow; a column whose name starts with '#' is aligned to the right."""
    classes = [{"class_": "number"} if column_name.startswith("#") else {} for column_name in column_names]
    heads = [
        _element("th", column_name.lstrip("#"), **attributes)
        for column_name, attributes in zip(column_names, classes, strict=True)
    ]
    body = [
        _element("tr", *(_element("td", cell, **attributes) for cell, attributes in zip(row, classes, strict=True)))
        for row in rows
    ]
    table = _element("table", _element("thead", _element("tr", *heads)), _element("tbody", *body))
    return _element("div", table, class_="wide")


def _element(tag: str, *children: Child, **attributes: str) -> Element:
    """An element with texts and elements in it; in names of attributes ``_`` is written as ``-``, and a trailing ``_`` is dropped."""
    parent = Element(tag, {name.rstrip("_").replace("_", "-"): value for name, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            parent.append(child)
        elif len(parent):
            parent[-1].tail = (parent[-1].tail or "") + printable(child)
        else:
            parent.text = (parent.text or "") + printable(child)
    return parent
