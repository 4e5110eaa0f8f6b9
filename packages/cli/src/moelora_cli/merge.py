"""`moelora merge`: the parts of a sharded run, put together in the order of the input."""

from __future__ import annotations

from pathlib import Path

import click

from moelora.wording import counted
from moelora_cli.command import EXIT_DONE, MoeloraCommand
from moelora_cli.options import refuse_closed, stdout_for_results
from moelora_cli.parts import write_output


@click.command(cls=MoeloraCommand, short_help="Put the shards of a run together.")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--output", required=True, metavar="FILE|-", help="JSON Lines or Parquet; - is standard output.")
@click.option("--overwrite", is_flag=True, help="Replace an output file that exists.")
def merge(folder: Path, output: str, overwrite: bool) -> int:
    """Writes the lines of all shards in FOLDER, the --output of `moelora prefill --shard`, as one run writes them.

    Refuses while a shard has not finished or a part is missing. FOLDER is left as it is.
    """
    from moelora.jobs.parts import shards_of, stats_of
    from moelora.jobs.report import rows_and_lines
    from moelora.jobs.writer import check_output

    with stdout_for_results() as stdout:
        refuse_closed(stdout, output)
        check_output(output, overwrite=overwrite)
        write_output(folder, output, stdout)
    stats = stats_of(folder)
    said = rows_and_lines(stats.rows, stats.output_rows, stats.error_rows)
    click.echo(f"{counted(shards_of(folder), 'shard')} merged; rows: {said}", err=True)
    return EXIT_DONE
