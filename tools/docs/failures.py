"""Failures in the outputs of a page, so that none is recorded as the expected output.

A page states a failure that it wants: ``[exit status N]`` below the output of the command, or a line ``<!-- fails: REASON -->`` above
the block, for a traceback, failed tests, or a status that the block does not state yet. An internal error is never wanted.
"""

import re

from tools.docs.page import Block

_INTERNAL_ERROR = "internal error:"
_TRACEBACK = "Traceback (most recent call last)"
_PYTEST_PATTERN = re.compile(r"^(?:=+ )?(?:\d+ \w+, )*\d+ (?:failed|errors?)\b.*", re.MULTILINE)
_STATUS_PATTERN = re.compile(r"^\[exit status -?\d+\]$", re.MULTILINE)


def find_unwanted_failure(block: Block, stated_output: str, actual_output: str) -> str:
    """Find a failure that the page does not want.

    Args:
        block: the block of the page; with `fails` or `not_run`, it may show a traceback and failed tests.
        stated_output: the output of a command, or of Python code, in the page.
        actual_output: the output of its run, or again that in the page.

    Returns:
        A description, or an empty string.
    """
    if _INTERNAL_ERROR in actual_output:
        return "an internal error"
    if block.fails or block.not_run:
        return ""
    if _TRACEBACK in actual_output:
        return "a traceback"
    if failed_tests := _PYTEST_PATTERN.search(actual_output):
        return f"failed tests: {failed_tests[0]}"
    exit_status = _STATUS_PATTERN.search(actual_output)
    return exit_status[0] if exit_status and exit_status[0] not in stated_output else ""
