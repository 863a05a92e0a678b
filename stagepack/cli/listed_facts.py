"""The facts of what a folder or URL has, whatever its kind: a bundle, a delta or an adapter."""

from typing import Any

from stagepack.adapter.opened import OpenAdapter
from stagepack.cli.adapter_facts import adapter_facts, print_adapter
from stagepack.cli.bundle_facts import bundle_facts, print_bundle
from stagepack.cli.delta_facts import delta_facts, print_delta
from stagepack.deltas.delta import Delta
from stagepack.documents import Listed


def listed_facts(listed: Listed) -> dict[str, Any]:
    """Return the facts of a bundle, a delta or an adapter as plain data."""
    if isinstance(listed, Delta):
        return delta_facts(listed)
    return adapter_facts(listed) if isinstance(listed, OpenAdapter) else bundle_facts(listed)


def print_listed(listed: Listed) -> None:
    """Print the facts of a bundle, a delta or an adapter for people."""
    if isinstance(listed, Delta):
        print_delta(listed)
    elif isinstance(listed, OpenAdapter):
        print_adapter(listed)
    else:
        print_bundle(listed)
