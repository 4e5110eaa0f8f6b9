"""Reads adapter_config.json: which fields change the forward pass, how the scale follows, what is refused and why."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any

from moelora.errors import AdapterError

CONFIG_NAME = "adapter_config.json"
LORA_B_LAYOUTS = ("rank_major", "grouped_by_expert")

# Written by trainers, without effect on the forward pass of a finished adapter: they chose which modules to train, how
# to initialise them or how to run the training.
_INERT = frozenset(
    (
        # Which modules were trained.
        "target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying",
        # How they were initialised and trained.
        "lora_dropout", "loftq_config", "eva_config", "corda_config", "lora_ga_config", "velora_config",
        "megatron_config", "megatron_core", "runtime_config", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
        # Where the file comes from.
        "inference_mode", "revision", "task_type", "auto_mapping", "base_model_name_or_path",
        # Only read where use_qalora is set, which is refused.
        "qalora_group_size",
    )
)  # fmt: skip

# A value other than null, false or empty changes the forward pass in a way that is not implemented.
_REFUSED = {
    "use_dora": "DoRA rescales the adapted weights by trained magnitudes; run as plain LoRA it would be wrong",
    "lora_bias": "biases trained beside lora_B are not supported",
    "use_qalora": "QALoRA pools the input of lora_A, which is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "layer_replication": "the adapter counts the layers of a model with replicated layers",
    "alora_invocation_tokens": "an activated LoRA acts only after its invocation tokens, which is not supported",
    "arrow_config": "Arrow mixes other adapters per token, which is not supported",
    "kasa_config": "KaSA also truncates the base weights, which is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "trainable_token_indices": "it replaces single rows of the embedding, which is not supported",
}

# Of one regular expression: repeats without a bound or with one above `_FEW`.
_MOST_REPEATS = 5
_FEW = 4

_PLAIN_INITS = frozenset({"gaussian", "orthogonal", "eva", "mica", "lora_ga"})
_CHANGING_INITS = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What of adapter_config.json matters after training.

    r and lora_alpha: the defaults of all modules; 0 and NaN when `refusals` says that they are missing or bad.
    rank_pattern, alpha_pattern: compiled patterns in the file's order. target_parameters: names or dotted suffixes of
    parameters that were wrapped. modules_to_save: names of fully trained modules. peft_version: None before 0.18.
    base_model: what the adapter says it was trained on, for people; None if it says nothing. Adapters of one plan may
    differ in it.
    lora_b_layout: "rank_major", "grouped_by_expert" or None. notes: fields that were read and ignored, and why.
    refusals: reasons why the adapter cannot be used; the loader raises if there is any.
    """

    r: int
    lora_alpha: float
    use_rslora: bool = False
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...] = ()
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...] = ()
    target_parameters: tuple[str, ...] = ()
    modules_to_save: tuple[str, ...] = ()
    ensure_weight_tying: bool = False
    peft_version: str | None = None
    base_model: str | None = field(default=None, compare=False)
    lora_b_layout: str | None = None
    notes: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()

    def rank_of(self, name: str) -> int:
        """The configured rank of a module or wrapped parameter, by its name in the adapter file."""
        for pattern, rank in self.rank_pattern:
            if pattern.match(name):
                return rank
        return self.r

    def scale_of(self, name: str) -> float:
        """α/r (LoRA, arXiv 2106.09685), or α/√r (rsLoRA, arXiv 2312.03732).

        name: of a module or wrapped parameter, as the adapter file has it.
        """
        alpha, rank = self.lora_alpha, self.rank_of(name)
        for pattern, given in self.alpha_pattern:
            if pattern.match(name):
                alpha = given
                break
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def wraps_parameter(self, name: str) -> bool:
        """Whether `target_parameters` lists the parameter `name`, in full or by a suffix that starts at a dot."""
        return any(name == listed or name.endswith(f".{listed}") for listed in self.target_parameters)


