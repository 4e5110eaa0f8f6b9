"""Make `examples/tiny-moe`: train a tiny mixture-of-experts model and four adapters on the CPU, from installed texts.

    python examples/make_tiny_moe.py

Needs torch, transformers 5, peft and tokenizers, and the Debian packages that `tiny_moe_recipe/texts.py` names.
"""

import argparse
import math
import shutil
import time
from collections import Counter
from pathlib import Path

import torch
from tiny_moe_recipe import adapters, scoring
from tiny_moe_recipe.matrix import BASE, mean_logprobs
from tiny_moe_recipe.model import build_model, build_tokenizer, expert_shares, save_base
from tiny_moe_recipe.texts import KINDS, SOURCES, Split, load
from tiny_moe_recipe.training import Batches, encode_stream, train
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3MoeForCausalLM, set_seed

BASE_MIX = {"jargon": 0.65, "sqlite": 0.25, "python": 0.025, "scripture": 0.025, "spanish": 0.025, "glossary": 0.025}
"""Share of the windows that the base sees of each source: a little of every kind, to leave its adapter room."""

BASE_STEPS = 1000
BASE_RATE = 5e-3
ROWS_PER_KIND = 24
CHOICES_PER_KIND = 3
SEED = 20


def prepare(seed: int, threads: int) -> None:
    """Fix what can be fixed: the seed, the number of threads (it changes the order of sums) and the algorithms."""
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    set_seed(seed)


def read_texts() -> dict[str, Split]:
    """Read every source, and say what each one is and under which licence."""
    splits = {source.name: load(source) for source in SOURCES}
    for source in SOURCES:
        split = splits[source.name]
        characters = sum(map(len, split.train))
        print(f"{source.name}: {source.title}; {source.licence}; package {source.package}")
        print(f"  {characters / 1e6:.1f} M characters to train on, {len(split.heldout)} documents held out")
    return splits


def tokenizer_sample(splits: dict[str, Split]) -> list[str]:
    """About the same amount of every source, from training documents alone."""
    sample: list[str] = []
    for split in splits.values():
        characters = 0
        for document in split.train:
            sample.append(document)
            characters += len(document)
            if characters > 600_000:
                break
    return sample


def train_base(tokenizer: PreTrainedTokenizerFast, streams: dict[str, Tensor], steps: int, output: Path) -> None:
    """Train the base and store it in bfloat16; what follows is trained and measured on the stored weights."""
    model = build_model(tokenizer)
    print(f"base: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters")
    batches = Batches(streams, BASE_MIX, tokenizer.bos_token_id, SEED)
    train(model, batches, steps=steps, peak_rate=BASE_RATE, balance=True, label="base")
    save_base(model, tokenizer, output)


def open_base(output: Path) -> Qwen3MoeForCausalLM:
    """The stored base in float32, as a constant."""
    return AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32).eval().requires_grad_(False)


def train_adapter(
    recipe: adapters.Recipe, tokenizer: PreTrainedTokenizerFast, streams: dict[str, Tensor], output: Path, steps: int
) -> None:
    """Train one adapter on the stored base and store it under the name of its kind."""
    set_seed(SEED)
    model = adapters.attach(open_base(output), recipe)
    batches = Batches(streams, {recipe.kind: 1.0}, tokenizer.bos_token_id, SEED + 1)
    size, _ = model.get_nb_trainable_parameters()
    print(f"{recipe.kind}: {recipe.layout}; {size} parameters")
    train(model, batches, steps=steps, peak_rate=recipe.peak_rate, balance=False, label=recipe.kind)
    directory = output / "adapters" / recipe.kind
    adapters.save(model, recipe, directory)
    adapters.check_stored(model, open_base(output), directory, streams[recipe.kind][:200].tolist())


def unigram_entropy(ids: Tensor) -> float:
    """Nats per token that a model would need that knew this stream's token frequencies and nothing else."""
    shares = [count / len(ids) for count in Counter(ids.tolist()).values()]
    return -sum(share * math.log(share) for share in shares)


def report(
    tokenizer: PreTrainedTokenizerFast, streams: dict[str, Tensor], output: Path, reference: Path | None
) -> None:
    """Print the matrix of mean log-probabilities, the choices got right and how evenly the experts are used."""
    heldout = scoring.read_lines(output / "heldout.jsonl")
    choices = scoring.read_lines(output / "choices.jsonl")
    base = open_base(output)
    rows = scoring.score(base, tokenizer, heldout, BASE)
    right = {BASE: scoring.choices_right(base, tokenizer, choices)}
    shares = expert_shares(base, [tokenizer(row["prompt"])["input_ids"] for row in heldout])
    for recipe in adapters.RECIPES:
        model = adapters.load(open_base(output), output / "adapters" / recipe.kind)
        rows += scoring.score(model, tokenizer, heldout, recipe.kind)
        right[recipe.kind] = scoring.choices_right(model, tokenizer, choices)
    if reference is not None:
        scoring.write_lines(reference, rows)

    names = [BASE, *KINDS]
    print("mean log-probability per token (held out), and the unigram model's on the training text")
    print(" ".join(f"{cell:>10}" for cell in ["", *names, "own gain", "unigram"]))
    for kind, cells in mean_logprobs(rows).items():
        values = [*(cells[name] for name in names), cells[kind] - cells[BASE], -unigram_entropy(streams[kind])]
        print(f"{kind:>10} " + " ".join(f"{value:10.3f}" for value in values))
    print("choices right: " + ", ".join(f"{name} {sum(right[name])}/{len(choices)}" for name in names))
    own = sum(right[row["metadata"]["kind"]][index] for index, row in enumerate(choices))
    print(f"choices right, each under its own kind's adapter: {own}/{len(choices)}")
    print(
        "least and most used expert per layer: "
        + ", ".join(
            f"{low:.1%}–{high:.1%}"
            for low, high in zip(shares.min(-1).values.tolist(), shares.max(-1).values.tolist(), strict=True)
        )
    )


def main() -> None:
    """Read the command line and run the recipe."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path(__file__).parent / "tiny-moe")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the number of steps, to try things out")
    parser.add_argument("--reference", type=Path, help="also write the reference scores, as moelora prefill would")
    parser.add_argument("--only", help="only train these adapters (comma-separated) on the stored base, and report")
    arguments = parser.parse_args()
    started = time.monotonic()
    prepare(SEED, arguments.threads)
    splits = read_texts()
    output: Path = arguments.output
    if arguments.only is None:
        shutil.rmtree(output / "adapters", ignore_errors=True)
        tokenizer = build_tokenizer(tokenizer_sample(splits))
    else:
        tokenizer = AutoTokenizer.from_pretrained(output)
    streams = {name: encode_stream(tokenizer, split.train) for name, split in splits.items()}
    if arguments.only is None:
        train_base(tokenizer, streams, max(1, round(BASE_STEPS * arguments.scale)), output)
        heldout = {kind: splits[kind].heldout for kind in KINDS}
        scoring.write_lines(output / "heldout.jsonl", scoring.heldout_rows(tokenizer, heldout, ROWS_PER_KIND))
        scoring.write_lines(output / "choices.jsonl", scoring.choice_rows(tokenizer, heldout, CHOICES_PER_KIND))
    for recipe in adapters.RECIPES:
        if arguments.only is None or recipe.kind in arguments.only.split(","):
            train_adapter(recipe, tokenizer, streams, output, max(1, round(recipe.steps * arguments.scale)))
    report(tokenizer, streams, output, arguments.reference)
    print(f"done in {(time.monotonic() - started) / 60:.1f} minutes")


if __name__ == "__main__":
    main()
