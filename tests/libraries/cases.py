"""All models of libraries."""

from typing import cast

import tests.libraries.models
from tests.libraries.case import LibraryCase
from tests.zoo.cases import cases_of

CASES = cast("list[LibraryCase]", cases_of(tests.libraries.models))
# Those that CI runs: their libraries are installed anyway.
QUICK = ("torch-dlrm", "torch-lstm-any-length", "torch-gru-any-length")
