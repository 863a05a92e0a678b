"""The folder of an adapter of peft: its settings, and where its tensors are in ``adapter_model.safetensors``. Nothing is computed."""

import itertools
import json
import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from stagepack.adapter.document import FLOATS
from stagepack.adapter.uses import MERGE_ADVICE
from stagepack.errors import AdapterError, FormatError, OptionError
from stagepack.format import limits
from stagepack.format.file_checks import near_path_hint, open_regular_file, read_limited
from stagepack.format.manifest_codec import other_kind_error
from stagepack.format.own_folders import folder_format
from stagepack.format.rules import METADATA_KEY, PEFT_SETTINGS_NAME, parse_json
from stagepack.format.weights import StoredTensor, parse_header_entry

PEFT_TENSORS_NAME: Final = "adapter_model.safetensors"
_SETTINGS_BYTES: Final = 2**24
_PREFIX: Final = "base_model.model."
# Settings that a plain low-rank change does not have, with what a model without them has.
_VARIANTS: Final = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "block-diagonal LoRA",
    "alora_invocation_tokens": "activated LoRA",
    "arrow_config": "Arrow",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
    "mica": "MiCA",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "layer_replication": "layer_replication",
    "megatron_config": "Megatron",
}
# Initial values that leave the weights of the base as they are; others, such as PiSSA, change these too.
_PLAIN_INITS: Final = (True, False, None, "gaussian", "orthogonal")
_TENSOR = re.compile(
    r"(?P<module>.+)\.(?P<kind>lora_A|lora_B|lora_embedding_A|lora_embedding_B)(?:\.(?P<part>weight|bias))?"
)
# A pattern of peft is a regular expression. Patterns with a repeated group, or with several repetitions, could match without end.
_REPEATED_GROUP = re.compile(r"\)[*+{]")
_REPETITION = re.compile(r"[*+{]")
_OPTIONAL = re.compile(r"(?<!\()\?")
_MOST_REPETITIONS: Final = 2
# Paths through the alternatives of a pattern, such as (q|v)_proj, and through what is optional.
_MOST_PATHS: Final = 4096
_MOST_PATTERNS: Final = 1000
# The number that peft has for "r" and "lora_alpha".
_DEFAULT_NUMBER: Final = 8
# Steps of the matching of all patterns with all modules: about 1 s. Ten patterns with two repetitions take 7e7 for a Llama of 126 layers.
_MOST_STEPS: Final = 3 * 10**8


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftChange:
    """The tensors of a low-rank change in the file, and its scale; `is_embedding` as peft has stored it."""

    a: StoredTensor
    b: StoredTensor
    bias: StoredTensor | None
    scale: float
    is_embedding: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeftAdapter:
    """An adapter of peft.

    Attributes:
        path: the file of its tensors.
        changes: the low-rank changes by the path of the module.
        replaced: the tensors that replace a weight, by the name of the weight.
    """

    path: Path
    changes: Mapping[str, PeftChange]
    replaced: Mapping[str, StoredTensor]


