"""What users build on: exit codes, fields of output rows, values and defaults of options. A change is a decision."""

import json
import re
from pathlib import Path

import click
import pytest

from cli.prefill_command import Command
from moelora.jobs.parquet import output_schema
from moelora_cli import command as codes
from moelora_cli.main import cli

DOCS = Path(__file__).resolve().parents[2] / "docs"

EXIT_CODES = {"EXIT_DONE": 0, "EXIT_FAILED": 1, "EXIT_REFUSED": 2, "EXIT_ROW_ERRORS": 3, "EXIT_INTERRUPTED": 130}

TOKEN = {"token_id": "int64", "logprob": "double"}
CHOICE = {
    "text": "string",
    "token_ids": "list<element: int64>",
    "logprob": "double",
    "logprob_per_token": "double",
    "logprob_per_byte": "double",
    "num_tokens": "int64",
    "num_bytes": "int64",
    "is_greedy": "bool",
}
FIELDS = {
    "id": "string",
    "adapter": "string",
    "num_tokens": "int64",
    "truncated_tokens": "int64",
    "logprob_sum": "double",
    "is_greedy": "bool",
    "token_ids": "list<element: int64>",
    "token_logprobs": "list<element: double>",
    "next_token": TOKEN,
    "top_logprobs": [TOKEN],
    "choices": [CHOICE],
    "mode": "string",
    "metadata": "string",
    "error": "string",
}
"""In Parquet; JSON Lines have the same fields, `id` as it was given and `metadata` as any JSON."""

ALWAYS = {"id", "adapter", "num_tokens", "truncated_tokens", "logprob_sum", "is_greedy", "next_token", "mode"}
ALWAYS |= {"metadata", "error"}

VALUES = {
    "--on-long": (("error", "truncate-left"), "error"),
    "--logprobs": (("sum", "tokens"), "sum"),
    "--top-k": (None, 0),
    "--backend": (None, "auto"),
    "--graph": (("auto", "full", "breakable", "off"), "auto"),
    "--device": (None, "auto"),
    "--dtype": (("auto", "bfloat16", "float16", "float32"), "auto"),
    "--max-tokens": (None, None),
    "--max-requests": (None, None),
    "--max-length": (None, None),
    "--slots": (None, None),
    "--buckets": (None, None),
    "--load-format": (("auto", "safetensors", "dummy"), "auto"),
    "--lora-b-layout": (("rank_major", "grouped_by_expert"), None),
    "--seed": (None, 0),
    "--default-adapter": (None, None),
    "--with-base": (None, False),
    "--attention": (("auto", "triton", "fa4"), "auto"),
    "--batch-invariant": (None, False),
}


def test_exit_codes_are_these_and_documented():
    assert {name: getattr(codes, name) for name in dir(codes) if name.startswith("EXIT_")} == EXIT_CODES
    section = (DOCS / "files.md").read_text().split("## Exit codes")[1]
    assert [int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)] == list(EXIT_CODES.values())


def test_the_columns_of_parquet_are_these():
    pyarrow = pytest.importorskip("pyarrow")

    def told(kind):
        if pyarrow.types.is_struct(kind):
            return {kind.field(i).name: told(kind.field(i).type) for i in range(kind.num_fields)}
        if pyarrow.types.is_list(kind) and pyarrow.types.is_struct(kind.value_type):
            return [told(kind.value_type)]
        return str(kind).replace("item:", "element:")

    assert {field.name: told(field.type) for field in output_schema()} == FIELDS


@pytest.mark.usefixtures("no_real_engine")
def test_the_fields_of_json_are_those_of_parquet_and_documented(command: Command):
    rows = [
        {"prompt_token_ids": [1, 2], "choices_token_ids": [[3]]},
        {"prompt": "a", "choices": ["b"]},
        {"prompt_token_ids": [1]},
        {"prompt_token_ids": []},
    ]
    command.input.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert command("--logprobs", "tokens", "--top-k", 2).code == 3
    by_ids, by_text, alone, bad = command.rows
    assert set(by_ids) == set(by_text) == set(FIELDS)
    assert set(alone) == set(FIELDS) - {"choices"}
    assert set(bad) == ALWAYS
    assert set(by_ids["choices"][0]) == set(CHOICE) - {"text"}
    assert set(by_text["choices"][0]) == set(CHOICE) - {"token_ids"}
    assert set(alone["next_token"]) == set(alone["top_logprobs"][0]) == set(TOKEN)
    assert command("--overwrite").code == 3
    assert set(command.rows[2]) == ALWAYS
    text = (DOCS / "files.md").read_text()
    assert [name for name in (*FIELDS, *CHOICE) if f"`{name}`" not in text] == []


@pytest.mark.parametrize("name", ["prefill", "plan"])
def test_values_and_defaults_of_options(name: str):
    found = {}
    for parameter in cli.commands[name].params:
        if parameter.opts[0] in VALUES:
            kind = parameter.type
            default = parameter.to_info_dict()["default"]
            default = default if isinstance(default, bool | int | str) else None  # click marks what is not set
            found[parameter.opts[0]] = (tuple(kind.choices) if isinstance(kind, click.Choice) else None, default)
    assert found == VALUES
