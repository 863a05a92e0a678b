"""How many bytes of weights the processes of a group have read. The front shows it on its terminal."""

import contextlib
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Final

from torch.distributed.distributed_c10d import Store

from stagepack.format.chunks import ByteProgress
from stagepack.format.reader import Bundle
from stagepack.terminal import byte_progress
from stagepack_loaders.distributed.routes import FRONT_RANK

_KEY: Final = "weight bytes read"
_SECONDS_BETWEEN_UPDATES: Final = 0.2


class LoadingProgress:
    """Counts what this process reads, and tells the others by their store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._untold_bytes = 0
        self._told_at = -math.inf

    def add(self, byte_count: int) -> None:
        """Count further bytes that this process has read. Several threads may call it."""
        with self._lock:
            self._untold_bytes += byte_count
            if time.monotonic() - self._told_at < _SECONDS_BETWEEN_UPDATES:
                return
            told_bytes, self._untold_bytes = self._untold_bytes, 0
            self._told_at = time.monotonic()
        # The store may have gone: whoever needs it finds that.
        with contextlib.suppress(RuntimeError):
            self._store.add(_KEY, told_bytes)

    def poll(self) -> None:
        """Tell what was read. The front shows what all processes have read."""
        self.add(0)


class _ShownProgress(LoadingProgress):
    """The progress of the front, which shows that of all processes."""

    def __init__(self, store: Store, show_bytes: ByteProgress) -> None:
        super().__init__(store)
        self._show_bytes = show_bytes
        self._shown_bytes = 0
        self._polled_at = time.monotonic()

    def add(self, byte_count: int) -> None:
        self._show_bytes(byte_count)

    def poll(self) -> None:
        if time.monotonic() - self._polled_at >= _SECONDS_BETWEEN_UPDATES:
            self.update()

    def update(self) -> None:
        """Show what all processes have told."""
        self._polled_at = time.monotonic()
        with contextlib.suppress(RuntimeError):
            read_bytes = self._store.add(_KEY, 0)
            self._show_bytes(read_bytes - self._shown_bytes)
            self._shown_bytes = read_bytes


@contextlib.contextmanager
def loading_progress(
    store: Store, rank: int, bundle: Bundle, rank_of_stage: Sequence[int]
) -> Iterator[LoadingProgress]:
    """Show on the terminal of the front how many bytes the processes have read, while they load their stages."""
    if rank != FRONT_RANK:
        yield LoadingProgress(store)
        return
    read_files = {
        (stage_rank, file_name)
        for stage_rank, stage in zip(rank_of_stage, bundle.stages, strict=True)
        for file_name in stage.weights
    }
    total_bytes = sum(bundle.files[file_name].size for _, file_name in read_files)
    with byte_progress(f"loading {bundle.location}", total_bytes) as show_bytes:
        progress = _ShownProgress(store, show_bytes)
        yield progress
        progress.update()
