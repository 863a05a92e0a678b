"""All models of the zoo: torch's own export examples, a row for everything a cut must survive, and architectures of transformers."""

import importlib
import pkgutil
from types import ModuleType

import tests.zoo.architectures
import tests.zoo.rows
from tests.zoo import examples
from tests.zoo.case import Case


def cases_of(package: ModuleType) -> list[Case]:
    """The cases of the modules of a package, in the order of their names."""
    modules = (
        importlib.import_module(f"{package.__name__}.{module.name}")
        for module in pkgutil.iter_modules(package.__path__)
    )
    return [case for module in modules for case in getattr(module, "CASES", [])]


EXAMPLES = examples.CASES
ROWS = cases_of(tests.zoo.rows)
ARCHITECTURES = cases_of(tests.zoo.architectures)
CASES = [*EXAMPLES, *ROWS, *ARCHITECTURES]
# What CI runs of them.
SAMPLE = [*EXAMPLES, *ROWS[::2], *ARCHITECTURES[::40]]


def named(*names: str) -> list[Case]:
    """The cases of these names."""
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in names]