def read_config(folder: Path) -> AdapterConfig:
    """Reads `folder`/adapter_config.json.

    Raises AdapterError if the file is missing or is no JSON object. Bad or unsupported fields are collected in
    `refusals` instead, so that all of them can be shown.
    """
    path = folder / CONFIG_NAME
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        raise AdapterError(f"{folder}: {CONFIG_NAME} not found{hint_at_subfolders(folder)}") from None
    except UnicodeDecodeError as error:
        raise AdapterError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error.strerror or error}") from None
    try:
        raw = json.loads(text, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")
        raise AdapterError(f"{path}: not valid JSON: {what} at line {error.lineno} column {error.colno}") from None
    except (ValueError, RecursionError) as error:  # a duplicate key, a number of 5,000 digits, endless nesting
        raise AdapterError(f"{path}: not a usable JSON object: {error}") from None
    if not isinstance(raw, dict):
        raise AdapterError(f"{path}: must hold a JSON object, found {type(raw).__name__}")
    return parse_config(raw)


def parse_config(raw: Mapping[str, Any]) -> AdapterConfig:
    """Turns the JSON object of adapter_config.json into an `AdapterConfig`; never raises for what a user wrote."""
    fields = _Fields(raw)
    peft_type = raw.get("peft_type")
    if peft_type is None:
        fields.note("peft_type is missing; taken as LORA")
    elif peft_type != "LORA":
        fields.refuse("peft_type", "only LORA adapters are supported")
    fields.initialisation()
    if raw.get("bias", "none") not in ("none", None):
        fields.refuse("bias", "it replaces biases of the base model; valid: 'none'")
    if fields.flag("fan_in_fan_out"):
        fields.note("fan_in_fan_out is ignored: it has no meaning for linear layers")
    if raw.get("lora_alpha") == 0:
        fields.note("lora_alpha is 0: the low-rank factors change nothing")
    for key, reason in _REFUSED.items():
        if not _is_unset(raw.get(key)):
            fields.refuse(key, reason)
    config = AdapterConfig(
        r=fields.rank(),
        lora_alpha=fields.alpha(),
        use_rslora=fields.flag("use_rslora"),
        rank_pattern=fields.patterns("rank_pattern", _as_rank, "a positive integer"),
        alpha_pattern=fields.patterns("alpha_pattern", _as_number, "a finite number"),
        target_parameters=fields.strings("target_parameters"),
        modules_to_save=fields.strings("modules_to_save"),
        ensure_weight_tying=fields.flag("ensure_weight_tying"),
        peft_version=fields.text("peft_version", None),
        base_model=str(raw.get("base_model_name_or_path") or "") or None,
        lora_b_layout=fields.text("lora_B_layout", LORA_B_LAYOUTS),
    )
    fields.unknown()
    values = {name: getattr(config, name) for name in config.__slots__}
    return AdapterConfig(**{**values, "notes": tuple(fields.notes), "refusals": tuple(fields.refusals)})


class _Fields:
    """Reads typed fields from a JSON object and collects what is wrong with them."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.seen = {"peft_type", "bias", "init_lora_weights", *_REFUSED}
        self.notes: list[str] = []
        self.refusals: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    def refuse(self, key: str, reason: str) -> None:
        self.refusals.append(f"{CONFIG_NAME}: {key}={_shown(self.raw.get(key))}: {reason}")

    def _get(self, key: str) -> Any:
        self.seen.add(key)
        return self.raw.get(key)

    def rank(self) -> int:
        rank = _as_rank(self._get("r"))
        if "r" not in self.raw:
            self.refusals.append(f"{CONFIG_NAME}: r is missing")
        elif rank is None:
            self.refuse("r", "must be a positive integer")
        return rank or 0

    def alpha(self) -> float:
        alpha = _as_number(self._get("lora_alpha"))
        if "lora_alpha" not in self.raw:
            self.refusals.append(f"{CONFIG_NAME}: lora_alpha is missing; the scale cannot be known without it")
        elif alpha is None:
            self.refuse("lora_alpha", "must be a finite number")
        return math.nan if alpha is None else alpha

    def flag(self, key: str) -> bool:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value is True

    def text(self, key: str, valid: tuple[str, ...] | None) -> str | None:
        value = self._get(key)
        if value is None or (isinstance(value, str) and (valid is None or value in valid)):
            return value
        self.refuse(key, f"valid: {', '.join(valid)}" if valid else "must be a string")
        return None

    def strings(self, key: str) -> tuple[str, ...]:
        value = self._get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            self.refuse(key, "must be a list of strings")
            return ()
        return tuple(value)

    def patterns(self, key: str, convert: Callable[[Any], Any], wanted: str) -> tuple[tuple[re.Pattern[str], Any], ...]:
        value = self._get(key)
        if value is None:
            return ()
        if not isinstance(value, dict):
            self.refuse(key, f"must map patterns to {wanted}")
            return ()
        compiled = []
        for pattern, given in value.items():
            converted = convert(given)
            if converted is None:
                self.refusals.append(f"{CONFIG_NAME}: {key}[{pattern!r}]={_shown(given)}: must be {wanted}")
                continue
            try:
                if _may_take_forever(pattern):
                    self.refusals.append(
                        f"{CONFIG_NAME}: {key}: {_shown(pattern)} repeats what repeats or branches already, or has "
                        f"over {_MOST_REPEATS} open repeats, and might never finish; write it without"
                    )
                    continue
                # As PEFT matches: from the start of the name or behind a dot, up to its end.
                compiled.append((re.compile(rf"(.*\.)?({pattern})$"), converted))
            except (re.error, RecursionError, OverflowError) as error:
                self.refusals.append(f"{CONFIG_NAME}: {key}: {_shown(pattern)} is not a regular expression: {error}")
        return tuple(compiled)

    def initialisation(self) -> None:
        """Refuses adapters whose training also changed the base weights."""
        value = self.raw.get("init_lora_weights")
        if value is None or isinstance(value, bool):
            return
        lowered = value.lower() if isinstance(value, str) else ""
        if lowered.startswith(_CHANGING_INITS):
            self.refuse(
                "init_lora_weights",
                "this initialisation changes the base weights, so the saved factors do not fit the original base; save"
                " the adapter again with PEFT's path_initial_model_for_weight_conversion",
            )
        elif lowered not in _PLAIN_INITS:
            self.refuse("init_lora_weights", f"valid: true, false, {', '.join(sorted(_PLAIN_INITS))}")

    def unknown(self) -> None:
        """Refuses set fields that nobody knows: they may change the forward pass. Null, false and empty do not."""
        for key, value in self.raw.items():
            if key not in self.seen and key not in _INERT and not _is_unset(value):
                self.refuse(
                    key, "unknown field; remove it, or set it to null, if it does not change what the adapter computes"
                )


def _may_take_forever(pattern: str) -> bool:
    """Whether backtracking over a regular expression can take time beyond all bounds, as it does for `(a+)+$`.

    Such patterns have a repeat whose body can match the same text in several ways, or many open repeats in a row.
    Raises what `re.compile` raises.
    """
    repeats = 0
    inside = [(item, False) for item in parser.parse(pattern)]
    while inside:
        (op, argument), repeated = inside.pop()
        is_repeat = op in (parser.MAX_REPEAT, parser.MIN_REPEAT)
        varies = is_repeat and argument[0] != argument[1]
        if repeated and (varies or op is parser.BRANCH):
            return True
        repeats += varies and argument[1] > _FEW
        deeper = repeated or (is_repeat and argument[1] > _FEW)
        inside += [(item, deeper) for part in _parts(argument) for item in part]
    return repeats > _MOST_REPEATS


def _parts(argument: Any) -> Iterator[Any]:
    """The patterns in the argument of one parsed operation, however deep its tuples and lists go."""
    if isinstance(argument, parser.SubPattern):
        yield argument
    elif isinstance(argument, tuple | list):
        for item in argument:
            yield from _parts(item)


def _is_unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (str, list, dict)) and not value)


def _as_rank(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _as_number(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except (ValueError, RecursionError):
        text = f"<{type(value).__name__}>"
    return text if len(text) <= 80 else f"{text[:77]}..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"key {twice!r} is given twice")
    return result


def hint_at_subfolders(folder: Path) -> str:
    """Returns "; subfolders that have one: …" where folders in `folder` are adapters, else nothing."""
    found = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG_NAME}"))
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""
    return f"; subfolders that have one: {', '.join(found[:5])}{more}" if found else ""
