"""Fixtures for every test. Triton's interpreter is chosen here, before anything can import triton."""

import atexit
import os
import shutil
import tempfile

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# The models of the tests are so small that a second thread costs more in waiting than it saves.
torch.set_num_threads(1)
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # for the processes that tests start
# Verdicts of other checkouts and of earlier runs must not answer for this one.
_cache = tempfile.mkdtemp(prefix="moelora-cache-")
os.environ["XDG_CACHE_HOME"] = _cache
atexit.register(shutil.rmtree, _cache, ignore_errors=True)
