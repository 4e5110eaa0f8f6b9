"""`python -m moelora_cli` is the `moelora` command."""

from moelora_cli.main import main

main()