def read_peft_folder(folder: Path) -> PeftAdapter:
    """Read the settings of an adapter and the header of its tensors."""
    settings = _read_settings(folder)
    tensors = _read_header(folder / PEFT_TENSORS_NAME)
    parts: dict[str, dict[str, StoredTensor]] = {}
    replaced: dict[str, StoredTensor] = {}
    for name, tensor in tensors.items():
        if not name.startswith(_PREFIX):
            raise AdapterError(f"{folder}: expected tensors named {_PREFIX}..., as peft saves them, found {name[:120]}")
        own_name = name.removeprefix(_PREFIX)
        match = _TENSOR.fullmatch(own_name)
        if match is None:
            weight_name = own_name.replace(".base_layer.", ".")
            if weight_name in replaced or "lora_" in own_name:
                raise AdapterError(f"{folder}: {name[:120]} is no tensor of a plain low-rank change: {MERGE_ADVICE}")
            replaced[weight_name] = tensor
            continue
        kind = match["kind"].replace("embedding_", "")
        if len(match["module"]) > limits.NAME_CHARACTERS:
            raise AdapterError(
                f"{folder}: expected names of at most {limits.NAME_CHARACTERS} characters, found {len(name)}: {name[:80]}..."
            )
        key = f"{kind}.bias" if match["part"] == "bias" else kind
        own = parts.setdefault(match["module"], {})
        if key in own:
            raise AdapterError(f"{folder}: {match['module'][:120]} has its {key} twice")
        own[key] = tensor
        if match["kind"] != kind:
            own["embedding"] = tensor
    numbers = {
        field: _ModuleNumbers(folder, settings, field, pattern_field, parts)
        for field, pattern_field in (("r", "rank_pattern"), ("lora_alpha", "alpha_pattern"))
    }
    uses_root = bool(settings.get("use_rslora"))
    changes = {module: _change(folder, module, own, numbers, uses_root=uses_root) for module, own in parts.items()}
    if not changes and not replaced:
        raise AdapterError(f"{folder}: {PEFT_TENSORS_NAME} has no tensors")
    return PeftAdapter(path=folder / PEFT_TENSORS_NAME, changes=changes, replaced=replaced)


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / PEFT_SETTINGS_NAME
    try:
        fields = parse_json(read_limited(path, _SETTINGS_BYTES), PEFT_SETTINGS_NAME)
    except FormatError as error:
        raise AdapterError(f"{folder}: {error}") from None
    except OSError as error:
        if (found_format := folder_format(folder)) is not None:
            raise other_kind_error(str(folder), "the folder of an adapter of peft", found_format) from None
        hint = near_path_hint(folder, f"*/{PEFT_SETTINGS_NAME}")
        raise OptionError(
            f"{folder}: expected the folder of an adapter of peft, with {PEFT_SETTINGS_NAME}: {error.strerror}{hint}"
        ) from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{path}: expected an object, found {type(fields).__name__}")
    kind = str(fields.get("peft_type"))[:80]
    if kind != "LORA":
        raise AdapterError(f"{folder}: expected an adapter of the kind LORA, found {kind}: {MERGE_ADVICE}")
    for setting, title in _VARIANTS.items():
        if fields.get(setting) not in (None, False, [], {}):
            raise AdapterError(f"{folder}: expected plain LoRA, found {title} ({setting}): {MERGE_ADVICE}")
    if fields.get("init_lora_weights", True) not in _PLAIN_INITS:
        found = str(fields["init_lora_weights"])[:80]
        raise AdapterError(
            f"{folder}: expected plain LoRA, found init_lora_weights {found!r}, which changes the weights of the base too: save it as LoRA "
            f"(path_initial_model_for_weight_conversion of save_pretrained), or {MERGE_ADVICE}"
        )
    return fields


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file of any writer, by name."""
    name = path.name
    try:
        with open_regular_file(path) as file:
            file_size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if length > limits.WEIGHT_HEADER_BYTES or length + 8 > file_size:
                raise AdapterError(f"{path}: is no safetensors file, or cut short: its header states {length} bytes")
            fields = parse_json(file.read(length), name)
    except OSError as error:
        advice = (
            "save the adapter with safe_serialization=True" if path.with_suffix(".bin").exists() else error.strerror
        )
        raise AdapterError(f"{path.parent}: expected the tensors in {name}: {advice}") from None
    except FormatError as error:
        raise AdapterError(f"{path.parent}: {error}") from None
    if not isinstance(fields, dict):
        raise AdapterError(f"{path}: expected a header that is an object")
    fields.pop(METADATA_KEY, None)
    try:
        tensors = {key: parse_header_entry(key, entry, 8 + length, name) for key, entry in fields.items()}
    except FormatError as error:
        raise AdapterError(f"{path.parent}: {error}") from None
    for key, tensor in tensors.items():
        if tensor.dtype not in FLOATS:
            raise AdapterError(f"{path}: {key[:120]}: expected floats, found {tensor.dtype}")
        if tensor.end > file_size:
            raise AdapterError(f"{path}: {key[:120]} ends at byte {tensor.end}, the file at {file_size}")
    _check_apart(path, tensors)
    return tensors


def _check_apart(path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Refuse tensors that share bytes, as every reader of safetensors does."""
    ordered = sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end))
    for (name, tensor), (other_name, other) in itertools.pairwise(ordered):
        if other.start < tensor.end:
            raise AdapterError(
                f"{path}: {name[:120]} and {other_name[:120]} have bytes {other.start} to {tensor.end} both"
            )


