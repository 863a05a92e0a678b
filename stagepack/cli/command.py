"""How subcommands are declared: an object has a field for each argument and option, and a function takes the object.

    @option_object
    class _Options(BundleOptions):
        stage_count: int | None = flag("--stages N", "Cut into N stages.", default_text="one")
        as_json: bool = JSON

    @subcommand("cut", examples=["stagepack cut net.stagepack --stages 4"])
    def command(options: _Options) -> None:

The type of a field says what the option takes: a `bool` is a switch, a `Literal` a choice, a tuple an option that is repeatable. A field
that is such an object itself stands for the options of its fields. A field that the loaders or the server know is `flag_of` their class of
options, and `flags_of` this class stands for all of its fields. An option that says something about another one is `only_with` that.
"""

import contextlib
import dataclasses
import inspect
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform, get_args, get_origin

import click
from click.core import ParameterSource

from stagepack.cli.failures import Failure, told_failures
from stagepack.cli.output import facts_on_standard_error
from stagepack.errors import MissingPackageError, StagepackError
from stagepack.format.output_file import STANDARD_OUTPUT
from stagepack.format.quantities import parse_byte_size
from stagepack.options import options_of
from stagepack.remote.url import is_bundle, is_url, without_secrets

OptionsClass = TypeVar("OptionsClass")
_METADATA = "parameter"
_MAX_COUNT = 2**31 - 1
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


class Text(click.types.StringParamType):
    """A name or another text, which is not empty."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Refuse an empty text, which a variable of the shell that is not set gives."""
        if not value:
            self.fail("the value is empty.", param, ctx)
        return str(super().convert(value, param, ctx))


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


