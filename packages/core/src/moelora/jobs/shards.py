"""Which share of a job a process has: the shard that it is given, and its place on its machine. Reads no file."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from moelora.errors import ConfigError


def parse_shard(text: str | None, environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """The shard I of N, counted from 0, that "I/N" names; None for None.

    "auto" takes RANK and WORLD_SIZE (torchrun), or SLURM_PROCID and SLURM_NTASKS, from the environment. Raises
    `ConfigError` for what is neither.
    """
    if text is None:
        return None
    if text == "auto":
        for rank, size in (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS")):
            if rank in environment and size in environment:
                text = f"{environment[rank]}/{environment[size]}"
                break
        else:
            raise ConfigError("--shard auto: neither RANK and WORLD_SIZE nor SLURM_PROCID and SLURM_NTASKS are set")
    match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
    if match is None or int(match[1]) >= int(match[2]):
        raise ConfigError(f"--shard {text!r} is not I/N with 0 ≤ I < N, for example 0/4")
    return int(match[1]), int(match[2])


def local_place(environment: Mapping[str, str] = os.environ) -> tuple[int, int] | None:
    """This process's number among those of its machine, and how many they are, as torchrun or Slurm say; else None."""
    for rank, size in (("LOCAL_RANK", "LOCAL_WORLD_SIZE"), ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE")):
        found = environment.get(rank, ""), environment.get(size, "")
        if all(value.isdecimal() for value in found) and int(found[0]) < int(found[1]):
            return int(found[0]), int(found[1])
    return None
