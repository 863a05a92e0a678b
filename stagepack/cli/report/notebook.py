"""A bundle as a notebook shows it: the report without its nodes, in a frame of its own."""

from html import escape

from stagepack.cli.bundle_facts import each_entry_point
from stagepack.cli.report.page import bundle_page
from stagepack.format.reader import Bundle

_FRAME = '<iframe srcdoc="{page}" sandbox style="width: 100%; height: 30em; border: 1px solid #8884"></iframe>'


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
