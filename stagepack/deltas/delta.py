"""An open delta: its document, and its files on request."""

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Final

from stagepack.deltas.document import DELTA_FORMAT, RESULT_NAME, ChangedFile, DeltaDocument
from stagepack.deltas.rules import check_document
from stagepack.errors import Problem
from stagepack.format import limits
from stagepack.format.bundle_files import read_document
from stagepack.format.chunk_reads import ByteProgress
from stagepack.format.chunks import File
from stagepack.format.file_source import FileSource
from stagepack.format.listed_files import ListedFiles
from stagepack.format.manifest import Manifest
from stagepack.format.manifest_codec import DocumentKind, parse_document, parse_manifest
from stagepack.format.rules import MANIFEST_NAME, raise_problems, rule_error

DELTA: Final = DocumentKind(DELTA_FORMAT, DeltaDocument, check_document)


class Delta(ListedFiles):
    """An open delta: what changes from one bundle, its base, to another one, its result.

    ``stagepack.open_delta`` returns it. It imports no torch and needs no `close`. Only the document is read when it is opened.

    Attributes:
        document: the checked document.

    Raises:
        NotABundleError: there is no delta at the path.
        VersionError: the delta is of a newer major version or needs an unknown feature.
        DigestError: the document was changed after it was written.
        LimitError, FormatError: the document breaks a rule.

    Examples:
        >>> delta = stagepack.open_delta("step-12.delta")
        >>> delta.version, delta.base, delta.result
    """

    def __init__(self, path: str | os.PathLike[str], *, source: FileSource | None = None) -> None:
        super().__init__(path, source=source)
        content = read_document(self.path, "delta")
        self.document = parse_document(content, str(self.path / MANIFEST_NAME), DELTA)

    def __repr__(self) -> str:
        """The folder or URL, the version, and the bundles."""
        version = f"version {self.version!r}, " if self.version else ""
        return f"<Delta {self.location!r}, {version}from {self.base[:12]} to {self.result[:12]}>"

    @property
    def document_format(self) -> str:
        """See `ListedFiles`."""
        return self.document.format

    @property
    def listed(self) -> Sequence[File]:
        """See `ListedFiles`."""
        return self.document.files

    @property
    def digest(self) -> str:
        """The SHA-256 of the document in hexadecimal. It identifies the delta."""
        return self.document.sha256

    @property
    def base(self) -> str:
        """The digest of the bundle that the delta is applied to."""
        return self.document.base

    @property
    def result(self) -> str:
        """The digest of the bundle that the delta makes."""
        return self.document.result

    @property
    def version(self) -> str:
        """The name of the result at its trainer; empty if it has none."""
        return self.document.weight_version

    @cached_property
    def changed_files(self) -> dict[str, ChangedFile]:
        """What changes in each file of the result that differs, by file name."""
        return {changed.name: changed for changed in self.document.changed}

    def changed_tensors(self, file_name: str) -> tuple[str, ...]:
        """Return the names of the changed tensors of a weight file of the result, as the delta states them."""
        changed = self.changed_files.get(file_name)
        return () if changed is None else changed.tensors

    @cached_property
    def result_manifest(self) -> Manifest:
        """The manifest of the result.

        Raises:
            DigestError, FormatError: it is damaged, or is not that of the result.
        """
        return parse_manifest(self.result_manifest_content, str(self.path / RESULT_NAME), RESULT_NAME)

    @cached_property
    def result_manifest_content(self) -> bytes:
        """The manifest of the result as it is stored."""
        content = self.read(RESULT_NAME, limits.MANIFEST_BYTES)
        manifest = parse_manifest(content, str(self.path / RESULT_NAME), RESULT_NAME)
        if manifest.sha256 != self.result:
            raise rule_error("Y7", RESULT_NAME, f"expected the manifest {self.result}, found {manifest.sha256}")
        raise_problems(_size_problems(self.document, manifest))
        return content

    def verify(self, progress: ByteProgress | None = None, *, strict: bool = False) -> None:
        """Check the digest of every file and every rule that needs no base. Reads the whole delta.

        Args:
            progress: called by several threads with the number of bytes that were compared with their digests.
            strict: refuse files that the document does not list.

        Raises:
            DigestError: files are missing or changed, or not listed if `strict`.
            FormatError: a rule is broken.
        """
        raise_problems([*self.digest_problems(self.listed, progress), *(self.unlisted_problems() if strict else ())])
        _ = self.result_manifest
        from stagepack.deltas.changed_bytes import ChangedBytes  # noqa: PLC0415 - numpy, which opening a delta does not need

        for changed in self.document.changed:
            ChangedBytes(self, changed).check()


def _size_problems(document: DeltaDocument, manifest: Manifest) -> list[Problem]:
    """Compare the changed files with those of the result (Y7)."""
    sizes = {file.name: file.size for file in manifest.files}
    problems = []
    for changed in document.changed:
        end = changed.parts[-1].end if changed.parts else 0
        if (size := sizes.get(changed.name)) is None or end > size:
            message = f"expected a file of at least {end} bytes in the result, found {'none' if size is None else size}"
            problems.append(Problem(rule="Y7", where=changed.name[:200], message=message))
    return problems
