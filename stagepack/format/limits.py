"""Limits on the content of a bundle, which bound the memory and the time of a reader (SPEC L1, L2)."""

from typing import Annotated

from msgspec import Meta

# The integer type of the format: every integer fits 64 bits, so that a reader in any language can hold it (SPEC E3).
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]

# Sizes of files, in bytes. The safetensors library has the same limit of weight headers.
MANIFEST_BYTES = 64 * 2**20
GRAPH_BYTES = 512 * 2**20
ONNX_BYTES = 64 * 2**20
WEIGHT_HEADER_BYTES = 100_000_000
SIGNATURE_BYTES = 16 * 2**20

# Fields of all messages of one ONNX file.
ONNX_FIELDS = 2**22

ENTRY_POINTS = 256

# Stages of one entry point.
STAGES = 4096

# Dimensions of one tensor, and a size, stride, offset or number of elements.
RANK = 64
TENSOR_ELEMENTS = 2**62

# Bytes of the weights of zeros in one graph, which no file has.
ZERO_BYTES = 2**40

# Nesting of containers in an argument or a signature, of operations in a dimension, of contexts, module calls, subgraphs and regions.
NESTING_DEPTH = 64

# Nesting of messages in an ONNX file. A node in a branch is three messages deeper than the node that has the branch.
ONNX_DEPTH = 256

# Nodes, arguments, outputs, names, and integers and operations in dimensions that all region calls of one graph unfold to; nodes that the
# calls of subgraphs in one graph or subgraph come to.
UNFOLDED_ITEMS = 2**22

# Characters of the names that all region calls of one graph are filled to.
UNFOLDED_CHARACTERS = 2**27

# Operands of one operation in a dimension.
EXPR_TERMS = 1024

# Conditions on the sizes of one entry point.
GUARDS = 1024

# The speed of the device of a stage, relative to the other devices.
SLOWEST_SPEED, FASTEST_SPEED = 1e-6, 1e6

NAME_CHARACTERS = 1024

# Characters of the schema of an operator. The longest of torch 2.13 has 605.
SCHEMA_CHARACTERS = 4096

# Characters of a template. A brace is two characters in a template, and a name may consist of braces.
TEMPLATE_CHARACTERS = 2 * NAME_CHARACTERS

# Problems of a manifest, a graph or a header that one error lists.
REPORTED_PROBLEMS = 1000


def is_plain(value: object) -> bool:
    """Whether the format can represent a constant: None, a bool, a float, an integer of 64 bits, a string without lone surrogates."""
    if type(value) is int:
        return -(2**63) <= value < 2**63
    if type(value) is str:
        return value.isascii() or not any("\ud800" <= character <= "\udfff" for character in value)
    return value is None or type(value) in (bool, float)
