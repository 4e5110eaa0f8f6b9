"""Pictures of every page of the built site, for people to look at: desktop and phone width, light and dark.

    python tools/screenshots.py FOLDER [PAGE …]

Needs playwright and Chromium (its own, or the path in CHROMIUM). Fails if a page asks another host for anything, has an
error in its console, or is wider than the screen.
"""

import argparse
import functools
import os
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

SITE = Path(__file__).resolve().parents[1] / "site"
WIDTHS = {"desktop": (1360, 900), "phone": (390, 844)}


class Quiet(SimpleHTTPRequestHandler):
    """Serves files and says nothing."""

    def log_message(self, *_: object) -> None:
        """Nothing."""


def shoot(browser: Browser, origin: str, page_name: str, folder: Path) -> list[str]:
    """Four pictures of one page; returns what is wrong with it."""
    faults = []
    for scheme in ("light", "dark"):
        for label, (width, height) in WIDTHS.items():
            page = browser.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            where = f"{page_name} ({label}, {scheme})"
            page.on(
                "request",
                lambda r, where=where: (
                    None if r.url.startswith((origin, "data:", "blob:")) else faults.append(f"{where}: asks {r.url}")
                ),
            )
            page.on("console", lambda m, where=where: m.type == "error" and faults.append(f"{where}: {m.text}"))
            page.goto(f"{origin}/{page_name}", wait_until="networkidle")
            inner = page.evaluate("document.documentElement.scrollWidth")
            if inner > width:
                faults.append(f"{where}: {inner} pixels wide")
            name = page_name.removesuffix(".html").replace("/", "_")
            page.screenshot(path=folder / f"{name}-{label}-{scheme}.png", full_page=True)
            page.close()
    return faults


def main() -> int:
    """Shoots the pages that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="*", help="such as tutorials/index.html")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    pages = arguments.pages or [str(p.relative_to(SITE)) for p in sorted(SITE.rglob("*.html"))]
    server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(SITE)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    origin = f"http://127.0.0.1:{server.server_port}"
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=os.environ.get("CHROMIUM"), args=["--no-sandbox"])
        faults = [fault for name in pages for fault in shoot(browser, origin, name, arguments.folder)]
        browser.close()
    server.shutdown()
    print("\n".join(faults) or f"{len(pages)} pages, nothing wrong that a program can see")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
