"""The moelora command with an engine that needs no model; run by tests as a process of its own."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fake_engine
from moelora_cli.main import main

fake_engine.install()
main()
