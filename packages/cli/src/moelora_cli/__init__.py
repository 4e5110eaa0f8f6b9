"""The `moelora` command."""
