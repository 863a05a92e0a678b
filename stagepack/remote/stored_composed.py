"""A bundle that deltas make of another one -> a bundle in a cache, so that the deltas are needed no more."""

import contextlib
import os
import weakref

from stagepack.deltas.patches import ComposedFiles
from stagepack.errors import WriteError
from stagepack.format.chunks import File, file_chunks
from stagepack.format.reader import Bundle
from stagepack.format.rules import raise_problems
from stagepack.remote.cache import Cache, PartFile


class _Holder:
    """Keeps a bundle in the cache as long as it is referred to."""


def store_composed(bundle: Bundle, cache: Cache) -> Bundle:
    """Write a composed bundle into a cache, each chunk compared with its digest; return it there, at no entry point.

    Files that the cache has already are not written. The bundle is not removed from the cache while the result is in use.
    """
    patches = bundle.patches
    assert isinstance(patches, ComposedFiles)
    folder = cache.add_manifest(bundle.digest, patches.deltas[-1].result_manifest_content)
    descriptor = cache.use(bundle.digest, patches.base.location)
    if descriptor is None:
        raise WriteError(f"{folder}: was removed from the cache while it was written: repeat the call")
    holder = _Holder()
    weakref.finalize(holder, os.close, descriptor)
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
    stored = Bundle(folder)
    vars(stored)["_holder"] = holder  # for its copies at entry points too
    return stored


def _write(bundle: Bundle, entry: File, part: PartFile) -> None:
    with contextlib.ExitStack() as open_files:
        read = bundle.open_read(open_files, entry.name)
        for chunk in file_chunks(entry):
            content = memoryview(bytearray(chunk.end - chunk.start))
            read.fill(chunk.start, content)
            if (problem := chunk.check(content)) is not None:
                raise_problems(bundle.causes([problem]))
            part.write(content, chunk.start)
