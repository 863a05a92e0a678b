"""The rules of the format: the requirements on a manifest and a graph beyond their types.

Each check cites the number of its rule in ``schema/SPEC.md``, and yields every problem and not only the first.
"""
