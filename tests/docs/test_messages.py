"""Every message that the program can print stands on the troubleshooting page, and no other does."""

import re
from pathlib import Path

from message_templates import Template, collect

PAGE = Path(__file__).resolve().parents[2] / "docs" / "troubleshooting.md"


def listed() -> list[str]:
    """The terms of the page's definition lists: one message in code marks per line."""
    found = re.findall(r"^(?:`` (.+) ``|`([^`]+)`)$", PAGE.read_text(encoding="utf-8"), re.M)
    return [one or other for one, other in found]


def words(message: str) -> str:
    """A message without its numbers, which come and go between the text and what is filled in."""
    return re.sub(r"[…\d]+", "…", message)


def test_every_message_is_listed_with_advice():
    known = set(map(words, listed()))
    missing = [f"{t.file}:{t.line}: {t.text}" for t in collect() if words(t.text) not in known]
    assert not missing, "put these into docs/troubleshooting.md, under the advice that fits:\n" + "\n".join(missing)


def test_nothing_is_listed_that_no_longer_exists():
    made = {words(t.text) for t in collect()}
    stale = [message for message in listed() if words(message) not in made]
    assert not stale, "no code makes these any more; take them out of docs/troubleshooting.md:\n" + "\n".join(stale)


def test_every_group_of_messages_has_advice():
    text = PAGE.read_text(encoding="utf-8")
    groups = re.findall(r"^(?:(?:`` .+ ``|`[^`]+`)\n)+(.*)", text, re.M)
    assert len(groups) > 50
    assert all(re.match(r":   \S.{2,}", after) for after in groups)


def test_the_collector_sees_each_kind_of_message():
    texts = {t.text for t in collect()}
    assert isinstance(collect()[0], Template)
    for text in (
        "padding up to the bucket would waste more than half of it",  # an eager reason
        "…: no such folder…",  # one arm of a conditional in a raise
        "unknown key ….… Valid: …",  # choose_from within a message
        "DoRA rescales the adapted weights by trained magnitudes; run as plain LoRA it would be wrong",  # a table
        "the prompt has no tokens",  # returned
        "out of device memory at … tokens in one sequence",  # an error in a result
        "…: dtype … has no kernel",  # through require
        "… is no device; valid: auto, cpu, cuda, cuda:N",  # through click
    ):
        assert text in texts, text
