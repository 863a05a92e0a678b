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
# What `make gpu` runs of them.
SAMPLE = [*EXAMPLES, *ROWS[::2], *ARCHITECTURES[::40]]


def named(*names: str) -> list[Case]:
    """The cases of these names."""
    by_name = {case.name: case for case in CASES}
    return [by_name[name] for name in names]


# What `make test` runs of them: one of each mechanism that a cut must keep.
QUICK = [
    *EXAMPLES[::5],
    *named(
        "aliasing-activation-written-after-it-crossed",
        "aliasing-broadcast-that-is-a-view",
        "aliasing-inputs-written",
        "aliasing-input-written-and-returned",
        "containers-containers",
        "containers-dicts-of-other-kinds",
        "containers-cache-in-and-out",
        "operators-custom-operator-that-writes-and-gives",
        "operators-draws-in-two-branches",
        "operators-factories-with-a-device",
        "operators-int8-weights-in-groups",
        "operators-recurrent-layers",
        "regions-branches-and-loops",
        "regions-associative-scan",
        "regions-function-with-its-own-gradient",
        "regions-invoke-subgraph",
        "regions-regions",
        "regions-vmap",
        "shapes-arithmetic-on-sizes",
        "shapes-bounded-by-a-table",
        "shapes-nonzero",
        "shapes-sizes-from-data",
        "state-batch-norm-that-trains",
        "state-caches-of-several-layers",
        "state-read-everywhere-and-written-late",
        "state-tensor-that-is-no-buffer-written",
        "values-constants-beside-values",
        "values-lazy-conjugates-cross",
        "values-strided-values-cross",
        "values-two-towers",
        "values-u-net",
        "weights-dtypes",
        "weights-half-precision-layers",
        "weights-tied-at-both-ends",
        "weights-views-of-one-storage",
        "vision-vit",
    ),
]
