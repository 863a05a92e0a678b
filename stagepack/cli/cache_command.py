"""`stagepack cache`."""

from datetime import UTC, datetime
from typing import Any

from stagepack.cli.command import ByteSize, Number, flag, option_object, subcommand
from stagepack.cli.output import count_of, print_json, print_line, print_table
from stagepack.cli.shared_flags import JSON
from stagepack.format.quantities import format_bytes
from stagepack.remote.cache import Cache, default_cache_folder
from stagepack.remote.cache_contents import CachedBundle, cached_bundles, disk_bytes, remove_bundles

_DAY = 86_400  # seconds


@option_object
class _Options:
    unused_days: float | None = flag(
        "--older-than DAYS",
        "Remove the bundles that were not opened for so many days.",
        default_text="remove none",
        type=Number(0),
    )
    most_bytes: int | None = flag(
        "--trim-to SIZE",
        "Remove bundles until the cache has at most this size, such as 100GB: those first that were not opened for the longest time.",
        default_text="remove none",
        type=ByteSize(),
    )
    as_json: bool = JSON


@subcommand("cache", examples=["stagepack cache", "stagepack cache --older-than 30", "stagepack cache --trim-to 100GB"])
def command(options: _Options) -> None:
    """List the downloaded bundles, or remove some.

    Bundles at a URL are downloaded into a cache, in the folder that STAGEPACK_CACHE names, by default ~/.cache/stagepack. Bundles that a
    process has opened are kept. Removed ones are downloaded again when they are needed.
    """
    cache = Cache(default_cache_folder())
    unused_seconds = None if options.unused_days is None else options.unused_days * _DAY
    removed: list[CachedBundle] | None = None
    with cache.errors():
        if unused_seconds is not None or options.most_bytes is not None:
            removed = remove_bundles(cache, unused_seconds=unused_seconds, most_bytes=options.most_bytes)
        bundles, byte_count = cached_bundles(cache), disk_bytes(cache)
    if options.as_json:
        facts: dict[str, Any] = {
            "folder": str(cache.folder),
            "bytes": byte_count,
            "bundles": list(map(_facts, bundles)),
        }
        print_json(facts if removed is None else facts | {"removed": list(map(_facts, removed))})
        return
    if removed is not None:
        _print_bundles("removed", removed)
    _print_bundles("bundles in the cache", bundles)
    print_line(f"{cache.folder}: {count_of('bundle', len(bundles))}, {format_bytes(byte_count)} on the disk")


def _facts(bundle: CachedBundle) -> dict[str, Any]:
    used_at = datetime.fromtimestamp(bundle.used_at, UTC).isoformat(timespec="seconds")
    return {"digest": bundle.digest, "location": bundle.location, "bytes": bundle.byte_count, "used": used_at}


def _print_bundles(title: str, bundles: list[CachedBundle]) -> None:
    if bundles:
        rows = [
            [fact["digest"][:12], format_bytes(fact["bytes"]), fact["used"], fact["location"]]
            for fact in map(_facts, bundles)
        ]
        print_table(title, ["digest", "#size", "used", "location"], rows)
