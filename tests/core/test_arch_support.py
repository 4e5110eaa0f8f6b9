"""docs/support.md is what the probe finds on the transformers that `constraints.txt` pins."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from support_matrix import compare, page  # noqa: E402

PINNED = re.search(r"^transformers==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)[1]


@pytest.mark.skipif(version("transformers") != PINNED, reason=f"the page is written with transformers {PINNED}")
@pytest.mark.filterwarnings("ignore")
def test_the_support_matrix_is_up_to_date():
    difference = compare(page())
    assert not difference, f"run `nox -s support`:\n{difference}"
