"""Which adapters a run has: from `NAME=PATH`, a folder, a folder of folders, or a list file. Opens no adapter."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path

from moelora.errors import ConfigError, InputError, RequestError, similar_folder
from moelora.jobs.reader import LineReader
from moelora.jobs.rows import load_object
from moelora.types import BASE_ADAPTER

CONFIG_NAME = "adapter_config.json"
_RESERVED = {"*": "stands for all adapters", BASE_ADAPTER: "stands for the base model"}
_LIST_KEYS = {"name": "name", "lora_name": "name", "path": "path", "lora_path": "path"}


def resolve_adapters(values: Iterable[str]) -> dict[str, Path]:
    """Adapter folders by name, in the order given.

    Each value is one of: an existing path (an adapter's folder, named after it; a folder of adapters, by name in
    alphabetical order; a `.jsonl` file with `name` and `path`, relative to that file), or `NAME=PATH`. Whether a
    folder holds a sound adapter is found out when it is loaded. Raises `ConfigError`, also for a missing folder.
    """
    adapters: dict[str, Path] = {}
    origin: dict[str, str] = {}
    for value in values:
        for name, path in _resolve(value):
            check_name(name, f"--adapters {value}")
            if name in adapters:
                raise ConfigError(
                    f"adapter name {name!r} is given twice: {adapters[name]} (--adapters {origin[name]}) and "
                    f"{path} (--adapters {value}); give one of them another name with NAME=PATH"
                )
            adapters[name] = path
            origin[name] = value
    for name, path in adapters.items():
        if not path.exists():
            hint = similar_folder(path)
            raise ConfigError(
                f"--adapters {origin[name]}: the folder of adapter {name!r}, {path}, does not exist{hint}"
            )
        if not path.is_dir():
            raise ConfigError(f"--adapters {origin[name]}: adapter {name!r} must be a folder, and {path} is a file")
    return adapters


def check_name(name: str, where: str) -> None:
    """Raises `ConfigError` if `name` cannot name an adapter."""
    if not name or name != name.strip():
        raise ConfigError(f"{where}: the adapter name {name!r} is empty or has spaces around it")
    if name in _RESERVED:
        raise ConfigError(f"{where}: the name {name!r} {_RESERVED[name]}; give the adapter another name")
    if any(unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") for character in name):
        raise ConfigError(f"{where}: the adapter name {name!r} holds a control character or a broken one")


def _resolve(value: str) -> Iterator[tuple[str, Path]]:
    path = Path(value)
    try:
        exists = bool(value) and path.exists()
    except (OSError, ValueError):
        exists = False
    # An existing path wins, so that folders with "=" in their name (lr=1e-4) can be given without a name.
    if not exists:
        name, equals, rest = value.partition("=")
        if not equals:
            hint = similar_folder(path)
            raise ConfigError(
                f"--adapters {value}: no such file or folder; give NAME=PATH, a folder or a .jsonl file{hint}"
            )
        if not rest:
            raise ConfigError(f"--adapters {value}: the path after = is empty")
        yield name, Path(rest)
    elif path.is_dir():
        yield from _from_folder(path)
    elif path.suffix.lower() in (".jsonl", ".ndjson"):
        yield from _from_list(path)
    else:
        raise ConfigError(f"--adapters {value}: is a file; give NAME=PATH, a folder or a .jsonl file")


def _from_folder(path: Path) -> Iterator[tuple[str, Path]]:
    if (path / CONFIG_NAME).exists():
        yield path.resolve().name, path
        return
    try:
        found = sorted(child for child in path.iterdir() if (child / CONFIG_NAME).exists())
    except OSError as error:
        raise ConfigError(f"--adapters {path}: cannot be read: {error.strerror or error}") from None
    if not found:
        raise ConfigError(f"--adapters {path}: neither the folder nor a folder in it holds {CONFIG_NAME}")
    for child in found:
        yield child.name, child


def _from_list(path: Path) -> Iterator[tuple[str, Path]]:
    try:
        with LineReader(path) as lines:
            for number, data in lines:
                yield _list_entry(path, number, data)
    except InputError as error:
        raise ConfigError(f"--adapters {path}: {error}") from None


def _list_entry(path: Path, number: int, data: bytes) -> tuple[str, Path]:
    where = f"--adapters {path}, line {number}"
    try:
        record = load_object(data)
    except RequestError as error:
        raise ConfigError(f"{where}: {error}") from None
    entry: dict[str, str] = {}
    for key, value in record.items():
        if key not in _LIST_KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; valid: {', '.join(_LIST_KEYS)}")
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{where}: {key} must be a string that is not empty, got {json.dumps(value)[:40]}")
        if _LIST_KEYS[key] in entry:
            raise ConfigError(f"{where}: {_LIST_KEYS[key]} is given twice")
        entry[_LIST_KEYS[key]] = value
    missing = [key for key in ("name", "path") if key not in entry]
    if missing:
        raise ConfigError(f'{where}: {" and ".join(missing)} missing; a line is {{"name": …, "path": …}}')
    return entry["name"], path.parent / entry["path"]
