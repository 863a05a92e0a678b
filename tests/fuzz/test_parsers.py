"""The parsers raise typed errors alone, for the seeds of the fuzzers and for random changes of them; and the fuzzers run."""

import contextlib
import random
import subprocess
import sys
from pathlib import Path

import pytest

from stagepack.errors import StagepackError
from tests.fuzz.mutation import mutate, mutate_alike
from tests.fuzz.parsers import PARSER_MODULES, FuzzedParser, fuzzed_parser


def is_read(parser: FuzzedParser, content: bytes) -> bool:
    """Whether a content is read, and not refused by a typed error. The error of any other exception names the content."""
    try:
        parser.read(content)
    except StagepackError:
        return False
    except Exception as error:
        raise AssertionError(f"the content {content!r} is not survived") from error
    return True


@pytest.mark.parametrize("name", PARSER_MODULES)
def test_seeds_and_changes_of_them_are_read_or_refused(name: str) -> None:
    with contextlib.closing(fuzzed_parser(name)) as parser:
        readable = [seed for seed in parser.seeds if is_read(parser, seed)]
        assert any(is_read(parser, parser.encode(parser.decode(seed))) for seed in readable)
        generator = random.Random(name)  # noqa: S311 - the same each time is what is wanted
        encoded_count = 0
        for _ in range(300):
            try:
                fields = parser.decode(generator.choice(parser.seeds))
                if generator.random() < 0.5:
                    mutate(fields, generator)
                else:
                    mutate_alike(fields, generator, [])
                content = parser.encode(fields)
            except Exception:  # noqa: BLE001, S112 - not every seed has a structure, not every structure is a content
                continue
            encoded_count += 1
            is_read(parser, content)
        assert encoded_count > 50


@pytest.mark.skipif(
    sys.platform != "linux" or sys.version_info >= (3, 14), reason="atheris has no wheel for this platform"
)
def test_the_fuzzer_reports_executions_and_coverage(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.fuzz_parsers", "weights", "--runs", "300", "--seed", "1"]
    done = subprocess.run([*command, "--folder", str(tmp_path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("weights")
    assert "edges" in done.stdout
    assert list((tmp_path / "weights" / "contents").iterdir())
