"""A bundle -> one HTML page.

All names in the page come from the bundle, so they are untrusted. They are written by `xml.etree` as text of elements, or as JSON in
which no markup can begin. The content security policy of the page allows no script or style but those that the page contains.
"""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from xml.etree.ElementTree import Element, tostring

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.cut_facts import bundle_cut_facts
from stagepack.cli.path_options import folder_name
from stagepack.cli.profile_facts import cost_facts
from stagepack.cli.report.html_element import html_element
from stagepack.cli.report.pipeline_drawing import pipeline_picture
from stagepack.cli.report.sections import (
    balance_section,
    edge_table,
    node_rows,
    node_section,
    scrollable,
    stage_table,
    summary_section,
)
from stagepack.cli.report.timeline_section import timeline_section
from stagepack.errors import CutError
from stagepack.format.plan import Plan
from stagepack.format.reader import Bundle

if TYPE_CHECKING:
    from stagepack.partition.device_profile import DeviceProfile
    from stagepack.partition.profile import Profile
    from stagepack_loaders.run_trace import RunTrace


def bundle_page(
    bundle: Bundle,
    profile: "Profile | DeviceProfile | str | os.PathLike[str] | None" = None,
    trace: "RunTrace | None" = None,
    *,
    with_nodes: bool = True,
) -> str:
    """Return the HTML page of a bundle."""
    bundle_name = folder_name(bundle.location)
    style, zoom_script, node_script = (_asset(name) for name in ("report.css", "picture.js", "report.js"))
    entry_points = each_entry_point(bundle)
    page = html_element(
        "html",
        _head(f"{bundle_name}: stages", style, [zoom_script, node_script]),
        html_element(
            "body",
            html_element("h1", bundle_name),
            *(element for selected in entry_points for element in _entry_point(selected, profile, trace)),
            *([*_node_list(entry_points, node_script), _verbatim("script", zoom_script)] if with_nodes else []),
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
        summary_section(bundle, costs, profile_facts),
        html_element("h2", "Stages"),
        scrollable(stage_table(costs)),
        html_element("h2", "Pipeline"),
        html_element(
            "p",
            "Each box is a stage with its first module, its weights and its time; its bar is its time beside that of the slowest "
            "stage. Labels are the bytes of one call. In red: values that skip stages. Dashed: inputs and results that pass stages.",
        ),
        pipeline_picture(costs),
        html_element("h2", "Edges"),
        scrollable(edge_table(costs)),
        html_element("h2", "Balance"),
        balance_section(costs, stage_times),
        *_timeline(trace, stage_times),
    ]


def _node_list(entry_points: Sequence[Bundle], script: str) -> list[Element]:
    rows = [row for selected in entry_points for row in node_rows(selected)]
    return [
        html_element("h2", "Nodes"),
        node_section(),
        _verbatim("script", _script_json(rows), type="application/json", id="nodes"),
        _verbatim("script", script),
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


def _timeline(trace: "RunTrace | None", stage_times: Sequence[float]) -> list[Element]:
    if trace is None:
        return []
    return [html_element("h2", "Timeline"), timeline_section(trace, stage_times)]


def _head(title: str, style: str, scripts: Sequence[str]) -> Element:
    script_digests = " ".join(f"'{_policy_digest(script)}'" for script in scripts)
    policy = (
        f"default-src 'none'; style-src '{_policy_digest(style)}'; script-src {script_digests}; "
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


def _script_json(value: Any) -> str:
    """Return JSON in which no markup can begin or end."""
    serialized = json.dumps(value, separators=(",", ":"))
    return serialized.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _asset(file_name: str) -> str:
    return files("stagepack.cli.report").joinpath(file_name).read_text(encoding="utf-8")


def _policy_digest(content: str) -> str:
    """Return the digest by which a policy allows a script or style: https://www.w3.org/TR/CSP3/#grammardef-hash-source."""
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
