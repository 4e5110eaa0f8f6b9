"""The fingerprint of a run: a digest of every file that its output depends on, and of nothing else."""

import os
import random
import shutil
from pathlib import Path

import pytest

from moelora.jobs.fingerprint import changed, run_fingerprint


def test_the_fingerprint_sees_content(tmp_path):
    model, adapter, source = tmp_path / "model", tmp_path / "adapter", tmp_path / "in.jsonl"
    for folder in (model, adapter):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / "x.safetensors").write_bytes(bytes(1000))
    source.write_text("{}")

    def now():
        return run_fingerprint(model=model, adapters={"A": adapter}, input_file=source, options={"top_k": 1})

    before = now()
    assert changed(before, now()) == []
    (adapter / "x.safetensors").write_bytes(bytes(999) + b"\x01")
    assert changed(before, now()) == ["adapter A"]
    source.write_text("{ }")
    assert changed(before, now()) == ["adapter A", "input"]
    weights = bytearray(5_000_000)
    (model / "x.safetensors").write_bytes(weights)
    large = now()
    weights[2_500_000:2_600_000] = b"\x01" * 100_000
    (model / "x.safetensors").write_bytes(weights)
    assert changed(large, now()) == ["model"]
    (model / "tokenizer.json").write_text("{}")
    assert changed(before, now()) == ["adapter A", "input", "model", "tokenizer"]
    assert changed(before, {**before, "adapter B": "x"}) == ["adapter B (new)"]
    assert changed(before, {**before, "version torch": "1.0"})[0].startswith("version torch (")


def test_the_fingerprint_is_of_files_whatever_lies_beside_them(tmp_path):
    """Folders, links that lead nowhere, and pipes have the names of files; a name may be no UTF-8."""
    model, adapter, source = tmp_path / "model", tmp_path / "adapter", tmp_path / "in.jsonl"
    source.write_text("{}")

    def now():
        return run_fingerprint(model=model, adapters={"A": adapter}, input_file=source, options={})

    for folder in (model, adapter):
        folder.mkdir()
        (folder / "x.safetensors").write_bytes(bytes(1000))
    before = run_fingerprint(model=model, adapters={"A": tmp_path / "gone"}, input_file=source, options={})
    assert changed(before, now()) == ["adapter A"], "a folder that is not there is refused by who loads it"
    before = now()
    for folder in (model, adapter):
        (folder / "folder.safetensors").mkdir()
        (folder / "nowhere.safetensors").symlink_to("gone")
        os.mkfifo(folder / "pipe.safetensors")
    (adapter / "circle.json").symlink_to("circle.json")
    assert changed(before, now()) == []
    for folder in (model, adapter):
        Path(os.fsdecode(os.fsencode(folder) + b"/\xff.safetensors")).write_bytes(b"x")
    assert changed(before, now()) == ["adapter A", "model"]


@pytest.mark.parametrize("block", [7, 64])
def test_the_fingerprint_sees_every_byte_of_an_adapter_and_where_it_is(tmp_path, monkeypatch, block):
    monkeypatch.setattr("moelora.jobs.fingerprint._PART", 64)
    monkeypatch.setattr("moelora.jobs.fingerprint._BLOCK", block)
    source, adapter = tmp_path / "in.jsonl", tmp_path / "adapter"
    source.write_text("{}")
    adapter.mkdir()
    contents = {"a.safetensors": random.randbytes(64), "b.safetensors": random.randbytes(200), "c.json": b""}

    def digest(contents):
        shutil.rmtree(adapter)
        adapter.mkdir()
        for name, content in contents.items():
            (adapter / name).write_bytes(content)
        print_of = run_fingerprint(model=tmp_path, adapters={"A": adapter}, input_file=source, options={})
        return print_of["adapter A"]

    seen = {digest(contents)}
    assert digest(dict(reversed(contents.items()))) in seen
    a, b, _ = contents.values()
    others = [{**contents, "b.safetensors": b[:i] + bytes([b[i] ^ 1]) + b[i + 1 :]} for i in range(len(b))]
    others += [
        {**contents, "b.safetensors": b[64:128] + b[:64] + b[128:]},
        {**contents, "a.safetensors": a + b[:64], "b.safetensors": b[64:]},
        {**contents, "a.safetensors": b, "b.safetensors": a},
        {**contents, "b.safetensors": b[:-1]},
        {**contents, "b.safetensors": b + b"\0"},
        {"a.safetensors": a, "b.safetensors": b},
        {"a.safetensors": a, "bb.safetensors": b, "c.json": b""},
    ]
    seen |= {digest(other) for other in others}
    assert len(seen) == 1 + len(others)
