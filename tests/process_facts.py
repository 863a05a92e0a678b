"""What Linux says of other processes."""

import contextlib
from pathlib import Path


def child_processes(process_id: int) -> list[int]:
    """The processes that a process has started, and that it has not waited for."""
    children: list[int] = []
    with contextlib.suppress(FileNotFoundError):
        for task in Path(f"/proc/{process_id}/task").iterdir():
            with contextlib.suppress(OSError):
                children += map(int, (task / "children").read_text().split())
    return children


def memory_bytes(process_id: int, kind: str = "RssAnon") -> int:
    """The memory of a process, by default what it has for itself alone; 0 when it has ended."""
    with contextlib.suppress(OSError):
        _, _, size = Path(f"/proc/{process_id}/status").read_text().partition(f"{kind}:")
        return int(size.split()[0]) * 1024 if size else 0
    return 0
