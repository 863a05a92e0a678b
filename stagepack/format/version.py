"""The format version that this code writes, and the versions and features that it reads (SPEC M1 to M3)."""

MAJOR = 1
MINOR = 0
VERSION = f"{MAJOR}.{MINOR}"

# The names that `Manifest.features` may list. A reader refuses any other name.
FEATURES: frozenset[str] = frozenset({"named_tuples"})
