"""A bundle that deltas make of another one -> a bundle in a cache, so that the deltas are needed no more."""

import contextlib
import os
import weakref
from functools import partial
from typing import Final

from stagepack.deltas.patches import ComposedFiles
from stagepack.errors import WriteError
from stagepack.format.chunks import File, file_chunks
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.remote.cache import Cache, PartFile
from stagepack.remote.cache_contents import remove_with_files

# What the cache lists as the location of a bundle that nobody has opened by a URL.
_COMPOSED: Final = "composed of deltas on "


class _Holder:
    """Keeps a bundle in the cache as long as it is referred to."""


def store_composed(bundle: Bundle, cache: Cache) -> Bundle:
    """Write a composed bundle into a cache, each chunk compared with its digest; return it there, at no entry point.

    Files that the cache has already are not written. The bundle is not removed from the cache while the result is in use. When no process
    uses it any more, it is removed, unless somebody has opened it by a URL.
    """
    patches = bundle.patches
    assert isinstance(patches, ComposedFiles)
    folder = cache.add_manifest(bundle.digest, patches.deltas[-1].result_manifest_content)
    location = _location(cache, bundle.digest) or f"{_COMPOSED}{patches.base.location}"
    descriptor = cache.use(bundle.digest, location)
    if descriptor is None:
        raise WriteError(f"{folder}: was removed from the cache while it was written: repeat the call")
    release = partial(_release, cache, bundle.digest, tuple(bundle.listed), descriptor)
    try:
        _write_files(bundle, cache)
        stored = Bundle(folder)
    except BaseException:
        release()
        raise
    holder = _Holder()
    weakref.finalize(holder, release)
    vars(stored)["_holder"] = holder  # for its copies at entry points too
    return stored


def _location(cache: Cache, digest: str) -> str:
    """The location of a bundle in a cache; empty if the cache does not know it."""
    with contextlib.suppress(OSError):
        return cache.location_path(digest).read_text(errors="replace")
    return ""


def _release(cache: Cache, digest: str, entries: tuple[File, ...], descriptor: int) -> None:
    """Use a bundle no more. The last process that used it removes it."""
    os.close(descriptor)
    if _location(cache, digest).startswith(_COMPOSED):
        with contextlib.suppress(OSError):
            remove_with_files(cache, digest, entries)


def _write_files(bundle: Bundle, cache: Cache) -> None:
    """Write the files of a composed bundle that the cache does not have."""
    folder = cache.bundle_folder(bundle.digest)
    bundle.fetch(entry.name for entry in bundle.listed)
    cache.check_free_bytes(bundle.listed)
    for entry in bundle.listed:
        if cache.add(entry, folder):
            continue
        with cache.lock(entry) as part, cache.errors():
            if cache.add(entry, folder):  # another process has completed it
                part.discard()
                continue
            try:
                _write(bundle, entry, part)
            except BaseException:
                part.discard()
                raise
            cache.add(entry, folder, part)


def _write(bundle: Bundle, entry: File, part: PartFile) -> None:
    with contextlib.ExitStack() as open_files:
        read = bundle.open_read(open_files, entry.name)
        for chunk in file_chunks(entry):
            content = memoryview(bytearray(chunk.end - chunk.start))
            read.fill(chunk.start, content)
            if (problem := chunk.check(content)) is not None:
                raise_problems(bundle.causes([problem]))
            part.write(content, chunk.start)
