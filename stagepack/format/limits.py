"""Ceilings on what a reader accepts, so that a hostile bundle cannot make it use memory without bound (SPEC L1, L2)."""

from typing import Annotated

from msgspec import Meta

# Every integer of the format, so that a reader in any language can hold it (SPEC E3).
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

MANIFEST_BYTES = 64 * 2**20
GRAPH_BYTES = 512 * 2**20
ONNX_BYTES = 64 * 2**20
ONNX_FIELDS = 2**22  # of an ONNX file and all messages in it
WEIGHT_HEADER_BYTES = 100_000_000  # the ceiling of the safetensors library itself
STAGES = 4096
RANK = 64
NESTING_DEPTH = 64  # lists in arguments, containers in the signature, arithmetic in a dimension, contexts, calls of subgraphs and regions
ONNX_DEPTH = 256  # messages of an ONNX file: a node in a branch lies three deeper than the node with the branch
UNFOLDED_ITEMS = 2**22  # nodes, arguments, values and names that the calls of regions of one graph become
EXPR_TERMS = 1024  # numbers that one operation of a dimension takes
NAME_CHARACTERS = 1024
TENSOR_ELEMENTS = 2**62
REPORTED_PROBLEMS = 1000  # what one error tells; the rest is left out
