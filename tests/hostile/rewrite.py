"""Write a bundle over another one while something goes wrong at every moment there is; no torch, so that forks are cheap.

Called with the name of a mode, a sound bundle and an empty folder to work in. Prints one JSON object a moment: what the
name holds afterwards (``old``, ``new``, ``nothing`` or ``broken``), what else lies in the folder, and the error.
"""

import json
import os
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from stagepack.errors import StagepackError
from stagepack.format.reader import Bundle
from stagepack.format.writer import BundleWriter

PIECE = 200  # bytes
EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


class Work:
    """A folder with an old bundle in it, which is written over."""

    def __init__(self, sound: Path, folder: Path) -> None:
        self.sound = sound
        self.folder = folder
        self.out = folder / "m.stagepack"
        self.new = contents(sound)
        self.old = self._write_old()
        self.tick: Callable[[], None] = lambda: None

    def _write_old(self) -> dict[str, bytes]:
        """The content of the old bundle: it has one more file than the new one."""
        self.folder.mkdir(parents=True, exist_ok=True)
        bundle = Bundle(self.sound)
        with BundleWriter(self.out, overwrite=False) as writer:
            for name, content in {**{name: self.new[name] for name in bundle.files}, "config.json": b"{}\n"}.items():
                writer.write_file(name, [content])
            writer.finish(bundle.manifest)
        return contents(self.out)

    def reset(self) -> None:
        """Put the old bundle there, and nothing else."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.out.mkdir(parents=True)
        for name, content in self.old.items():
            (self.out / name).write_bytes(content)

    def rewrite(self) -> None:
        """Write the new bundle."""
        bundle = Bundle(self.sound)
        with BundleWriter(self.out, overwrite=True) as writer:
            for name in bundle.files:
                writer.write_file(name, self.pieces(name))
            writer.finish(bundle.manifest)

    def pieces(self, name: str) -> Iterator[bytes]:
        """The content of a file, with a moment between the pieces."""
        content = self.new[name]
        for start in range(0, len(content), PIECE):
            self.tick()
            yield content[start : start + PIECE]

    def state(self) -> dict[str, object]:
        """What is there now."""
        found = contents(self.out) if self.out.exists() else None
        known = [("nothing", None), ("old", self.old), ("new", self.new)]
        held = next((name for name, content in known if content == found), "broken")
        beside = [path for path in self.folder.iterdir() if path != self.out]
        kept = any(contents(path) == self.old for path in beside if path.suffix == ".old")
        return {"holds": held, "beside": sorted(path.name for path in beside), "old_kept_beside": kept}


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder."""
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def at_each_moment(work: Work, strike: Callable[[], None]) -> None:
    """Write in a fork that is struck at its first moment, then in one that is struck at its second, and so on to the end."""
    for moment in range(10_000):
        work.reset()
        child = os.fork()
        if child == 0:
            count_down(work, moment, strike)
            os._exit(outcome(work.rewrite)[0])
        status = os.waitpid(child, 0)[1]
        report(work, moment=moment, status=os.waitstatus_to_exitcode(status))
        if status == 0:
            return


def count_down(work: Work, moment: int, strike: Callable[[], None]) -> None:
    """Call `strike` at the moment of this number, counted from 0."""
    left = moment

    def tick() -> None:
        nonlocal left
        left -= 1
        if left == -1:
            strike()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event in EVENTS and str(arguments[0]).startswith(str(work.folder)):
            tick()

    work.tick = tick
    sys.addaudithook(hook)


def outcome(road: Callable[[], None]) -> tuple[int, str]:
    """A status and what was raised: 0 when it went well, 2 for one of our errors, 3 for an interrupt, 1 for any other."""
    try:
        road()
    except StagepackError as error:
        return 2, f"{type(error).__name__}: {error}"
    except KeyboardInterrupt:
        return 3, ""
    except BaseException as error:  # noqa: BLE001 - the test says what it expected
        return 1, f"{type(error).__name__}: {error}"
    return 0, ""


def report(work: Work, **more: object) -> None:
    """Print the state."""
    sys.stdout.write(json.dumps(more | work.state()) + "\n")


def killed(work: Work) -> None:
    """The writer is killed at each moment."""
    at_each_moment(work, lambda: os.kill(os.getpid(), signal.SIGKILL))


def interrupted(work: Work) -> None:
    """The user interrupts at each moment."""

    def strike() -> None:
        raise KeyboardInterrupt

    at_each_moment(work, strike)


def limited(work: Work) -> None:
    """No file may grow over a size; the last size is enough."""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    largest = max(map(len, work.new.values()))
    for size in (0, 1, 8, 100, 500, 1000, largest - 1, largest):
        work.reset()
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        status, error = outcome(work.rewrite)
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        report(work, size=size, status=status, error=error)


def small_disk(work: Work) -> None:
    """The folder lies on a disk that has room for little more than one bundle; ballast leaves less and less of it."""
    work.reset()
    page = 4096
    disk = os.statvfs(work.folder)
    for room in range(disk.f_bavail, -1, -1):
        work.reset()
        ballast = work.folder.parent / "ballast"
        with ballast.open("wb") as file:
            file.write(b"x" * (os.statvfs(work.folder).f_bavail * disk.f_frsize - room * page))
        status, error = outcome(work.rewrite)
        report(work, room=room, status=status, error=error)
        ballast.unlink()


if __name__ == "__main__":
    mode, sound, folder = sys.argv[1:]
    modes = {"killed": killed, "interrupted": interrupted, "limited": limited, "small_disk": small_disk}
    modes[mode](Work(Path(sound), Path(folder)))
