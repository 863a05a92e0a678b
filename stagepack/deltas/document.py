"""The document of a delta: ``manifest.json`` in its folder, with the format ``stagepack delta`` (SPEC section 13)."""

from typing import Final, Literal

from msgspec import Struct

from stagepack.format.chunks import File
from stagepack.format.limits import Int64, is_plain
from stagepack.format.manifest import VERSION

DELTA_FORMAT: Final = "stagepack delta"
DELTA_VERSION: Final = VERSION
# The manifest of the result, byte for byte.
RESULT_NAME: Final = "result.json"
# The signature of the result, if it had one when the delta was made.
RESULT_SIGNATURE_NAME: Final = "result.sig"
# Parts do not cross the multiples of this, so that threads work on parts of one file, in the cache of a core.
BLOCK_BYTES: Final = 2 * 2**20
WIDTHS: Final = (1, 2, 4, 8)
WEIGHT_VERSION_CHARACTERS: Final = 256

# A gap of this many unchanged elements and more is this byte, and then the remaining gap.
GAP_ESCAPE: Final = 255

Code = Literal["sparse", "dense", "whole"]


def is_weight_version(text: object) -> bool:
    """Whether a text may be the name of a version (Y2)."""
    if not isinstance(text, str) or len(text) > WEIGHT_VERSION_CHARACTERS:
        return False
    return not any(character < " " or character == "\x7f" for character in text) and is_plain(text)


def gap_bytes(count: int, elements: int) -> int:
    """Return the largest number of bytes of the gaps of `count` changed elements among `elements`."""
    return count + elements // GAP_ESCAPE


class Part(Struct, frozen=True, array_like=True):
    """A range of the bytes of a file that differ from the base.

    Attributes:
        start: its first byte, in the file of the result.
        size: its size in bytes.
        code: how its elements are stored.
        width: the size of an element in bytes.
        count: the number of values that are stored: of the changed elements, or of all.
        frames: the sizes of its compressed frames, which follow those of the part before in the data file.
    """

    start: Int64
    size: Int64
    code: Code
    width: Int64
    count: Int64
    frames: tuple[Int64, ...]

    @property
    def end(self) -> int:
        """The byte after its last one."""
        return self.start + self.size


class ChangedFile(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A file of the result that differs from the file of this name in the base, or that the base does not have.

    Attributes:
        name: its name in the result.
        data: the name of the file of the delta that has the frames of its parts, in their order.
        parts: what differs, in ascending order. All other bytes are those of the base at the same positions.
        tensors: the names of the changed tensors of a weight file, for people. Which tensors change, the parts say.
    """

    name: str
    data: str
    parts: tuple[Part, ...] = ()
    tensors: tuple[str, ...] = ()


class DeltaDocument(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a delta changes, from one bundle to another.

    Attributes:
        format: always ``stagepack delta``.
        version: the format version, ``MAJOR.MINOR``.
        base: the digest of the bundle that it is applied to.
        result: the digest of the bundle that it makes.
        weight_version: the name of the result at its trainer, of up to 256 characters, for people and answers. No reader decides by it.
        changed: the files of the result that differ.
        files: all files of the delta but this document and the signature over the delta.
        features: named additions to the format that a reader must know to read the delta.
        sha256: the digest of the document itself, as that of a manifest.
    """

    format: str
    version: str
    base: str
    result: str
    weight_version: str = ""
    changed: tuple[ChangedFile, ...] = ()
    files: tuple[File, ...]
    features: tuple[str, ...] = ()
    sha256: str
