"""The JSON Schemas of ``schema/v1`` follow from the types, and hold for every good case."""

import json
import subprocess
import sys

import jsonschema
import pytest

from tests.conformance.vectors import SCHEMA, Case, cases

SCHEMAS = {kind: json.loads((SCHEMA / "v1" / f"{kind}.schema.json").read_text()) for kind in ("manifest", "graph")}
DOCUMENTS = [case for case in cases() if case.kind in SCHEMAS and not {"text", "hex"} & case.fields.keys()]
# JSON Schema takes 7.0 for an integer.
NOT_SAID = {"a fraction for an integer"}


def validator(kind: str) -> jsonschema.Draft202012Validator:
    return jsonschema.Draft202012Validator(SCHEMAS[kind])


@pytest.mark.parametrize("kind", SCHEMAS)
def test_it_is_a_schema(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMAS[kind])


@pytest.mark.parametrize("case", [case for case in DOCUMENTS if not case.rules], ids=str)
def test_good_cases_are_valid(case: Case) -> None:
    validator(case.kind).validate(case.document())


@pytest.mark.parametrize(
    "case", [case for case in DOCUMENTS if case.rules == {"E3"} and case.fields["name"] not in NOT_SAID], ids=str
)
def test_cases_of_wrong_types_are_not(case: Case) -> None:
    assert not validator(case.kind).is_valid(case.document())


@pytest.mark.process
def test_the_committed_files_are_those_that_the_types_give() -> None:
    tool = SCHEMA.parent / "tools" / "generate_schema.py"
    done = subprocess.run([sys.executable, str(tool), "--check"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
