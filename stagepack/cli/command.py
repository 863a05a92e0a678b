"""How subcommands are declared: an object has a field for each argument and option, and a function takes the object.

    @option_object
    class _Options(BundleOptions):
        stage_count: int | None = flag("--stages N", "Cut into N stages.", default_text="one")
        as_json: bool = JSON

    @subcommand("cut", examples=["stagepack cut net.stagepack --stages 4"])
    def command(options: _Options) -> None:

The type of a field says what the option takes: a `bool` is a switch, a `Literal` a choice, a tuple an option that is repeatable. A field
that is such an object itself stands for the options of its fields.
"""

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin

import click

from stagepack.cli.failures import Failure, told_failures
from stagepack.cli.output import facts_on_standard_error
from stagepack.errors import MissingPackageError, StagepackError
from stagepack.format.dtypes import parse_byte_size
from stagepack.format.output_file import STANDARD_OUTPUT
from stagepack.remote.url import is_bundle, is_url, without_secrets

OptionsClass = TypeVar("OptionsClass")
_METADATA = "parameter"
# The fields of files that are written.
_OUTPUT_FIELDS = ("out", "outputs_file", "trace_file")


class PathType(click.Path):
    """A path of which only the syntax is checked; the code that opens the file reports all else."""

    takes_urls = False

    def __init__(self, path_type: type | None = None) -> None:
        super().__init__(readable=False, path_type=path_type)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse an empty path, which would be the current folder, and a URL, which would be a folder of that name."""
        if not os.fspath(value):
            self.fail("the path is empty.", param, ctx)
        if not self.takes_urls and is_url(value):
            self.fail(f"expected a path on this machine, found the URL {value!r}.", param, ctx)
        return super().convert(value, param, ctx)


class BundleType(PathType):
    """The path or the URL of a bundle."""

    takes_urls = True


class OutputFolderType(PathType):
    """The path of a folder that is written."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        """Refuse standard output, too."""
        if os.fspath(value) == STANDARD_OUTPUT:
            self.fail("expected a folder: it cannot be written to standard output.", param, ctx)
        return super().convert(value, param, ctx)


class ByteSize(click.ParamType[int]):
    """A number of bytes, such as 24GiB."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the number of bytes."""
        try:
            return parse_byte_size(value)
        except ValueError as error:
            self.fail(f"{error}.", param, ctx)


class _Parameters(NamedTuple):
    """The arguments and options of a field: for each, its class, its names on the command line, and its settings."""

    declarations: list[tuple[type[click.Parameter], list[str], dict[str, Any]]]


def flag(usage: str, meaning: str, *, default_text: str | None = None, **settings: Any) -> Any:
    """Return an option for a field.

    usage: the option as the help shows it, such as ``-o, --out FILE``.
    meaning: the help text.
    default_text: the default as the help shows it, where it is no value.
    settings: further ones of `click.option`.
    """
    words = usage.replace(",", "").split()
    settings["help"] = meaning
    settings["show_default"] = default_text or "default" in settings
    if not words[-1].startswith("-"):
        settings["metavar"] = words.pop()
    return _Parameters([(click.Option, words, settings)])


def either(*flags: Any) -> Any:
    """Return several options for a field, of which the last one on the command line counts."""
    return _Parameters([declaration for parameters in flags for declaration in parameters.declarations])


def argument(metavar: str | None = None, **settings: Any) -> Any:
    """Return an argument for a field; further settings are those of `click.argument`."""
    return _Parameters([(click.Argument, [], {"metavar": metavar} | settings)])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option_object(options_class: type[OptionsClass]) -> type[OptionsClass]:
    """Make a class with fields of `flag` and `argument` the type of the options of a subcommand."""
    for field_name, parameters in list(vars(options_class).items()):
        if isinstance(parameters, _Parameters):
            setattr(options_class, field_name, dataclasses.field(metadata={_METADATA: parameters}))
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(options_class)


def click_parameters(options_class: Any) -> Iterator[click.Parameter]:
    """Yield the arguments and options of a class of `option_object`."""
    for field in dataclasses.fields(options_class):
        if _METADATA not in field.metadata:
            yield from click_parameters(field.type)
            continue
        for parameter_class, words, settings in field.metadata[_METADATA].declarations:
            of_type = {} if "flag_value" in settings else _settings_of_type(field.type, parameter_class)
            yield parameter_class([field.name, *words], **of_type | settings)


def _settings_of_type(annotation: Any, parameter_class: type) -> dict[str, Any]:
    """The settings that follow from the type of a field."""
    if NoneType in get_args(annotation):
        (annotation,) = set(get_args(annotation)) - {NoneType}
    if get_origin(annotation) is tuple:
        item_settings = _settings_of_type(get_args(annotation)[0], parameter_class)
        return item_settings | ({"nargs": -1} if parameter_class is click.Argument else {"multiple": True})
    if get_origin(annotation) is Literal:
        return {"type": click.Choice(get_args(annotation))}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": PathType(Path) if annotation is Path else annotation}


def _make_options(options_class: Any, values: Mapping[str, Any]) -> Any:
    return options_class(
        **{
            field.name: values[field.name] if _METADATA in field.metadata else _make_options(field.type, values)
            for field in dataclasses.fields(options_class)
        }
    )


def subcommand(
    command_name: str, *, examples: Sequence[str], forms_group: bool = False
) -> Callable[[Callable[[Any], None]], click.Command]:
    """Return a decorator that makes a function of an object of options a subcommand.

    forms_group: under torchrun, the processes that run the command are those of one pipeline.
    """

    def declare(function: Callable[[Any], None]) -> click.Command:
        [options_parameter] = inspect.signature(function).parameters.values()
        options_class = options_parameter.annotation

        def run(**values: Any) -> None:
            is_output_taken = any(values.get(name) == Path(STANDARD_OUTPUT) for name in _OUTPUT_FIELDS)
            with (
                told_failures() if forms_group else contextlib.nullcontext(),
                _named_errors(values),
                facts_on_standard_error(is_used=is_output_taken),
            ):
                function(_make_options(options_class, values))

        # click keeps the line breaks of a paragraph that starts with \b. Four spaces make it a code block in Markdown.
        lines = "\n".join(f"    {example}" for example in examples)
        description = f"{inspect.cleandoc(function.__doc__ or '')}\n\nExamples:\n\n\b\n{lines}"
        return click.Command(command_name, params=[*click_parameters(options_class)], callback=run, help=description)

    return declare


@contextlib.contextmanager
def _named_errors(values: Mapping[str, Any]) -> Iterator[None]:
    """Let errors of a subcommand of one bundle begin with the bundle, unless they begin with another path of the command line."""
    try:
        yield
    except (StagepackError, Failure) as error:
        message = error.message if isinstance(error, Failure) else str(error)
        if isinstance(error, StagepackError) and error.origin:
            raise
        source = values.get("source")
        bundle_path = values.get("bundle_path") or (source if source and is_bundle(source) else None)
        paths = [os.fspath(value) for value in values.values() if isinstance(value, str | os.PathLike) and value]
        if (
            not bundle_path
            or isinstance(error, MissingPackageError)
            or message.startswith(tuple({*paths, *map(os.path.normpath, paths)}))
        ):
            raise
        raise Failure(f"{without_secrets(bundle_path)}: {message}") from error
