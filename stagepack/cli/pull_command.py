"""`stagepack pull`."""

import time

import click

from stagepack.cli.bundle_facts import bundle_facts, print_written
from stagepack.cli.command import subcommand
from stagepack.cli.output import print_json
from stagepack.cli.path_options import PathType, digest_option, given_digest
from stagepack.cli.run_options import json_option
from stagepack.extras import explain_missing_packages
from stagepack.remote.url import BundleUrl, is_url


@subcommand(
    "pull",
    examples=[
        "stagepack pull hf://org/name -o net.stagepack",
        "stagepack pull s3://models/net.stagepack -o net.stagepack",
    ],
)
@click.argument("url")
@digest_option
@click.option(
    "-o", "--out", required=True, type=PathType(), metavar="FOLDER", help="Folder to write; it must not exist."
)
@json_option
def command(url: str, out: str, as_json: bool) -> None:
    """Download a bundle into a folder.

    URL is https://HOST/FOLDER, s3://BUCKET/FOLDER, hf://ORGANIZATION/NAME or one of another file system of fsspec. All files come, and the
    signature if there is one; each chunk is compared with its digest. If the download is interrupted, the same command goes on where it
    stopped. Commands that read a bundle take the URL itself, and download only what they need.
    """
    if not is_url(url):
        raise click.UsageError(f"expected a URL, such as hf://org/name, found {url!r}")
    with explain_missing_packages("remote"):
        from stagepack.remote.pull import pull  # noqa: PLC0415 - fsspec and aiohttp are optional

    start_time = time.perf_counter()
    bundle = pull(BundleUrl.parse(url), out, digest=given_digest())
    seconds = time.perf_counter() - start_time
    if as_json:
        print_json(bundle_facts(bundle) | {"seconds": round(seconds, 3)})
    else:
        print_written(bundle, out, seconds)
