"""The version of the format that this code writes, and what it can read (SPEC M1 to M3)."""

MAJOR = 1
MINOR = 0
VERSION = f"{MAJOR}.{MINOR}"

# Names a bundle may list under "features"; a reader refuses a name it does not know.
FEATURES: frozenset[str] = frozenset()
