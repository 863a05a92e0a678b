"""Write a bundle whole or not at all.

The files are written into a folder beside the final name, forced to disk, and renamed when everything is there.
Whatever moment the writer dies at, the name holds the old bundle, or nothing, or the new one.
"""

import hashlib
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import msgspec

from stagepack.errors import OutputExistsError, WriteError
from stagepack.format.codec import encode_manifest
from stagepack.format.manifest import File, Manifest
from stagepack.format.validate import MANIFEST_NAME, check_manifest, raise_problems
from stagepack.format.weights import TensorSpec, weight_file_header

# The bytes of a stored tensor, in pieces of any length.
ByteChunks = Iterable[bytes | memoryview]


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSource:
    """Tensors to be written.

    Attributes:
        specs: dtype and shape of each tensor by name, in the order in which they are written.
        read: returns the bytes of the tensor of a name.
    """

    specs: Mapping[str, TensorSpec]
    read: Callable[[str], ByteChunks]


# How the manifest of a bundle begins, a damaged one too.
_BEGINNING: Final = re.compile(rb'\s*\{\s*"format"\s*:\s*"stagepack"')


def check_output_path(out: str | os.PathLike[str], *, overwrite: bool) -> None:
    """Refuse a name that a bundle cannot take, before any work is done for it.

    Raises:
        OutputExistsError: `out` exists and `overwrite` is false, or it is something other than a bundle.
        WriteError: there is no folder to write it into.
    """
    path = Path(os.path.abspath(out))
    if os.path.lexists(path) and not overwrite:
        raise OutputExistsError(f"{out}: already exists: choose another name, or overwrite it (--overwrite)")
    if os.path.lexists(path) and (path.is_symlink() or not _is_bundle(path)):
        raise OutputExistsError(f"{out}: exists and is not a bundle, so it is not overwritten: choose another name")
    if not path.parent.is_dir():
        raise WriteError(f"{out}: expected the folder {path.parent} to exist")


class BundleWriter:
    """Writes one bundle; use it in a ``with`` statement and call `finish` last.

    Leaving the statement without `finish` removes everything that was written.
    """

    def __init__(self, out: str | os.PathLike[str], *, overwrite: bool) -> None:
        """Take the name `out`.

        Raises:
            OutputExistsError: `out` exists and `overwrite` is false, or it is something other than a bundle.
            WriteError: its folder is not there or cannot be written.
        """
        check_output_path(out, overwrite=overwrite)
        self._out = Path(os.path.abspath(out))
        self._overwrite = overwrite
        self._files: list[File] = []
        self._folder = self._out.with_name(f".{self._out.name}.{secrets.token_hex(4)}.part")
        self._retired = self._folder.with_suffix(".old")
        try:
            self._folder.mkdir()
        except OSError as error:
            raise WriteError(f"{out}: cannot write there: {error.strerror}: {self._out.parent}") from None

    def __enter__(self) -> Self:
        """Give the writer itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove what was not finished; say an error of the operating system as a `WriteError`."""
        shutil.rmtree(self._folder, ignore_errors=True)
        if os.path.lexists(self._out):
            shutil.rmtree(self._retired, ignore_errors=True)
        if isinstance(error, OSError):
            raise WriteError(
                f"{self._out}: could not be written, nothing was changed: {error.strerror or error}"
            ) from error

    def write_file(self, name: str, pieces: ByteChunks) -> None:
        """Write one file, and note its size and digest."""
        digest = hashlib.sha256()
        with (self._folder / name).open("xb") as file:
            for piece in pieces:
                digest.update(piece)
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        self._files.append(File(name=name, size=size, sha256=digest.hexdigest()))

    def link_file(self, path: Path, file: File) -> None:
        """Take a file of another bundle over as it is: without a copy where the file system can, and without reading it."""
        try:
            os.link(path, self._folder / file.name)
        except OSError:  # another file system, or one without links
            shutil.copyfile(path, self._folder / file.name)
            _sync(self._folder / file.name)
        self._files.append(file)

    def write_tensors(self, name: str, tensors: Iterable[TensorSpec], read: Callable[[str], ByteChunks]) -> None:
        """Write a weight file with the tensors in the order given; `read` gives the bytes of each by name."""
        specs = list(tensors)

        def pieces() -> ByteChunks:
            head, gaps = weight_file_header(specs)
            yield head
            for spec, gap in zip(specs, gaps, strict=True):
                yield bytes(gap)
                yield from read(spec.name)

        self.write_file(name, pieces())

    def finish(self, manifest: Manifest) -> None:
        """Write the manifest, with the files written so far, and give the bundle its name.

        Raises:
            OutputExistsError: meanwhile something else has taken the name.
            FormatError: the manifest breaks rules.
        """
        manifest = msgspec.structs.replace(manifest, files=tuple(sorted(self._files, key=lambda file: file.name)))
        raise_problems(check_manifest(manifest))
        self.write_file(MANIFEST_NAME, [encode_manifest(manifest)])
        _sync(self._folder)
        check_output_path(self._out, overwrite=self._overwrite)
        try:
            if os.path.lexists(self._out):
                os.rename(self._out, self._retired)
            os.rename(self._folder, self._out)
        except BaseException:  # an interrupt too must not leave the name without the old bundle
            if os.path.lexists(self._retired) and not os.path.lexists(self._out):
                os.rename(self._retired, self._out)
            raise
        _sync(self._out.parent)


def _is_bundle(path: Path) -> bool:
    """Whether a folder is a bundle, if a damaged one: what else has a manifest.json is not ours to remove."""
    manifest = path / MANIFEST_NAME
    if not manifest.is_file():
        return False
    with manifest.open("rb") as file:
        return _BEGINNING.match(file.read(4096)) is not None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