def _change(
    folder: Path,
    module: str,
    own: Mapping[str, StoredTensor],
    numbers: "Mapping[str, _ModuleNumbers]",
    *,
    uses_root: bool,
) -> PeftChange:
    """The change of a module, from its tensors."""
    where = f"{folder}: {module[:120]}"
    if "lora_A" not in own or "lora_B" not in own:
        present = "lora_A" if "lora_A" in own else "lora_B"
        raise AdapterError(f"{where}: expected a pair lora_A and lora_B, found {present} alone")
    a, b = own["lora_A"], own["lora_B"]
    if len(a.shape) != 2 or len(b.shape) != 2:
        found = f"{list(a.shape)} and {list(b.shape)}"
        raise AdapterError(
            f"{where}: expected a pair of matrices, found {found}, such as of a convolution: {MERGE_ADVICE}"
        )
    rank = a.shape[0]
    if rank != b.shape[1] or rank < 1:
        raise AdapterError(
            f"{where}: expected lora_A [rank, in] and lora_B [out, rank], found {list(a.shape)} and {list(b.shape)}"
        )
    stated = numbers["r"].of(module)
    if stated != rank:
        raise AdapterError(f"{where}: {PEFT_SETTINGS_NAME} states the rank {stated}, its tensors have {rank}")
    alpha = numbers["lora_alpha"].of(module)
    try:
        scale = float(alpha) / (math.sqrt(rank) if uses_root else rank)
    except OverflowError:
        scale = math.inf
    if not math.isfinite(scale):
        raise AdapterError(f"{where}: expected a finite lora_alpha, found {str(alpha)[:80]}")
    if "lora_A.bias" in own:
        raise AdapterError(f"{where}: expected no bias in lora_A")
    is_embedding = "embedding" in own
    return PeftChange(a=a, b=b, bias=own.get("lora_B.bias"), scale=scale, is_embedding=is_embedding)


class _ModuleNumbers:
    """A number for each module: that of the first pattern that matches the end of its path, or that of all modules."""

    def __init__(
        self, folder: Path, settings: Mapping[str, Any], field: str, pattern_field: str, modules: Collection[str]
    ) -> None:
        self._folder, self._field = folder, field
        self._default = settings.get(field, _DEFAULT_NUMBER)
        patterns = settings.get(pattern_field) or {}
        if not isinstance(patterns, dict):
            raise AdapterError(f"{folder}: {pattern_field}: expected an object, found {type(patterns).__name__}")
        self._position = {pattern: position for position, pattern in enumerate(patterns)}
        self._values = list(patterns.values())
        # Names; a dot stands for itself in all names that occur.
        expressions = [pattern for pattern in patterns if not re.fullmatch(r"[\w.]+", pattern)]
        if len(expressions) > _MOST_PATTERNS:
            raise AdapterError(
                f"{folder}: {pattern_field}: expected at most {_MOST_PATTERNS} patterns, found {len(expressions)}"
            )
        self._expressions = [(self._position[pattern], _compile(folder, pattern)) for pattern in expressions]
        steps = sum(
            _path_count(pattern) * (1 + module.count(".")) * len(module) ** len(_REPETITION.findall(pattern))
            for pattern in expressions
            for module in modules
        )
        if steps > _MOST_STEPS:
            raise AdapterError(
                f"{folder}: {pattern_field}: expected patterns that {len(modules)} modules match in {_MOST_STEPS:.0e} steps, found "
                f"{steps:.0e}: write the names of modules in their place"
            )

    def of(self, module: str) -> float:
        """Return the number of a module."""
        parts = module.split(".")
        positions = [self._position.get(".".join(parts[start:])) for start in range(len(parts))]
        positions += [position for position, expression in self._expressions if expression.match(module)]
        first = min((position for position in positions if position is not None), default=None)
        value = self._default if first is None else self._values[first]
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise AdapterError(f"{self._folder}: {self._field}: expected a number, found {json.dumps(value)[:80]}")
        return value


def _path_count(pattern: str) -> int:
    """An upper bound of the paths through a pattern: its groups follow each other, and alternatives of one do not."""
    alternatives = math.prod(1 + part.count("|") for part in pattern.split("("))
    return int(alternatives) << len(_OPTIONAL.findall(pattern))


def _compile(folder: Path, pattern: str) -> re.Pattern[str]:
    """Compile a pattern whose matching ends."""
    repetitions = len(_REPETITION.findall(pattern))
    if len(pattern) > limits.NAME_CHARACTERS or _REPEATED_GROUP.search(pattern) or repetitions > _MOST_REPETITIONS:
        raise AdapterError(
            f"{folder}: expected a pattern with at most {_MOST_REPETITIONS} repetitions and no repeated group, found {pattern[:80]!r}"
        )
    if _path_count(pattern) > _MOST_PATHS:
        raise AdapterError(
            f"{folder}: expected a pattern with at most {_MOST_PATHS} paths through its alternatives and optional parts, found "
            f"{pattern[:80]!r}: write the names of modules in its place"
        )
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except (re.error, OverflowError, RecursionError) as error:
        raise AdapterError(f"{folder}: the pattern {pattern[:80]!r} is no regular expression: {error}") from None
