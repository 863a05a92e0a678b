"""Upload a bundle to the Hugging Face Hub."""

import os
import sys
from typing import Final

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils.tqdm import disable_progress_bars

from stagepack.adapter.opened import OpenAdapter
from stagepack.deltas.delta import Delta
from stagepack.documents import Listed
from stagepack.errors import FormatError, RemoteError, VersionError
from stagepack.format import limits
from stagepack.format.manifest_codec import parse_files
from stagepack.format.rules import MANIFEST_NAME, SIGNATURE_NAME
from stagepack.remote.hub import error_reason, open_hub_store
from stagepack.remote.store import FetchError
from stagepack.remote.url import BundleUrl, HubLocation
from stagepack.terminal import byte_progress

CARD_NAME: Final = "README.md"


def push(bundle: Listed, url: BundleUrl, *, private: bool | None, message: str | None) -> str:
    """Upload a bundle to the Hugging Face Hub, in one commit.

    The repository is created if it does not exist. Files of an older bundle that the new one does not have are removed; the model card
    and all other files stay. A repository without a model card gets a short one.

    url: a URL ``hf://``, whose revision must be a branch.
    """
    location = url.hub_location
    with byte_progress(f"verifying {bundle.location}", sum(file.size for file in bundle.listed)) as progress:
        bundle.verify(progress)
    if sys.stderr is None or not sys.stderr.isatty():
        disable_progress_bars()
    api = HfApi()
    try:
        api.create_repo(location.repository, private=private, exist_ok=True)
        commit = api.create_commit(
            location.repository,
            _operations(api, bundle, url, location),
            commit_message=message or f"{bundle.document_format} {bundle.digest[:12]}",
            revision=location.revision,
        )
    except Exception as error:  # noqa: BLE001 - errors of the HTTP client that the hub's library chose
        raise RemoteError(f"{url}: {error_reason(error)}") from None
    return commit.commit_url


def _operations(
    api: HfApi, bundle: Listed, url: BundleUrl, location: HubLocation
) -> list[CommitOperationAdd | CommitOperationDelete]:
    """What the commit adds and removes."""
    prefix = location.path("")
    remote_names = _remote_names(api, location)
    file_names = [*bundle.files, MANIFEST_NAME]
    if os.path.lexists(bundle.path / SIGNATURE_NAME):
        file_names.append(SIGNATURE_NAME)
    operations: list[CommitOperationAdd | CommitOperationDelete] = [
        CommitOperationAdd(prefix + file_name, bundle.path / file_name) for file_name in file_names
    ]
    old_names = _old_file_names(url) if MANIFEST_NAME in remote_names else set()
    stale_names = old_names & remote_names - set(file_names)
    operations += [CommitOperationDelete(prefix + file_name) for file_name in sorted(stale_names)]
    if CARD_NAME not in remote_names | bundle.files.keys():
        operations.append(CommitOperationAdd(prefix + CARD_NAME, _card(bundle, url).encode()))
    return operations


def _remote_names(api: HfApi, location: HubLocation) -> set[str]:
    """The names in the folder of the repository."""
    entries = api.list_repo_tree(location.repository, location.folder or None, revision=location.revision)
    try:
        return {entry.path.removeprefix(location.path("")) for entry in entries}
    except EntryNotFoundError:  # the repository has no such folder yet
        return set()


def _old_file_names(url: BundleUrl) -> set[str]:
    """The files of the bundle that the repository has now; none if it cannot be read."""
    try:
        content = open_hub_store(url).read_small(MANIFEST_NAME, limits.MANIFEST_BYTES)
        return {file.name for file in parse_files(content)}
    except (FetchError, FormatError, VersionError):
        return set()


_CARD_START: Final = """---
library_name: stagepack
tags:
- stagepack
---
"""


def _card(bundle: Listed, url: BundleUrl) -> str:
    """The text of a model card."""
    if isinstance(bundle, Delta):
        return f"""{_CARD_START}
What changes in a [stagepack](https://pypi.org/project/stagepack/) bundle of the digest `{bundle.base}`.

```python
import stagepack

pipeline = stagepack.load("model.stagepack", deltas=["{url}"])
```

The digest of the bundle that it makes is `{bundle.result}`.
"""
    if isinstance(bundle, OpenAdapter):
        return f"""{_CARD_START}
An adapter of a [stagepack](https://pypi.org/project/stagepack/) bundle of the digest `{bundle.base}`.

```python
import stagepack

pipeline = stagepack.load("model.stagepack", adapters={{"name": "{url}"}})
```

The digest of the adapter is `{bundle.digest}`.
"""
    return f"""{_CARD_START}
A model in {len(bundle.stages)} pipeline stages, as a [stagepack](https://pypi.org/project/stagepack/) bundle: graphs and weights, without
pickle and without the model's source code.

```python
import stagepack

pipeline = stagepack.load("{url}")
stage = stagepack.load_stage("{url}", 0)  # downloads the files of this stage alone
```

The digest of the bundle is `{bundle.digest}`.
"""
