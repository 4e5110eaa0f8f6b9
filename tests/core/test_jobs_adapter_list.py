"""Which adapters a run has, and which names are refused."""

import json
from pathlib import Path

import pytest

from moelora.errors import ConfigError
from moelora.jobs.adapter_list import resolve_adapters


def make(folder: Path) -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text("{}")
    return folder


def test_a_name_and_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "y=z").mkdir()
    monkeypatch.chdir(tmp_path)
    assert resolve_adapters([f"A={tmp_path}", "B=./y=z"]) == {"A": tmp_path, "B": Path("y=z")}


def test_a_folder_that_is_an_adapter_is_named_after_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = make(tmp_path / "lr=1e-4")
    assert resolve_adapters([str(folder)]) == {"lr=1e-4": folder}
    monkeypatch.chdir(folder)
    assert list(resolve_adapters(["."])) == ["lr=1e-4"]


def test_a_folder_of_adapters_is_taken_in_alphabetical_order(tmp_path: Path):
    for name in ("b", "a", "c"):
        make(tmp_path / name)
    (tmp_path / "notes").mkdir()
    (tmp_path / "readme.txt").write_text("x")
    assert list(resolve_adapters([str(tmp_path)])) == ["a", "b", "c"]


def test_a_list_file_has_names_and_paths_relative_to_itself(tmp_path: Path):
    for folder in ("sub/one", "two", "c"):
        (tmp_path / folder).mkdir(parents=True)
    lines = [{"name": "A", "path": "one"}, {"lora_name": "B", "lora_path": str(tmp_path / "two")}]
    file = tmp_path / "sub" / "adapters.jsonl"
    file.write_text("\ufeff" + "\r\n\n".join(map(json.dumps, lines)))
    assert resolve_adapters([str(file), f"C={tmp_path / 'c'}"]) == {
        "A": tmp_path / "sub" / "one",
        "B": tmp_path / "two",
        "C": tmp_path / "c",
    }


def test_a_path_that_leads_nowhere_is_refused_with_the_name_and_where_it_was_given(tmp_path: Path):
    make(tmp_path / "good")
    with pytest.raises(ConfigError, match=r"--adapters B=/none/such: .*'B', /none/such, does not exist"):
        resolve_adapters([f"A={tmp_path / 'good'}", "B=/none/such"])
    (tmp_path / "list.jsonl").write_text('{"name": "C", "path": "gone"}')
    with pytest.raises(ConfigError, match=r"list\.jsonl: .*'C', .*gone, does not exist"):
        resolve_adapters([str(tmp_path / "list.jsonl")])
    for given in (f"A={tmp_path / 'goood'}", str(tmp_path / "goood")):
        with pytest.raises(ConfigError, match=r"; did you mean '.*/good'\?$"):
            resolve_adapters([given])
    with pytest.raises(ConfigError, match=r"'D' must be a folder, and .*list\.jsonl is a file"):
        resolve_adapters([f"D={tmp_path / 'list.jsonl'}"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"name": "A"}', "line 1: path missing"),
        ('{"path": "A"}', "line 1: name missing"),
        ('{"name": "A", "path": "x", "lora_name": "B"}', "name is given twice"),
        ('{"name": "A", "path": "x", "rank": 8}', "unknown key 'rank'"),
        ('{"name": 1, "path": "x"}', "name must be a string"),
        ('{"name": "", "path": "x"}', "name must be a string that is not empty"),
        ("[1]", "must be a JSON object"),
        ("{", "not valid JSON"),
        ("", "is empty"),
    ],
)
def test_a_bad_list_file_is_refused_with_its_line(tmp_path: Path, line: str, message: str):
    file = tmp_path / "adapters.jsonl"
    file.write_text(line)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_adapters([str(file)])
    assert str(file) in str(caught.value)


@pytest.mark.parametrize("value", ["=x", " =x", "*=x", "__base__=x", "a\nb=x", "a\x00=x", " a=x", "a\u2028=x"])
def test_names_that_cannot_be_told_apart_are_refused(value: str):
    with pytest.raises(ConfigError, match="name"):
        resolve_adapters([value])


@pytest.mark.parametrize("value", ["", "none", "A=", "/none/such"])
def test_what_is_neither_a_path_nor_a_pair_is_refused(value: str):
    with pytest.raises(ConfigError, match="--adapters"):
        resolve_adapters([value])


def test_a_name_given_twice_is_refused_with_both_places(tmp_path: Path):
    make(tmp_path / "x" / "A")
    with pytest.raises(ConfigError, match=r"'A' is given twice: .*one.*x"):
        resolve_adapters(["A=one", str(tmp_path / "x")])


def test_files_and_empty_folders_are_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="neither the folder nor a folder in it"):
        resolve_adapters([str(tmp_path)])
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_adapters([str(tmp_path / "x.txt")])
