"""Ceilings on what a reader accepts, so that a hostile bundle cannot make it use memory without bound (SPEC L1, L2)."""

MANIFEST_BYTES = 64 * 2**20
GRAPH_BYTES = 512 * 2**20
WEIGHT_HEADER_BYTES = 100_000_000  # the ceiling of the safetensors library itself
STAGES = 4096
RANK = 64
DEPTH = 64  # lists in arguments, containers in the signature, arithmetic in a dimension, regions in regions
NAME_CHARACTERS = 1024
ELEMENTS = 2**62
