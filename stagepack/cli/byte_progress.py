"""Progress by bytes on a terminal."""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator

from rich.console import Console, RenderableType
from rich.progress import DownloadColumn, Progress, SpinnerColumn, Task, TextColumn, TransferSpeedColumn
from rich.text import Text

from stagepack.terminal import active_line


class _AfterASecond(TextColumn):
    """Bytes and bytes per second of a step that takes longer than a second."""

    def __init__(self) -> None:
        super().__init__("")
        self._bytes = DownloadColumn()
        self._speed = TransferSpeedColumn()

    def render(self, task: Task) -> Text:
        if not task.completed or (task.elapsed or 0) < 1:
            return Text("...")
        return Text.assemble(self._bytes.render(task), "  ", self._speed.render(task))


class _ByteProgress(Progress):
    """Shows a count of bytes that threads increase. It is read when the terminal is drawn, so counting costs next to nothing."""

    def __init__(self, step: str, total_bytes: int | None) -> None:
        columns = [SpinnerColumn(), TextColumn("{task.description}", markup=False), _AfterASecond()]
        super().__init__(*columns, console=Console(stderr=True), transient=True)
        self._lock_of_count = threading.Lock()
        self._byte_count = 0
        self._task_id = self.add_task(step, total=total_bytes)

    def count(self, further_bytes: int) -> None:
        """Increase the count."""
        with self._lock_of_count:
            self._byte_count += further_bytes

    def get_renderables(self) -> Iterable[RenderableType]:
        """Take the count over, then draw."""
        if self.task_ids:
            self.update(self.task_ids[0], completed=self._byte_count)
        return super().get_renderables()


@contextlib.contextmanager
def show_bytes(step: str, total_bytes: int | None) -> Iterator[Callable[[int], None]]:
    """Show a step, and after a second how many bytes are done and how fast.

    Args:
        step: the description of the step, without control characters.
        total_bytes: the number of bytes of the whole step; None if it is not known.

    Yields:
        A function that takes the number of further bytes that are done. Several threads may call it.
    """
    with _ByteProgress(step, total_bytes) as progress:
        task_id = progress.task_ids[0]
        with active_line(lambda line: progress.update(task_id, description=step if line is None else line)):
            yield progress.count
