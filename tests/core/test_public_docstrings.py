"""The docstring of every public name says what a caller must know: each field and argument, and what is raised."""

import dataclasses
import enum
import inspect
import re
from pathlib import Path

import pytest

import moelora

API = (Path(__file__).resolve().parents[2] / "docs" / "api.md").read_text(encoding="utf-8")
NAMES = [name for name in moelora.__all__ if name != "__version__"]
CLASSES = [name for name in NAMES if inspect.isclass(getattr(moelora, name))]
METHODS = [
    (name, member)
    for name in CLASSES
    for member, value in vars(getattr(moelora, name)).items()
    if not member.startswith("_") and (inspect.isfunction(value) or isinstance(value, property))
]


def section(text: str, title: str) -> str:
    """The lines under `title:` of a docstring."""
    found = re.search(rf"^{title}:\n((?:    .*\n?|\n)+)", text, re.M)
    return found.group(1) if found else ""


def described(text: str, title: str) -> dict[str, str]:
    """What a section says of each name."""
    entries = re.split(r"^    (?=\w+:)", section(text, title), flags=re.M)[1:]
    return {name.strip(): said.strip() for name, _, said in (entry.partition(":") for entry in entries)}


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_on_the_page_of_the_interface(name):
    assert re.search(rf"^::: moelora\.[\w.]+\.{name}$", API, re.M)


@pytest.mark.parametrize("name", CLASSES)
def test_every_field_is_described(name):
    kind = getattr(moelora, name)
    text = inspect.getdoc(kind) or ""
    assert text.split("\n")[0].endswith(".")
    if dataclasses.is_dataclass(kind):
        wanted = [field.name for field in dataclasses.fields(kind)]
    elif issubclass(kind, enum.Enum):
        wanted = list(kind.__members__)
    else:
        return
    said = described(text, "Attributes")
    assert list(said) == wanted
    assert all(len(one) >= 8 for one in said.values())


def test_the_engine_describes_its_arguments_and_errors():
    text = inspect.getdoc(moelora.PrefillEngine) or ""
    assert set(described(text, "Args")) == set(inspect.signature(moelora.PrefillEngine).parameters)
    assert set(described(text, "Raises")) == {"CheckpointError", "AdapterError", "ConfigError"}


@pytest.mark.parametrize(("name", "member"), METHODS, ids=lambda value: str(value))
def test_every_public_method_has_a_docstring(name, member):
    value = inspect.getattr_static(getattr(moelora, name), member)
    text = inspect.getdoc(value) or ""
    assert len(text) > 20
    if inspect.isfunction(value) and "Args:" in text:
        assert set(described(text, "Args")) == set(inspect.signature(value).parameters) - {"self"}


@pytest.mark.parametrize("title", ["Attributes", "Raises"])
def test_the_reader_of_sections_sees_what_is_missing(title):
    text = f"Something.\n\n{title}:\n    one: A thing.\n        More of it.\n    two: Another.\n\nEnd."
    assert list(described(text, title)) == ["one", "two"]
    assert described("Something.", title) == {}
