"""What a run's output depends on, as short digests: a resumed run must find every one of them unchanged."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import moelora
from moelora.adapters.files import adapter_files, folder_stamp
from moelora.safetensors_file import Stamp
from moelora.versions import versions

_BLOCK = 1 << 20
_PART = 64 << 20
"""Bytes of an adapter's file that are digested by themselves, so that a large file is not left to one core."""

_SAMPLE = 1 << 14
_SAMPLES = 64
_READERS = 16
"""Parts that are read at once: a core digests about 1.5 GB/s, and there may be fifty adapters."""

_PACKAGES = (
    *("torch", "transformers", "tokenizers", "triton", "flash-attn-4", "flash-linear-attention", "fla-core"),
    *("causal-conv1d", "mamba-ssm"),
)
"""Another version of these may score, or split text, differently in the last bit."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json",
                    "chat_template.jinja", "tokenizer.model")  # fmt: skip


def run_fingerprint(
    *, model: Path, adapters: Mapping[str, Path], input_file: Path, options: Mapping[str, Any]
) -> dict[str, str]:
    """Digests by what they are of: `model`, `tokenizer`, `adapter NAME`, `input`, `option NAME`, `moelora`.

    Adapters, tokenizer and input count by content. Weights count by their names, sizes, and samples from all over each
    file, since reading a large checkpoint twice would cost more than most runs. The order of the adapters counts.
    """
    digests = {"moelora": moelora.__version__, "model": _model_digest(model)}
    digests |= {f"version {name}": str(found) for name, found in versions(_PACKAGES).items()}
    digests["tokenizer"] = _digest(_contents(model / name for name in _TOKENIZER_FILES))
    with ThreadPoolExecutor(max_workers=_READERS) as readers:
        found = {name: _begin_parts(folder, readers) for name, folder in adapters.items()}
        for place, (name, parts) in enumerate(found.items()):
            digests[f"adapter {name}"] = _digest([str(place).encode(), *(part.result() for part in parts)])
    digests["input"] = _digest(_contents([input_file]))
    for name, value in sorted(options.items()):
        digests[f"option {name}"] = str(value)
    return digests


def run_stamps(*, model: Path, adapters: Mapping[str, Path], input_file: Path) -> dict[str, str]:
    """What changes when a file is written anew, by the names of `run_fingerprint`. Reads no contents.

    Taken before the digests, and again when all is loaded: else a run would have loaded what it has no digest of.
    """
    folders = {"model": model, **{f"adapter {name}": folder for name, folder in adapters.items()}}
    stamps = {name: str(folder_stamp(folder)) for name, folder in folders.items()}
    return {**stamps, "input": str(Stamp.of(input_file.stat()))}


def changed(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What differs between two fingerprints, in words."""
    names = sorted({*before, *now})
    return [
        f"{name} ({before[name]} before, {now[name]} now)"
        if name.startswith(("option", "moelora", "version"))
        else name
        for name in names
        if name in before and name in now and before[name] != now[name]
    ] + [f"{name} ({'gone' if name in before else 'new'})" for name in names if (name in before) != (name in now)]


def _begin_parts(folder: Path, readers: ThreadPoolExecutor) -> list[Future[bytes]]:
    """Digests of all parts of an adapter's files, in their order."""
    places = [(path, begin) for path in adapter_files(folder) for begin in range(0, max(path.stat().st_size, 1), _PART)]
    return [readers.submit(_part_digest, path, begin) for path, begin in places]


def _part_digest(path: Path, begin: int) -> bytes:
    """Of at most `_PART` bytes of a file and of where they are."""
    digest = hashlib.sha256(b"%d %b" % (begin, os.fsencode(path.name)))
    # Read into the same memory again and again: fresh memory for every block would take as long as the digest.
    room = memoryview(bytearray(_BLOCK))
    with path.open("rb", buffering=0) as file:
        file.seek(begin)
        left = _PART
        while count := file.readinto(room[:left]):
            digest.update(room[:count])
            left -= count
    return digest.digest()


def _model_digest(folder: Path) -> str:
    config = [folder / "config.json", folder / "model.safetensors.index.json"]
    weights = sorted(p for p in folder.glob("*.safetensors") if p.is_file())
    described = [b"%b %d" % (os.fsencode(p.name), p.stat().st_size) for p in weights]
    return _digest(chain(_contents(config), described, *map(_samples, weights)))


def _samples(path: Path) -> Iterable[bytes]:
    """The first and the last bytes of a file, and some from evenly spread places between."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for i in range(_SAMPLES):
            file.seek(max(size - _SAMPLE, 0) * i // (_SAMPLES - 1))
            yield file.read(_SAMPLE)


def _contents(files: Iterable[Path]) -> Iterable[bytes]:
    for path in files:
        if path.exists():
            yield path.name.encode()
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    yield block


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:24]