class PlacementCounts(click.ParamType):  # type: ignore[type-arg]
    """Numbers of stages, such as ``4,3,1``."""

    name = "text"

    def convert(self, value: str, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Return the numbers."""
        if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", value, re.ASCII):
            self.fail(f"expected numbers of stages such as 4,3,1, found {value!r}.", param, ctx)
        return tuple(map(int, value.split(",")))


class Count(click.IntRange):
    """A number of things, at least 1."""

    def __init__(self) -> None:
        super().__init__(min=1)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number, which must fit into 32 bits."""
        count = super().convert(value, param, ctx)
        if count > _MAX_COUNT:
            self.fail(f"{count} is not in the range x<={_MAX_COUNT}.", param, ctx)
        return count


class Number(click.FloatRange):
    """A number in a range, of which NaN is none: comparisons do not find it out of range."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number."""
        number = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail("nan is not a number.", param, ctx)
        return number


class Amount(Number):
    """A number in a unit of the command line, such as milliseconds, which becomes one in the unit of the field, such as seconds."""

    def __init__(self, minimum: float = 0, maximum: float = 86_400, unit: float = 1.0) -> None:
        super().__init__(minimum, maximum)
        self.unit = unit

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the number in the unit of the field; an integer if this unit is a whole number of that."""
        amount = super().convert(value, param, ctx)
        return round(amount * self.unit) if isinstance(self.unit, int) else amount * self.unit


class _Flag(click.Option):
    """An option, and what it is refused without."""

    def __init__(self, *args: Any, only_with: Sequence[str] = (), **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.only_with = only_with


class _Parameters(NamedTuple):
    """The arguments and options of a field: for each, its class, its names on the command line, and its settings."""

    declarations: list[tuple[type[click.Parameter], list[str], dict[str, Any]]]


class _Group(NamedTuple):
    """The flags of a field that is an object of another class of options, by the names of the fields of that."""

    options_class: type
    flags: dict[str, _Parameters]


def flag(usage: str, meaning: str, *, default_text: str | None = None, **settings: Any) -> Any:
    """Return an option for a field.

    usage: the option as the help shows it, such as ``-o, --out FILE``.
    meaning: the help text.
    default_text: the default as the help shows it, where it is no value.
    settings: further ones of `click.option`.
    """
    words = usage.replace(", ", " ").split()
    settings["help"] = meaning
    settings["show_default"] = default_text or "default" in settings
    if not words[-1].startswith("-"):
        settings["metavar"] = words.pop()
    return _Parameters([(_Flag, words, settings)])


def flag_of(options_class: type, field_name: str, **settings: Any) -> Any:
    """Return the flag of a field of a class of options; settings of `click.option` take the place of those that follow from the field."""
    option, annotation, default = options_of(options_class)[field_name]
    if annotation is float or option.unit != 1:
        settings = {"type": Amount(option.minimum, option.maximum, option.unit)} | settings
        default = default / option.unit
        default = int(default) if default.is_integer() else default
    elif annotation is int:
        settings = {"type": Count()} | settings
    if default is not None and default is not False and default != ():
        settings = {"default": default} | settings
    return flag(option.usage, settings.pop("help", option.meaning), default_text=option.default_text, **settings)


def flags_of(options_class: type, **others: Any) -> Any:
    """Return the flags of all fields of a class of options, for a field of that class.

    others: flags in the place of those that follow from the fields; None for a field that the subcommand leaves at its default.
    """
    return _Group(
        options_class,
        {
            field_name: others.get(field_name) or flag_of(options_class, field_name)
            for field_name in options_of(options_class)
            if others.get(field_name, ...) is not None
        },
    )


def only_with(flags: Any, *required: str) -> Any:
    """Return an option that the subcommand refuses without one of other options, such as ``--stages``, or arguments, such as ``SOURCE``."""
    return _Parameters(
        [(kind, words, settings | {"only_with": required}) for kind, words, settings in flags.declarations]
    )


def either(*flags: Any) -> Any:
    """Return several options for a field, of which the last one on the command line counts."""
    return _Parameters([declaration for parameters in flags for declaration in parameters.declarations])


def argument(metavar: str | None = None, **settings: Any) -> Any:
    """Return an argument for a field; `settings` are passed to `click.argument`."""
    return _Parameters([(click.Argument, [], {"metavar": metavar} | settings)])


@dataclass_transform(kw_only_default=True, frozen_default=True)
def option_object(options_class: type[OptionsClass]) -> type[OptionsClass]:
    """Make a class with fields of `flag` and `argument` the type of the options of a subcommand."""
    for field_name, parameters in list(vars(options_class).items()):
        if isinstance(parameters, _Parameters | _Group):
            setattr(options_class, field_name, dataclasses.field(metadata={_METADATA: parameters}))
    return dataclasses.dataclass(frozen=True, slots=True, kw_only=True)(options_class)


def click_parameters(options_class: Any) -> Iterator[click.Parameter]:
    """Yield the arguments and options of a class of `option_object`."""
    for field in dataclasses.fields(options_class):
        parameters = field.metadata.get(_METADATA)
        if parameters is None:
            yield from click_parameters(field.type)
        elif isinstance(parameters, _Parameters):
            yield from _declared(field.name, field.type, parameters)
        else:
            for field_name, flags in parameters.flags.items():
                yield from _declared(field_name, options_of(parameters.options_class)[field_name][1], flags)


def _declared(field_name: str, annotation: Any, parameters: _Parameters) -> Iterator[click.Parameter]:
    for parameter_class, words, settings in parameters.declarations:
        of_type = {} if "flag_value" in settings else _settings_of_type(annotation, parameter_class)
        yield parameter_class([field_name, *words], **of_type | settings)


def _settings_of_type(annotation: Any, parameter_class: type) -> dict[str, Any]:
    """The settings that follow from the type of a field."""
    if NoneType in get_args(annotation):
        of_value = set(get_args(annotation)) - {NoneType}
        # The class of options reads what may also be a text, such as a number of bytes.
        annotation = str if str in of_value else of_value.pop()
    if get_origin(annotation) is tuple:
        item_settings = _settings_of_type(get_args(annotation)[0], parameter_class)
        return item_settings | ({"nargs": -1} if parameter_class is click.Argument else {"multiple": True})
    if get_origin(annotation) is Literal:
        return {"type": click.Choice(get_args(annotation))}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": {Path: PathType(Path), str: Text()}.get(annotation, annotation)}


def is_given(field_name: str) -> bool:
    """Whether the argument or option of a field is on the command line."""
    return click.get_current_context().get_parameter_source(field_name) is ParameterSource.COMMANDLINE


def _refuse_idle_flags(context: click.Context) -> None:
    """Refuse options without those that they say something about."""
    given = [parameter for parameter in context.command.params if parameter.name and is_given(parameter.name)]
    words = {word.strip("[]") for parameter in given for word in (*parameter.opts, parameter.metavar or "")}
    for parameter in given:
        if isinstance(parameter, _Flag) and parameter.only_with and words.isdisjoint(parameter.only_with):
            raise click.UsageError(f"{max(parameter.opts, key=len)} requires {' or '.join(parameter.only_with)}")


def _make_options(options_class: Any, values: Mapping[str, Any]) -> Any:
    made = {}
    for field in dataclasses.fields(options_class):
        parameters = field.metadata.get(_METADATA)
        if parameters is None:
            made[field.name] = _make_options(field.type, values)
        elif isinstance(parameters, _Parameters):
            made[field.name] = values[field.name]
        else:
            made[field.name] = parameters.options_class(**{name: values[name] for name in parameters.flags})
    return options_class(**made)


def subcommand(
    command_name: str, *, examples: Sequence[str], forms_group: bool = False
) -> Callable[[Callable[[Any], None]], click.Command]:
    """Return a decorator that makes a function of an object of options a subcommand.

    forms_group: under torchrun, the processes that run the command form one pipeline.
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
                _refuse_idle_flags(click.get_current_context())
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
