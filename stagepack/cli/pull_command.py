"""`stagepack pull`."""

import time

import click

from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import argument, option_object, subcommand
from stagepack.cli.output import print_json
from stagepack.cli.shared_flags import DIGEST, JSON, OUT_FOLDER
from stagepack.extras import explain_missing_packages
from stagepack.remote.url import BundleUrl, is_url


@option_object
class _Options:
    url: str = argument()
    digest: str | None = DIGEST
    out: str = OUT_FOLDER
    as_json: bool = JSON


@subcommand(
    "pull",
    examples=[
        "stagepack pull hf://org/name -o net.stagepack",
        "stagepack pull s3://models/net.stagepack -o net.stagepack",
    ],
)
def command(options: _Options) -> None:
    """Download a bundle into a folder.

    URL is https://HOST/FOLDER, s3://BUCKET/FOLDER, hf://ORGANIZATION/NAME or one of another file system of fsspec. All files come, and the
    signature if there is one; each chunk is compared with its digest. If the download is interrupted, the same command goes on where it
    stopped. Commands that read a bundle take the URL itself, and download only what they need.
    """
    if not is_url(options.url):
        raise click.UsageError(f"expected a URL, such as hf://org/name, found {options.url!r}")
    with explain_missing_packages("remote"):
        from stagepack.remote.pull import pull  # noqa: PLC0415 - fsspec and aiohttp are optional

    start_time = time.perf_counter()
    bundle = pull(BundleUrl.parse(options.url), options.out, digest=options.digest)
    seconds = time.perf_counter() - start_time
    if options.as_json:
        print_json(bundle_facts(bundle) | {"seconds": round(seconds, 3)})
    else:
        print_written(bundle, options.out, seconds)
