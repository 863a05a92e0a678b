"""Files that a bundle carries for others than stagepack, such as a tokenizer. Without torch."""

import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Final

from stagepack.capture.transformers.model_folders import CONFIGURATION_NAME, read_adapter
from stagepack.errors import ExportWarning, FileNotListedError, OptionError, OutputExistsError, warn_caller
from stagepack.format.manifest import further_file_names
from stagepack.format.reader import Bundle
from stagepack.format.rules import FILE_NAME_PATTERN, MANIFEST_NAME, MODEL_CONFIG_NAME, format_names
from stagepack.format.writer import BundleWriter
from stagepack.opening import errors_name_bundle, opened_folder

# What the format's own files end with.
_RESERVED_SUFFIXES: Final = (".index.json", ".msgpack", ".onnx", ".safetensors", ".sig")
# The files of a Hugging Face folder that say what is text, a picture or a sound, and how it is read.
TOKENIZER_FILE: Final = "tokenizer.json"
_HUGGING_FACE_FILES: Final = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "chat_template.jinja",
    "preprocessor_config.json",
    "processor_config.json",
)


def read_assets(paths: Iterable[str | os.PathLike[str]]) -> dict[str, bytes]:
    """Read the assets of a bundle."""
    contents: dict[str, bytes] = {}
    for path in map(Path, paths):
        if path.name in contents:
            raise OptionError(f"assets: expected distinct names of files, found {path.name} twice")
        if path.name.endswith(_RESERVED_SUFFIXES) or path.name == MANIFEST_NAME:
            raise OptionError(f"assets: {path.name}: the format has files of this name: rename it")
        if path.is_dir():
            raise OptionError(
                f"assets: {path}: expected a file, found a folder: give its files, such as {path / TOKENIZER_FILE}"
            )
        if not FILE_NAME_PATTERN.fullmatch(path.name):
            raise OptionError(f"assets: {path.name!r}: expected a name of letters, digits and _ . - alone: rename it")
        try:
            contents[path.name] = path.read_bytes()
        except OSError as error:
            raise OptionError(f"assets: {path}: cannot be read: {error.strerror}") from None
    return contents


def exported_assets(source: str | None, contents: Mapping[str, bytes], *, generates: bool) -> dict[str, bytes]:
    """Return the assets of an export: those that the caller gives, and the tokenizer and processors of a Hugging Face model.

    source: the folder or the hub name of the Hugging Face model that is exported; None for another model.
    generates: whether the bundle generates, which it does with texts only if it has a tokenizer: a warning says so otherwise.
    """
    folders = [] if source is None else _hugging_face_folders(source)
    if not folders:
        return dict(contents)
    assets: dict[str, bytes] = {}
    for folder in folders:
        paths = [folder / file_name for file_name in _HUGGING_FACE_FILES]
        assets |= read_assets(path for path in paths if path.is_file())
    assets |= contents
    if generates and TOKENIZER_FILE not in assets:
        message = (
            f"{source}: has no {TOKENIZER_FILE}: the bundle takes tokens and no texts: write it (tokenizer.save_pretrained), and add it to "
            f"the bundle (stagepack asset add BUNDLE {TOKENIZER_FILE})"
        )
        warn_caller(ExportWarning(message))
    return assets


def _hugging_face_folders(source: str) -> list[Path]:
    """The folders that have the files of a Hugging Face model: of a hub name, the snapshot in the Hub's cache.

    The folder of an adapter of PEFT comes after the folder of its base model.
    """
    folder = Path(source)
    if not folder.exists():
        from huggingface_hub import snapshot_download  # noqa: PLC0415 - transformers has imported it

        folder = Path(
            snapshot_download(source, allow_patterns=[*_HUGGING_FACE_FILES, MODEL_CONFIG_NAME, CONFIGURATION_NAME])
        )
    adapter = read_adapter(os.fspath(folder))
    if adapter is not None:
        return [*_hugging_face_folders(adapter.base_model), folder]
    return [folder] if (folder / MODEL_CONFIG_NAME).is_file() else []


@errors_name_bundle
def add_assets(
    bundle: str | os.PathLike[str] | Bundle,
    paths: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    overwrite: bool = False,
) -> Bundle:
    """Add files to a bundle, such as a tokenizer. Needs no torch; weights are not read or copied where the file system has hard links.

    The manifest lists the files with their digests, so the digest of the bundle changes: a signature is removed, with a warning, and code
    that was compiled for the bundle does not fit any more.

    Args:
        bundle: the folder of the bundle, or the opened bundle.
        paths: the file, or several. The bundle has them under the same names.
        overwrite: replace assets of the same names.

    Returns:
        The bundle, opened again.

    Raises:
        OptionError: a file cannot be read or has a name that no asset may have, or the bundle is at a URL.
        OutputExistsError: the bundle has an asset of this name, and `overwrite` is false; or its folder has files that would be lost.
        NotABundleError, VersionError, FormatError, WriteError: the bundle cannot be opened, or not be written.

    Example:
        >>> stagepack.add_assets("llama.stagepack", ["llama/tokenizer.json"])
    """
    opened = _opened_again(bundle)
    contents = read_assets([paths] if isinstance(paths, str | os.PathLike) else paths)
    if (existing := sorted(contents.keys() & opened.files.keys())) and not overwrite:
        raise OutputExistsError(
            f"{opened.location}: has {format_names(existing)} already: replace what it has (--overwrite; in Python overwrite=True)"
        )
    return _with_files(opened, contents, kept_names=opened.files.keys() - contents.keys())


@errors_name_bundle
def remove_assets(bundle: str | os.PathLike[str] | Bundle, file_names: Iterable[str]) -> Bundle:
    """Remove assets from a bundle, as `add_assets` adds them.

    Args:
        bundle: the folder of the bundle, or the opened bundle.
        file_names: the names of the assets.

    Returns:
        The bundle, opened again.

    Raises:
        FileNotListedError: the bundle has no asset of this name.
        OptionError, OutputExistsError, NotABundleError, VersionError, FormatError, WriteError: see `add_assets`.
    """
    opened = _opened_again(bundle)
    removed_names = {file_names} if isinstance(file_names, str) else set(file_names)
    asset_names = asset_names_of(opened)
    if unknown_names := sorted(removed_names - set(asset_names)):
        raise FileNotListedError(
            f"{opened.location}: expected assets of the bundle, which are {format_names(asset_names) or 'none'}, found "
            f"{format_names(unknown_names)}"
        )
    return _with_files(opened, {}, kept_names=opened.files.keys() - removed_names)


def asset_names_of(bundle: Bundle) -> list[str]:
    """Return the names of the files that a bundle carries for others, such as ``config.json`` and ``tokenizer.json``."""
    return sorted(further_file_names(bundle.manifest))


def _opened_again(bundle: str | os.PathLike[str] | Bundle) -> Bundle:
    # An opened bundle is as it was when it was opened, and a call before this one may have changed it.
    return Bundle(opened_folder(bundle, "assets").path)


def _with_files(bundle: Bundle, contents: Mapping[str, bytes], kept_names: Collection[str]) -> Bundle:
    """Write a bundle again with these files of it and with new ones."""
    with BundleWriter(bundle.path.resolve(), overwrite=True, absorbed_names=contents.keys()) as writer:
        for file in bundle.manifest.files:
            if file.name in kept_names:
                writer.link_file(bundle.path / file.name, file)
        for file_name, content in contents.items():
            writer.write_file(file_name, [content])
        writer.finish(bundle.manifest, replaced_digest=bundle.digest)
    return Bundle(bundle.path)
