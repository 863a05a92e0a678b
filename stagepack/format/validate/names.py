"""The forms of names: of values, tensors and files, and of torch dtypes and the like."""

import keyword
import re

from stagepack.format import limits
from stagepack.format.weights import METADATA_KEY, PADDING_PREFIX

MANIFEST_NAME = "manifest.json"
# The configuration of a model of transformers, beside its weights or in a bundle.
MODEL_CONFIG_NAME = "config.json"
SIGNATURE_NAME = "model.sig"
INDEX_NAME = "model.safetensors.index.json"

_IDENTIFIER_PATTERN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,198}[A-Za-z0-9_-])?", re.ASCII)
# The name of a dtype, a device type, a layout or a memory format (M11).
WORD_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
DECIMAL_PATTERN = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
DIGEST_PATTERN = re.compile(r"[0-9a-f]{64}")


def is_identifier(value_name: str) -> bool:
    """Whether a value may have this name: ASCII, not a Python keyword, not too long (G1)."""
    well_formed = _IDENTIFIER_PATTERN.fullmatch(value_name) is not None and len(value_name) <= limits.NAME_CHARACTERS
    return well_formed and not keyword.iskeyword(value_name)


def is_tensor_name(tensor_name: str) -> bool:
    """Whether a tensor in a weight file may have this name (G9)."""
    reserved = tensor_name.startswith(PADDING_PREFIX) or tensor_name == METADATA_KEY
    return 0 < len(tensor_name) <= limits.NAME_CHARACTERS and not reserved
