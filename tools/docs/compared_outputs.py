"""Outputs of a page and of its run: what differs from run to run, whether they are the same, and failures that the page does not want.

A page states a failure that it wants: ``[exit status N]`` below the output of the command, or a line ``<!-- fails: REASON -->`` above
the block, for a traceback, failed tests, or a status that the block does not state yet. An internal error is never wanted.
"""

import re
from collections.abc import Callable

from tools.docs.page import Block, stated_outputs

_INTERNAL_ERROR = "internal error:"
_TRACEBACK = "Traceback (most recent call last)"
_PYTEST_PATTERN = re.compile(r"^(?:=+ )?(?:\d+ \w+, )*\d+ (?:failed|errors?)\b.*", re.MULTILINE)
_STATUS_PATTERN = re.compile(r"^\[exit status -?\d+\]$", re.MULTILINE)
# What differs from run to run: times, digests, paths, versions, rounding errors.
_VARYING_PATTERNS = [
    (re.compile(r"\b[0-9a-f]{16,64}\b"), "DIGEST"),
    (re.compile(r"(?<![\w.])(?:\d[\d,]*(?:\.\d+)?|…) ?(?:s|ms|µs)\b(?: \(\d+:\d\d:\d\d\))?"), "TIME"),
    # The phases of "first answer after 1.4 s: open 0.001, import torch 1.3, ..."
    (re.compile(r"(?<=\w )(?:\d+\.\d{3}|…)(?=,|$)", re.MULTILINE), "TIME"),
    (re.compile(r"\b\d(?:\.\d+)?e-\d+\b"), "SMALL"),
    (re.compile(r"\btorch \d[\w.+]*"), "torch VERSION"),
    # The last line of pytest.
    (re.compile(r"(?:\b\d+|…) (?=passed|deselected|skipped|xfailed|xpassed|warnings?)"), "N "),
    (re.compile(r"\bidle by microbatches: .*"), "idle by microbatches"),
    (re.compile(r"(?<=127\.0\.0\.1:)\d+"), "PORT"),
    (re.compile(r"(?m)[ \t]+"), " "),
    (re.compile(r"(?m)^ | $"), ""),
]

# How long a whole command took, and how many tests there are: pages leave them out, since the machine that writes them may be busy, and
# readers take them for those of stagepack.
_LEFT_OUT_PATTERNS = [
    (re.compile(r"(?m)^((?:wrote .*|first answer|all weights).*? (?:in|after)) \d[\d.]* s\b"), r"\1 … s"),
    (re.compile(r"(?<=\w )\d+\.\d{3}(?=,|$)", re.MULTILINE), "…"),
    (re.compile(r"\b\d+ (?=(?:passed|deselected)\b)"), "… "),
    (re.compile(r"(?m)(passed.*? in) \d[\d.]*s\b"), r"\1 … s"),
]


def without_times(output: str) -> str:
    """An output as pages show it, without the times of whole commands and the number of tests."""
    for pattern, replacement in _LEFT_OUT_PATTERNS:
        output = pattern.sub(replacement, output)
    return output


def normalize_output(normal_output: str) -> str:
    """An output with placeholders for what varies, and one space for any run of spaces."""
    for pattern, placeholder in _VARYING_PATTERNS:
        normal_output = pattern.sub(placeholder, normal_output)
    return normal_output.strip("\n ")


def is_same_output(stated_output: str, actual_output: str) -> bool:
    """Whether an output is what a page states; a line ``...`` of the page stands for any lines but an exit status."""
    stated_parts = re.split(r"(?m)^[ ]*\.\.\.[ ]*$\n?", stated_output)
    output_pattern = r"(?:(?!\[exit status).*\n)*?".join(
        re.escape(normalize_output(stated_part) + "\n") if stated_part.strip() else "" for stated_part in stated_parts
    )
    return (
        re.fullmatch(output_pattern, normalize_output(actual_output) + "\n" if actual_output.strip() else "")
        is not None
    )


def has_same_digests(stated_output: str, actual_output: str) -> bool:
    """Whether two outputs have the same digests."""
    digests, _ = _VARYING_PATTERNS[0]
    return digests.findall(stated_output) == digests.findall(actual_output)


def find_unwanted_failure(block: Block, stated_output: str, actual_output: str) -> str:
    """Find a failure that the page does not want; the result describes it, and is empty without one.

    stated_output: the output of a command, or of Python code, in the page.
    actual_output: the output of its run, or again that in the page.
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


def check_output(
    block: Block, next_block: Block | None, actual_outputs: list[str], is_same: Callable[[str, str], bool]
) -> str:
    """What is wrong with the outputs of a block; empty when they are what the page states."""
    wrong_outputs = [
        (stated_output, actual_output)
        for stated_output, actual_output in zip(stated_outputs(block, next_block), actual_outputs, strict=True)
        if not is_same(stated_output, actual_output)
    ]
    return "\n".join(
        f"the page states:\n{stated_output}\nthe run printed:\n{actual_output}"
        for stated_output, actual_output in wrong_outputs
    )
