"""`stagepack pull`."""

import time

import click

from stagepack.cli.bundle_facts import print_written
from stagepack.cli.command import OutputFolderType, argument, flag, option_object, subcommand
from stagepack.cli.listed_facts import listed_facts, print_listed
from stagepack.cli.output import print_json, print_line
from stagepack.cli.shared_flags import DIGEST, JSON
from stagepack.extras import explain_missing_packages
from stagepack.format.reader import Bundle
from stagepack.remote.url import BundleUrl, is_url


@option_object
class _Options:
    url: str = argument()
    digest: str | None = DIGEST
    out: str = flag("-o, --out FOLDER", "Folder to write.", required=True, type=OutputFolderType())
    overwrite: bool = flag("--overwrite", "Replace another bundle, or a damaged one, that is in the folder.")
    as_json: bool = JSON


@subcommand(
    "pull",
    examples=[
        "stagepack pull hf://org/name -o net.stagepack",
        "stagepack pull s3://models/net.stagepack -o net.stagepack",
    ],
)
def command(options: _Options) -> None:
    """Download a bundle, a delta or an adapter into a folder.

    URL is https://HOST/FOLDER, s3://BUCKET/FOLDER, hf://ORGANIZATION/NAME or one of another file system of fsspec. All files come, and the
    signature if there is one; each chunk is compared with its digest. If the download is interrupted, the same command goes on where it
    stopped. A bundle that is in the folder already is compared with its digests and left as it is; with --digest, the server is not asked
    then. Commands that read a bundle take the URL itself, and download only what they need.
    """
    if not is_url(options.url):
        raise click.UsageError(f"expected a URL, such as hf://org/name, found {options.url!r}")
    with explain_missing_packages("remote"):
        from stagepack.remote.pull import pull  # noqa: PLC0415 - fsspec and aiohttp are optional

    start_time = time.perf_counter()
    bundle, is_new = pull(BundleUrl.parse(options.url), options.out, digest=options.digest, overwrite=options.overwrite)
    seconds = time.perf_counter() - start_time
    if not is_new and not options.as_json:
        print_line(f"{options.out}: is there already, undamaged: sha256 {bundle.digest}")
    elif options.as_json:
        print_json(listed_facts(bundle) | {"seconds": round(seconds, 3), "downloaded": is_new})
    elif isinstance(bundle, Bundle):
        print_written(bundle, options.out, seconds)
    else:
        print_listed(bundle)
