"""Fixtures for every test. Triton's interpreter is chosen here, before anything can import triton."""

import atexit
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

import torch

FOLDERS = "moelora-tests-"


def own_folder() -> tuple[Path, IO[bytes]]:
    """A folder for all temporary files of this run, and the lock that tells others that the run is alive.

    It goes when the run ends. One that was killed leaves its folder to the next run, which removes it.
    """
    for old in Path(tempfile.gettempdir()).glob(f"{FOLDERS}*/lock"):
        try:
            with old.open("ab") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(old.parent, ignore_errors=True)
        except OSError:  # it is held, or another's
            continue
    folder = Path(tempfile.mkdtemp(prefix=FOLDERS))
    lock = (folder / "lock").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder, lock


if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("COLUMNS", None)  # side by side, tests get the width of the terminal that they were started in
# The models of the tests are so small that a second thread costs more in waiting than it saves.
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for the processes that tests start
if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has all of this from the process that started it
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # of tmp_path, kept where a test failed
    _folder, _lock = own_folder()
    tempfile.tempdir = os.environ["TMPDIR"] = str(_folder)
    # Verdicts of other checkouts and of earlier runs must not answer for this one.
    os.environ["XDG_CACHE_HOME"] = str(_folder / "cache")
