"""The moelora command with an engine that needs no model; run by tests as a process of its own."""

import fake_engine
from moelora_cli.main import main

fake_engine.install()
main()
