"""What a user can do wrong, as exceptions. Programmers' mistakes are `assert`s and never reach these classes."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path


class MoeloraError(ValueError):
    """Something the user gave cannot be used; the message names it, its value and the valid choices."""


class AdapterError(MoeloraError):
    """An adapter was refused: its files, its configuration, or its fit to the base model."""


class CheckpointError(MoeloraError):
    """A base checkpoint was refused: a missing shard or tensor, an unreadable file, an unknown architecture."""


class ConfigError(MoeloraError):
    """An option or a combination of options cannot be honoured."""


class InputError(MoeloraError):
    """An input file as a whole cannot be read. A single bad row is a `RequestError` instead."""


class RequestError(MoeloraError):
    """One request or row cannot be scored; the others go on."""


def choose_from(what: str, given: str, valid: Iterable[str]) -> str:
    """Returns the sentence "unknown WHAT 'GIVEN'; did you mean …? Valid: …", for an error message."""
    names = sorted(valid)
    close = get_close_matches(given, names, n=1)
    hint = f" Did you mean {close[0]!r}?" if close else ""
    shown = ", ".join(names[:20]) + (f", … ({len(names)} in all)" if len(names) > 20 else "")
    return f"unknown {what} {given!r}.{hint} Valid: {shown or '(none)'}"


def similar_folder(path: Path) -> str:
    """Returns "; did you mean 'FOLDER'?" for a path that is not there, where a folder beside it has a name like its."""
    try:
        beside = [child.name for child in path.parent.iterdir() if child.is_dir()]
    except OSError:
        return ""
    close = get_close_matches(path.name, beside, n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""


def named(error: OSError, name: object) -> OSError:
    """`error` with the name of its file, which errors of a file that is open do not say."""
    return OSError(error.errno, error.strerror or str(error), str(name))
