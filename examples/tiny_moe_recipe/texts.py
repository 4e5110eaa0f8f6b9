"""Where the training texts come from, how they are read, and which of them are held out. Nothing is downloaded."""

import gzip
import hashlib
import re
import struct
import sysconfig
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

SWORD = Path("/usr/share/sword/modules/texts/ztext")
WORDNET = Path("/usr/share/wordnet")
JARGON = Path("/usr/share/dictd/jargon.dict.dz")
SQLITE = Path("/usr/include/sqlite3.h")

KINDS = ("python", "scripture", "spanish", "glossary")
"""The kinds that get an adapter. The general sources are only in the base model's mix."""

_MAX_CHARS = 4_000_000
"""Text kept per source, held-out part included: more than the training time can read anyway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One text: `name` is a kind of `KINDS` or a general source; `read` yields its documents in a fixed order."""

    name: str
    title: str
    package: str
    licence: str
    needs: Path
    read: Callable[[], Iterator[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Documents of one source; a document is in exactly one of the two."""

    train: list[str]
    heldout: list[str]


def load(source: Source) -> Split:
    """Read a source and hold out about one document in ten, chosen by a hash of its text.

    The hash makes the choice independent of order, so that it stays the same when a source gains or loses documents.
    Repeated documents are dropped: one copy in each part would be a leak.
    """
    if not source.needs.exists():
        raise FileNotFoundError(
            f"{source.needs} is missing ({source.title}). Install it with: apt-get install {source.package}"
        )
    train: list[str] = []
    heldout: list[str] = []
    seen: set[bytes] = set()
    chars = 0
    for document in source.read():
        text = document.strip()
        digest = hashlib.sha256(text.encode()).digest()
        if len(text) < 80 or digest in seen:
            continue
        seen.add(digest)
        (heldout if digest[0] < 26 else train).append(text)
        chars += len(text)
        if chars >= _MAX_CHARS:
            break
    return Split(train=train, heldout=heldout)


def _read_python() -> Iterator[str]:
    """Modules of the running interpreter's standard library, in an order that mixes its packages.

    Left out: tests, tables, installed packages, and every file with a copyright notice of its own, so that
    all that remains is under the Python licence alone.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    unwanted = {"test", "tests", "idle_test", "site-packages", "dist-packages", "encodings", "pydoc_data", "ensurepip"}
    paths = [path.relative_to(root) for path in root.rglob("*.py")]
    paths = [path for path in paths if not unwanted.intersection(path.parts) and not path.name.startswith("_sysconfig")]
    for path in sorted(paths, key=lambda path: hashlib.sha256(path.as_posix().encode()).digest()):
        text = (root / path).read_text(encoding="utf-8", errors="replace")
        if "copyright" not in text.lower():
            yield text


def _read_sword(module: str) -> Iterator[str]:
    """Chapters of a SWORD `zText` module compressed by book, one verse a line, without notes and markup.

    `.bzs` lists the compressed blocks (offset, size, plain size), `.bzv` the verses (block, offset, size).
    A chapter's heading sits in an entry of its own, between verses, and starts with a `<chapter …>` element.
    """
    for testament in ("ot", "nt"):
        blocks_at, verses_at, data = (
            (SWORD / module / f"{testament}.{ending}").read_bytes() for ending in ("bzs", "bzv", "bzz")
        )
        blocks = [
            zlib.decompress(data[start : start + size]) for start, size, _ in struct.iter_unpack("<III", blocks_at)
        ]
        verses: list[str] = []
        for block, start, size in struct.iter_unpack("<IIH", verses_at):
            raw = blocks[block][start : start + size].decode() if size else ""
            if "<chapter n=" in raw or "<chapter osisID=" in raw:
                yield "\n".join(verses)
                verses = []
            raw = re.sub(r"<(note|title)\b[^>]*>.*?</\1>", " ", raw, flags=re.DOTALL)
            # The words are tagged one by one; some neighbours lack the space that the tags stand in for.
            raw = re.sub(r"</(?:w|transChange)><(?:w|transChange)\b", "</w> <w", raw)
            verse = " ".join(re.sub(r"<[^>]*>", "", raw).split())
            if verse:
                verses.append(verse)
        yield "\n".join(verses)


def _read_wordnet() -> Iterator[str]:
    """Dictionary entries, twelve to a document: `word, synonym (noun): definition; "example"`."""
    parts = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
    unwanted = re.compile(
        r"\b(slur|offensive|disparag\w*|derogat\w*|vulgar|obscen\w*|sex\w*|slang|ethnic|prostitut\w*)\b"
    )
    entries: list[str] = []
    for ending in ("noun", "verb", "adj", "adv"):
        for line in (WORDNET / f"data.{ending}").read_text(encoding="utf-8").splitlines():
            if line.startswith("  "):  # the licence, at the head of each file
                continue
            fields, gloss = line.split(" | ", 1)
            _, _, part, count, *words = fields.split(" ")
            names = [re.sub(r"\(.*\)", "", word).replace("_", " ") for word in words[: 2 * int(count, 16) : 2]]
            if not unwanted.search(gloss):
                entries.append(f"{', '.join(names)} ({parts[part]}): {gloss.strip()}")
    documents = ["\n".join(entries[start : start + 12]) for start in range(0, len(entries), 12)]
    # Shuffled by a salted hash, unlike the one that holds out: else the held-out documents would all come first.
    yield from sorted(documents, key=lambda document: hashlib.sha256(b"order" + document.encode()).digest())


def _read_jargon() -> Iterator[str]:
    """Entries of the Jargon File: a headword at the margin, its text indented by four, of which two are kept."""
    text = gzip.decompress(JARGON.read_bytes()).decode("utf-8", errors="replace")
    for entry in re.split(r"\n\n(?=\S)", text):
        if not entry.startswith("00-database"):
            yield re.sub(r"^ {4}", "", entry, flags=re.MULTILINE)


def _read_sqlite() -> Iterator[str]:
    """The SQLite header, cut before each block comment that starts at the margin."""
    yield from re.split(r"\n(?=/\*\n)", SQLITE.read_text(encoding="utf-8"))


SOURCES = (
    Source(
        name="python",
        title="Python standard library source",
        package="libpython3-stdlib",
        licence="Python Software Foundation License 2",
        needs=Path(sysconfig.get_paths()["stdlib"]),
        read=_read_python,
    ),
    Source(
        name="scripture",
        title="Bible in modern English (eBible.org, engWEB2015)",
        package="sword-text-web",
        licence="public domain",
        needs=SWORD / "engWEB2015eb" / "nt.bzz",
        read=lambda: _read_sword("engWEB2015eb"),
    ),
    Source(
        name="spanish",
        title="Bible in Spanish (Reina-Valera 1909)",
        package="sword-text-sparv",
        licence="public domain",
        needs=SWORD / "spaRV1909eb" / "nt.bzz",
        read=lambda: _read_sword("spaRV1909eb"),
    ),
    Source(
        name="glossary",
        title="Definitions of WordNet 3.0",
        package="wordnet-base",
        licence="WordNet 3.0 License (permissive, notice kept)",
        needs=WORDNET / "data.noun",
        read=_read_wordnet,
    ),
    Source(
        name="jargon",
        title="The Jargon File 4.4.7",
        package="dict-jargon",
        licence="public domain",
        needs=JARGON,
        read=_read_jargon,
    ),
    Source(
        name="sqlite",
        title="SQLite's C header sqlite3.h",
        package="libsqlite3-dev",
        licence="public domain",
        needs=SQLITE,
        read=_read_sqlite,
    ),
)
