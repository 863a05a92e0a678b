"""What names may be: of values, tensors, files, and of torch's dtypes and the like."""

import keyword
import re

from stagepack.format import limits
from stagepack.format.weights import METADATA_KEY, PADDING_PREFIX

MANIFEST_NAME = "manifest.json"
SIGNATURE_NAME = "model.sig"

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
FILE_NAME_PATTERN = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,198}[A-Za-z0-9_-])?", re.ASCII)
WORD_PATTERN = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
DECIMAL_PATTERN = re.compile(r"0|[1-9][0-9]{0,17}", re.ASCII)
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")


def is_identifier(name: str) -> bool:
    """Whether a name may become the name of a value: ASCII, no keyword of Python, not too long (G1)."""
    return (
        _IDENTIFIER.fullmatch(name) is not None and not keyword.iskeyword(name) and len(name) <= limits.NAME_CHARACTERS
    )


def is_tensor_name(name: str) -> bool:
    """Whether a tensor may have this name in a weight file (G9)."""
    return 0 < len(name) <= limits.NAME_CHARACTERS and not name.startswith(PADDING_PREFIX) and name != METADATA_KEY
