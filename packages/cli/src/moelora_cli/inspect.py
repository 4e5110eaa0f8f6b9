"""`moelora inspect`: what an adapter changes, or what a checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from moelora.errors import ConfigError
from moelora_cli.command import EXIT_DONE, MoeloraCommand


@click.command(cls=MoeloraCommand, short_help="What an adapter or a checkpoint holds.")
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def inspect(path: str, as_json: bool) -> int:
    """Shows what the folder PATH holds: an adapter (adapter_config.json) or a checkpoint (config.json)."""
    from moelora.jobs.checkpoint_facts import checkpoint_facts

    folder = Path(path)
    if not (folder / "config.json").exists():
        raise ConfigError(f"{path}: neither adapter_config.json nor config.json is there")
    facts: dict[str, Any] = checkpoint_facts(folder)
    click.echo(json.dumps(facts, indent=2) if as_json else "\n".join(f"{k}: {v}" for k, v in facts.items()))
    return EXIT_DONE
