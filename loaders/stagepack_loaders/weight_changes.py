"""Which weights of a bundle differ from those of a running one: the others are in memory already."""

import bisect
import itertools

from stagepack.format.file_source import FilePatch
from stagepack.format.reader import Bundle
from stagepack.format.weights import StoredTensor


class WeightChanges:
    """The weights in which a bundle differs from the bundle that runs, whose graphs are the same.

    Attributes:
        running: the bundle that runs.
    """

    def __init__(self, running: Bundle, bundle: Bundle) -> None:
        # Files that were edited on purpose have another content than the manifest says.
        self._compares = running.compares_digests and bundle.compares_digests
        self.running, self._bundle = running, bundle
        patches = bundle.patches if self._compares else None
        self._patches = None if patches is None else patches.since(running.digest)
        # The starts of the ranges that change in a file, ascending, and the largest end so far.
        self._ranges: dict[str, tuple[list[int], list[int]]] = {}

    def patch_of(self, file_name: str) -> FilePatch | None:
        """Return the patch from the running weight file to the new one; None if the new file is to be read as a whole."""
        return None if self._patches is None else self._patches.patch_of(file_name)

    def is_changed(self, file_name: str, tensor: StoredTensor) -> bool:
        """Whether a stored tensor is another one than in the bundle that runs."""
        if self._is_equal(file_name):
            return False
        return self.patch_of(file_name) is None or self.changes_range(file_name, tensor.start, tensor.end)

    def changes_range(self, file_name: str, start: int, end: int) -> bool:
        """Whether the patch of a file changes some of these bytes."""
        if file_name not in self._ranges:
            ranges = [] if self._patches is None else self._patches.changed_ranges(file_name)
            ends = itertools.accumulate((range_end for _, range_end in ranges), max)
            self._ranges[file_name] = [range_start for range_start, _ in ranges], list(ends)
        starts, ends_so_far = self._ranges[file_name]
        before = bisect.bisect_left(starts, end)
        return before > 0 and ends_so_far[before - 1] > start

    def _is_equal(self, file_name: str) -> bool:
        running = self.running.files.get(file_name)
        return self._compares and running is not None and running.blake3 == self._bundle.files[file_name].blake3
