"""All models of libraries."""

from typing import cast

import tests.libraries.models
from tests.libraries.case import LibraryCase
from tests.zoo.cases import cases_of

# What torch says of those that it does not capture. Lumina 2 makes a set of the lengths of its captions, which it takes from their mask;
# for captions of full length, it is captured as the recipes say.
REFUSED = {"diffusers-lumina2": "unhashable type: non-nested SymInt"}
_ALL = cast("list[LibraryCase]", cases_of(tests.libraries.models))
CASES = [case for case in _ALL if case.name not in REFUSED]
REFUSED_CASES = [case for case in _ALL if case.name in REFUSED]
# Models that CI runs: their libraries are installed anyway.
QUICK = ("torch-dlrm", "torch-lstm-any-length", "torch-gru-any-length")
STAGES = (1, 3, 5)
