"""Held-out rows and what the reference (transformers and PEFT) says about them."""

import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

_ROW_TOKENS = 192
_CONTEXT_TOKENS = 96
_CHOICE_TOKENS = 24


def write_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write JSON Lines, with letters as they are."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON Lines."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _clip(tokenizer: PreTrainedTokenizerFast, text: str, tokens: int) -> str:
    """The longest prefix that ends before white space and has at most `tokens` tokens, BOS included."""
    offsets = tokenizer(text, return_offsets_mapping=True, verbose=False)["offset_mapping"]
    if len(offsets) <= tokens:
        return text.rstrip()
    clipped = text[: offsets[tokens - 1][1]]
    return clipped[: max(clipped.rfind(" "), clipped.rfind("\n"))].rstrip()


def _passages(tokenizer: PreTrainedTokenizerFast, documents: Sequence[str], count: int, seed: int) -> list[str]:
    """`count` passages of held-out documents that start at a line and hold most of `_ROW_TOKENS` tokens.

    The documents take turns, so that a long one does not fill the list. Passages naming an address are passed over.
    """
    chooser = random.Random(seed)
    passages: list[str] = []
    order = list(documents)
    chooser.shuffle(order)
    for attempt in range(100 * count):
        document = order[attempt % len(order)]
        starts = [match.end() for match in re.finditer(r"^|\n(?=\S)", document)]
        passage = _clip(tokenizer, document[chooser.choice(starts) :], _ROW_TOKENS)
        long_enough = len(tokenizer(passage)["input_ids"]) > 0.75 * _ROW_TOKENS
        if long_enough and not re.search(r"(?i)\w@\w|://|author:|contributed", passage) and passage not in passages:
            passages.append(passage)
        if len(passages) == count:
            return passages
    raise ValueError(f"only {len(passages)} of {count} held-out passages found")


def heldout_rows(
    tokenizer: PreTrainedTokenizerFast, heldout: Mapping[str, list[str]], count: int
) -> list[dict[str, Any]]:
    """`count` rows per kind for `heldout.jsonl`."""
    return [
        {"id": f"{kind}-{index:02d}", "prompt": passage, "metadata": {"kind": kind}}
        for kind, documents in heldout.items()
        for index, passage in enumerate(_passages(tokenizer, documents, count, seed=1))
    ]


def choice_rows(
    tokenizer: PreTrainedTokenizerFast, heldout: Mapping[str, list[str]], count: int
) -> list[dict[str, Any]]:
    """`count` questions per kind: how does this passage go on? The wrong choices go on from other kinds.

    Telling passages of one kind apart by how they go on takes a larger model than this one.
    """
    chooser = random.Random(2)
    questions: dict[str, list[tuple[str, str]]] = {}
    for kind, documents in heldout.items():
        questions[kind] = []
        for passage in _passages(tokenizer, documents, count, seed=3):
            context = _clip(tokenizer, passage, _CONTEXT_TOKENS)
            # Cut at a space, so that each choice starts with one and its tokens do not depend on the context.
            context = context[: context.rfind(" ")]
            continuation = " " + _clip(tokenizer, passage[len(context) :].lstrip(), _CHOICE_TOKENS)
            questions[kind].append((context, continuation))
    rows: list[dict[str, Any]] = []
    for kind, pairs in questions.items():
        for index, (context, _) in enumerate(pairs):
            kinds = list(questions)
            chooser.shuffle(kinds)
            rows.append(
                {
                    "id": f"{kind}-choice-{index:02d}",
                    "prompt": context,
                    "choices": [questions[other][index][1] for other in kinds],
                    "metadata": {"kind": kind, "answer": kinds.index(kind)},
                }
            )
    return rows


@torch.inference_mode()
def logprob_sum(model: nn.Module, ids: list[int], start: int = 1) -> float:
    """Sum of the log-probabilities of `ids[start:]`, each given all that precedes it, in float32."""
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    picked = logits.log_softmax(-1).gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    return picked[start - 1 :].double().sum().item()


def score(
    model: nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Iterable[dict[str, Any]], name: str
) -> list[dict[str, Any]]:
    """Score held-out rows under one adapter called `name`; the fields are those that `moelora prefill` writes."""
    scored: list[dict[str, Any]] = []
    for row in rows:
        ids = tokenizer(row["prompt"])["input_ids"]
        scored.append(
            {
                "id": row["id"],
                "adapter": name,
                "num_tokens": len(ids),
                "logprob_sum": logprob_sum(model, ids),
                "metadata": row["metadata"],
                "error": None,
            }
        )
    return scored


def choices_right(model: nn.Module, tokenizer: PreTrainedTokenizerFast, rows: Iterable[dict[str, Any]]) -> list[bool]:
    """For each question, whether the true continuation has the best mean log-probability per token."""
    right: list[bool] = []
    for row in rows:
        prefix = tokenizer(row["prompt"])["input_ids"]
        means: list[float] = []
        for choice in row["choices"]:
            tail = tokenizer(choice, add_special_tokens=False)["input_ids"]
            means.append(logprob_sum(model, prefix + tail, start=len(prefix)) / len(tail))
        right.append(means.index(max(means)) == row["metadata"]["answer"])
    return right
