"""Which share of a job a process takes, as told by the command line or by torchrun and Slurm."""

import pytest

from moelora.errors import ConfigError
from moelora.jobs.shards import local_place, parse_shard


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, None),
        ("1/4", {}, (1, 4)),
        ("auto", {"RANK": "2", "WORLD_SIZE": "3"}, (2, 3)),
        ("auto", {"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, (0, 1)),
    ],
)
def test_parse_shard(text, environment, expected):
    assert parse_shard(text, environment) == expected


@pytest.mark.parametrize("text", ["4/4", "-1/2", "1", "a/b", "1/0", "auto"])
def test_bad_shards(text):
    with pytest.raises(ConfigError, match="shard"):
        parse_shard(text, {})


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, None),
        ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, (3, 8)),
        ({"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2"}, (1, 2)),
        ({"SLURM_LOCALID": "1", "SLURM_NTASKS_PER_NODE": "2(x3)"}, None),
        ({"LOCAL_RANK": "3"}, None),
    ],
)
def test_the_place_on_a_machine(environment, expected):
    assert local_place(environment) == expected
