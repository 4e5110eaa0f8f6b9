"""Checks the built site: nothing that a browser loads on its own comes from another host.

    python tools/check_site.py

Links that a reader clicks may lead anywhere. Scripts, styles, images, fonts, frames may not, nor URLs in styles.
"""

import re
import sys
from html.parser import HTMLParser
from pathlib import Path

SITE = Path(__file__).resolve().parents[1] / "site"
LOADED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "use": "href"}
NOT_FETCHED = {"canonical", "next", "prev", "alternate"}
"""Values of `rel` of links that no browser fetches on its own."""


class Loads(HTMLParser):
    """Collects the addresses that a page loads from elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what `tag` loads."""
        values = {name: value or "" for name, value in attrs}
        address = values.get(LOADED.get(tag, ""), "")
        if tag == "link" and values.get("rel") in NOT_FETCHED:
            return
        if re.match(r"(https?:)?//", address):
            self.outside.append(f"<{tag}> {address}")
        self.outside += [f"style of <{tag}>: {url}" for url in outside_urls(values.get("style", ""))]


def outside_urls(style: str) -> list[str]:
    """Addresses on other hosts in a style sheet."""
    return re.findall(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)""", style)


def main() -> int:
    """Prints what is loaded from elsewhere; 1 if there is any, or no site."""
    pages = sorted(SITE.rglob("*.html"))
    found: list[str] = []
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        found += [f"{page.relative_to(SITE)}: {one}" for one in loads.outside]
    for sheet in SITE.rglob("*.css"):
        found += [f"{sheet.relative_to(SITE)}: {url}" for url in outside_urls(sheet.read_text(encoding="utf-8"))]
    print("\n".join(found) or f"{len(pages)} pages load nothing from elsewhere")
    return 1 if found or not pages else 0


if __name__ == "__main__":
    sys.exit(main())
