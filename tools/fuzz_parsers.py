"""Fuzz the parsers, guided by coverage: ``python -m tools.fuzz_parsers graph --seconds 3600``.

Begins with the conformance vectors, the frozen bundles, requests of all kinds, and what earlier runs kept below ``build/fuzz``. Most
contents are changed in their structure, with lengths and digests made right; the others byte by byte. Prints executions and coverage of
each parser, and its findings: an exception that is no typed error, or one content that takes 20 s or 2 GiB. Findings are written beside
their tracebacks. The exit status is 1 if there are new findings.

The fuzzer is atheris, which has wheels for Linux on x86_64 and Python 3.11 to 3.13.
"""

import argparse
import contextlib
import hashlib
import random
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz.mutation import locations, mutate, mutate_alike
from tests.fuzz.parsers import PARSER_MODULES, FuzzedParser, fuzzed_parser

INSTRUMENTED = ["stagepack", "stagepack_loaders", "stagepack_serving", "stagepack_text"]
# Seconds of processor time.
SECONDS = 20
MEMORY_MIB = 2048
MAX_BYTES = 2**18


def main() -> None:
    """Fuzz each parser in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PARSER_MODULES)}; all without one")
    parser.add_argument("--seconds", type=int, default=60, help="for each parser")
    parser.add_argument("--runs", type=int, default=-1, help="end after so many executions")
    parser.add_argument("--seed", type=int, default=0, help="0 takes another one each time")
    parser.add_argument("--folder", type=Path, default=Path("build/fuzz"), help="where contents and findings are kept")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if unknown := set(options.names) - set(PARSER_MODULES):
        parser.error(f"no parser {', '.join(sorted(unknown))}: choose among {', '.join(PARSER_MODULES)}")
    if options.child:
        fuzz(options.names[0], options)
    sys.exit(sum([run_apart(parser_name, options) for parser_name in options.names or PARSER_MODULES]) > 0)


def run_apart(parser_name: str, options: argparse.Namespace) -> int:
    """Fuzz one parser, print what came of it, and return the number of new findings."""
    folder: Path = options.folder / parser_name
    findings = folder / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    known_paths = set(findings.iterdir())
    arguments = [f"--{option}={getattr(options, option)}" for option in ("seconds", "runs", "seed", "folder")]
    command = [sys.executable, "-W", "ignore", "-m", "tools.fuzz_parsers", parser_name, "--child", *arguments]
    start = time.monotonic()
    with (folder / "log").open("w") as log:
        status = subprocess.run(command, stdout=log, stderr=log, check=False).returncode
    log_text = (folder / "log").read_text(errors="replace")
    executions = re.search(r"number_of_executed_units: (\d+)", log_text)
    coverage = re.findall(r"cov: (\d+) ft: (\d+) corp: (\d+)", log_text)
    if executions is None or not coverage:
        sys.exit(f"{parser_name}: the fuzzer ended with status {status}, see {folder / 'log'}:\n{log_text[-2000:]}")
    edges, features, contents = map(int, coverage[-1])
    print(
        f"{parser_name:9} {int(executions[1]):11,} executions in {time.monotonic() - start:5.0f} s, {edges:6,} edges, "
        f"{features:6,} features, {contents:5,} contents",
        flush=True,
    )
    new = sorted(set(findings.iterdir()) - known_paths)
    for path in new:
        reason = path.with_suffix(".txt")
        if path != reason:
            print(f"  finding {path}: {reason.read_text().splitlines()[-1] if reason.exists() else 'see the log'}")
    return len(new)


def fuzz(parser_name: str, options: argparse.Namespace) -> None:
    """Fuzz one parser in this process, which ends with it."""
    # Only what is imported here is instrumented.
    import atheris  # noqa: PLC0415 - it has no wheel for some machines

    with atheris.instrument_imports(include=INSTRUMENTED):
        from stagepack.errors import StagepackError  # noqa: PLC0415

        parser = fuzzed_parser(parser_name)
    folder: Path = options.folder / parser_name
    contents = folder / "contents"
    contents.mkdir(exist_ok=True)
    for content in parser.seeds:
        (contents / short_digest(content)).write_bytes(content)
    arguments = [
        sys.argv[0],
        f"-max_total_time={options.seconds}",
        f"-runs={options.runs}",
        f"-seed={options.seed}",
        # Time of any kind: on a busy machine, a process waits for processors.
        f"-timeout={10 * SECONDS}",
        f"-report_slow_units={10 * SECONDS}",  # `FindingRecorder` counts the time of the processor
        f"-rss_limit_mb={MEMORY_MIB}",
        f"-max_len={MAX_BYTES}",
        f"-artifact_prefix={folder / 'findings'}/",
        "-keep_seed=1",
        "-print_final_stats=1",
        str(contents),
    ]
    # Looked up at each call: `Setup` puts another function in its place.
    mutator = Mutator(parser, lambda content, max_bytes: bytes(atheris.Mutate(content, max_bytes)))
    reader = FindingRecorder(parser, StagepackError, folder / "findings")
    atheris.Setup(arguments, reader.read, custom_mutator=mutator.change, custom_crossover=mutator.exchange)
    atheris.Fuzz()


def short_digest(content: bytes) -> str:
    """A file name for a content."""
    return hashlib.sha256(content).hexdigest()[:16]


class FindingRecorder:
    """Reads contents, and writes the first one of each finding into a folder, with its traceback."""

    def __init__(self, parser: FuzzedParser, refusal: type[Exception], folder: Path) -> None:
        self._parser = parser
        self._refusal = refusal
        self._folder = folder

    def read(self, content: bytes) -> None:
        """Read a content."""
        start = time.process_time()
        try:
            with contextlib.suppress(self._refusal):
                self._parser.read(content)
            if time.process_time() - start > SECONDS:
                raise TimeoutError(f"more than {SECONDS} s")  # noqa: TRY301 - it is a finding as others
        except Exception as error:  # noqa: BLE001 - it is the finding
            frame = traceback.extract_tb(error.__traceback__)[-1]
            path = self._folder / short_digest(f"{type(error).__name__} {frame.filename}:{frame.lineno}".encode())
            if not path.exists():
                path.write_bytes(content)
                path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))


class Mutator:
    """Changes contents: most in their structure, the others, and those that have none, byte by byte."""

    def __init__(self, parser: FuzzedParser, change_bytes: Callable[[bytes, int], bytes]) -> None:
        self._parser = parser
        self._change_bytes = change_bytes

    def change(self, content: bytes, max_bytes: int, seed: int) -> bytes:
        """Change one to four locations of a content."""
        generator = random.Random(seed)  # noqa: S311 - repeatable
        if generator.random() < 0.3:
            return self._change_bytes(content, max_bytes)
        try:
            fields = self._parser.decode(content)
            for _ in range(generator.choice([1, 1, 1, 2, 4])):
                self._change_location(fields, generator)
            return self._parser.encode(fields)[:max_bytes]
        except Exception:  # noqa: BLE001 - not every content has a structure, not every structure is a content
            return self._change_bytes(content, max_bytes)

    def exchange(self, content: bytes, other_content: bytes, max_bytes: int, seed: int) -> bytes:
        """Put a part of another content into a content."""
        generator = random.Random(seed)  # noqa: S311 - repeatable
        try:
            fields, other_locations = self._parser.decode(content), list(locations(self._parser.decode(other_content)))
            container, key = generator.choice(list(locations(fields)))
            alike = [item for item in other_locations if type(item[0][item[1]]) is type(container[key])]
            other_container, other_key = generator.choice(alike or other_locations)
            container[key] = other_container[other_key]
            return self._parser.encode(fields)[:max_bytes]
        except Exception:  # noqa: BLE001 - as above
            return content

    def _change_location(self, fields: Any, generator: random.Random) -> None:
        kind = generator.randrange(3)
        if kind == 0:
            mutate(fields, generator)
        elif kind == 1:
            mutate_alike(fields, generator, [])
        else:
            text_locations = [
                (container, key) for container, key in locations(fields) if isinstance(container[key], str)
            ]
            container, key = generator.choice(text_locations)
            container[key] = self._change_bytes(container[key].encode(), 64).decode(errors="replace")


if __name__ == "__main__":
    main()
