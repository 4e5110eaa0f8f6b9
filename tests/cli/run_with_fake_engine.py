"""The moelora command with an engine that needs no model; run by tests as a process of its own."""

import atexit
import os
import time

import fake_engine
from moelora_cli.main import main

atexit.register(time.sleep, float(os.environ.get("FAKE_ENGINE_EXIT_SECONDS", "0")))
fake_engine.install()
main()
