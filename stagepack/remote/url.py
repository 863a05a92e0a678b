"""Where bundles are: their URLs, and the entry point that is named after a path or URL."""

import os
import re
from dataclasses import dataclass, replace
from typing import Self
from urllib.parse import urlsplit, urlunsplit

from stagepack.errors import NotABundleError, OptionError
from stagepack.format.rules import MANIFEST_NAME

# A scheme has two characters or more, so that C:/ is a path.
_URL_PATTERN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://", re.ASCII)
_HUB_PATTERN = re.compile(
    r"(?P<repository>[A-Za-z0-9_.-]+/[A-Za-z0-9_.-]+)(@(?P<revision>[^/?#\s]+))?(/(?P<folder>[^?#]*))?", re.ASCII
)
_QUERY_PATTERN = re.compile(r"""\?[^\s'"]+""")
_USER_PATTERN = re.compile(r"""(?<![^\s/'"])[^\s/'"@:]+:[^\s/'"@]+@""")
_HUB_OTHER_KINDS = ("buckets/", "datasets/", "kernels/", "models/", "spaces/")

WEB_SCHEMES = ("http", "https")
HUB_SCHEME = "hf"


def without_secrets(text: str) -> str:
    """Return a text without the queries, the user names and the passwords of the URLs in it."""
    return _QUERY_PATTERN.sub("?...", _USER_PATTERN.sub("", text))


def is_url(source: object) -> bool:
    """Whether the source of a bundle is a URL, such as ``s3://bucket/m.stagepack``, and not a path."""
    return isinstance(source, str) and _URL_PATTERN.match(source) is not None


def split_entry_point(source: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], str | None]:
    """Return a path or URL, and the name of the entry point after it, if there is one. A path that exists may have a ``#``."""
    text = os.fspath(source)
    if not text:
        raise NotABundleError("expected the path of a bundle, found an empty text")
    location, separator, name = text.rpartition("#")
    if not separator or (not is_url(text) and os.path.lexists(text)):
        return source, None
    return location, name


def is_bundle(source: object) -> bool:
    """Whether what a caller names is a URL, or the path of a bundle."""
    if not isinstance(source, str | os.PathLike):
        return False
    return is_url(source) or os.path.isfile(os.path.join(split_entry_point(source)[0], MANIFEST_NAME))


@dataclass(frozen=True, slots=True, kw_only=True)
class BundleUrl:
    """The URL of a bundle: the URL of the folder with its ``manifest.json``."""

    scheme: str  # such as ``https``, ``s3`` or ``hf``, in lower case
    folder: str  # the URL without a slash at its end, and for HTTP without its query
    # The query of an HTTP URL, such as a token that gives access; it is sent with the request for each file.
    query: str = ""

    @classmethod
    def parse(cls, url: str) -> Self:
        """Parse a URL."""
        scheme = url.partition("://")[0].lower()
        rest = url[len(scheme) + 3 :]
        if scheme in WEB_SCHEMES:
            try:
                parts = urlsplit(url)
                is_valid = parts.hostname and not parts.fragment and parts.port != 0
            except ValueError:  # the host or the port is malformed
                is_valid = False
            if not is_valid:
                raise OptionError(f"{without_secrets(url)[:200]!r}: expected {scheme}://HOST/FOLDER of a bundle")
            folder = urlunsplit((scheme, parts.netloc, parts.path.rstrip("/"), "", ""))
            return cls(scheme=scheme, folder=folder, query=parts.query)
        if not rest.strip("/"):
            raise OptionError(f"{without_secrets(url)[:200]!r}: expected {scheme}://... with the folder of a bundle")
        return cls(scheme=scheme, folder=f"{scheme}://{rest.rstrip('/')}")

    def __str__(self) -> str:
        """The URL for messages: without a query or a password, which may be secrets."""
        host, slash, path = self.folder.removeprefix(f"{self.scheme}://").partition("/")
        user, _, host_alone = host.rpartition("@")
        # Azure has the name of a container there, without a password.
        shown_host = host_alone if ":" in user or self.scheme in WEB_SCHEMES else host
        return f"{self.scheme}://{shown_host}{slash}{path}"

    @property
    def with_secrets(self) -> str:
        """The URL that opens the bundle, with its query, user name and password. Law: ``BundleUrl.parse(url.with_secrets) == url``."""
        return self.folder + (f"?{self.query}" if self.query else "")

    @property
    def name(self) -> str:
        """The last part of the URL, as the name of a folder would be: ``m.stagepack``; for a repository of the hub, its name."""
        if self.scheme == HUB_SCHEME:
            location = self.hub_location
            return (location.folder or location.repository).rpartition("/")[2]
        return str(self).rpartition("/")[2]

    def child(self, *names: str) -> "BundleUrl":
        """Return the URL of a folder in this one."""
        return replace(self, folder="/".join((self.folder, *names)))

    def file_url(self, file_name: str) -> str:
        """Return the URL of one of the bundle's files."""
        return f"{self.folder}/{file_name}" + (f"?{self.query}" if self.query else "")

    @property
    def hub_location(self) -> "HubLocation":
        """The repository of a URL ``hf://ORGANIZATION/NAME[@REVISION][/FOLDER]``."""
        rest = self.folder.removeprefix(f"{HUB_SCHEME}://")
        match = _HUB_PATTERN.fullmatch(rest)
        if match is None or rest.startswith(_HUB_OTHER_KINDS):
            raise OptionError(
                f"{without_secrets(self.folder)[:200]!r}: expected hf://ORGANIZATION/NAME, hf://ORGANIZATION/NAME@REVISION or a folder "
                "in it: the repository of a model"
            )
        return HubLocation(
            repository=match["repository"], revision=match["revision"], folder=(match["folder"] or "").strip("/")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class HubLocation:
    """Where a bundle is on the Hugging Face Hub."""

    repository: str  # ``ORGANIZATION/NAME``
    revision: str | None  # a branch, a tag or a commit; None for the main branch
    folder: str  # the folder of the bundle in the repository; empty for its root

    def path(self, file_name: str) -> str:
        """Return the path of one of the bundle's files in the repository."""
        return f"{self.folder}/{file_name}" if self.folder else file_name
