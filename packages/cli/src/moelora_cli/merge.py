"""`moelora merge`: the parts of a sharded run, put together in the order of the input."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from moelora_cli.command import EXIT_DONE, MoeloraCommand


@click.command(cls=MoeloraCommand, short_help="Put the shards of a run together.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--output", required=True, metavar="FILE|-", help="JSON Lines or Parquet; - is standard output.")
@click.option("--overwrite", is_flag=True, help="Replace an output file that exists.")
def merge(folder: Path, output: str, overwrite: bool) -> int:
    """Writes the lines of all shards in FOLDER, the --output of `moelora prefill --shard`, as one run writes them.

    Refuses while a shard has not finished or a part is missing. FOLDER is left as it is.
    """
    from moelora.jobs.parts import merge_lines
    from moelora.jobs.writer import check_output, open_output

    check_output(output, overwrite=overwrite)
    lines = merge_lines(folder)
    with open_output(output, sys.stdout.buffer) as sink:
        for line in lines:
            sink.write(line)
    return EXIT_DONE
