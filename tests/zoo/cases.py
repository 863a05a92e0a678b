"""All models of the zoo: torch's own export examples, a row for everything a cut must survive, and architectures of transformers."""

import importlib
import pkgutil

import tests.zoo.architectures
import tests.zoo.rows
from tests.cases import exportdb_cases
from tests.zoo.case import Case


def _of(package: object) -> list[Case]:
    """The cases of the modules of a package, in the order of their names."""
    modules = (
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    )
    return [case for module in modules for case in getattr(module, "CASES", [])]


ROWS = _of(tests.zoo.rows)
ARCHITECTURES = _of(tests.zoo.architectures)
EXAMPLES = [Case(name=case.name, row="torch's export examples", build=case.build) for case in exportdb_cases()]
CASES = [*EXAMPLES, *ROWS, *ARCHITECTURES]
