# %% [markdown]
# # Multiple choice
#
# Most benchmarks that are scored by log-likelihood ask: which of these continuations does the model find likeliest? A
# row with `choices` holds the question once. Behind it, the prompt runs once for each choice, all of them packed into
# the batches of the run; choices of one token share one run.
#
# `examples/tiny-moe/choices.jsonl` has twelve questions, three of each kind of text: which of four continuations is
# this passage's own?

# %%
import json
from pathlib import Path

Path("tutorial-output").mkdir(exist_ok=True)
question = json.loads(Path("examples/tiny-moe/choices.jsonl").read_text(encoding="utf-8").splitlines()[3])
print("context: …" + " ".join(question["prompt"][-120:].split()))
for number, choice in enumerate(question["choices"]):
    mark = "→" if number == question["metadata"]["answer"] else " "
    print(f"{mark} {number}: {' '.join(choice.split())}")

# %% [markdown]
# ## Every question under every adapter, in one run

# %% language="bash"
# moelora prefill examples/tiny-moe --adapters examples/tiny-moe/adapters --with-base \
#     --input examples/tiny-moe/choices.jsonl --output tutorial-output/answers.jsonl --overwrite

# %%
answers = [json.loads(line) for line in Path("tutorial-output/answers.jsonl").open(encoding="utf-8")]
print(json.dumps(answers[0]["choices"][0], indent=2, ensure_ascii=False))

# %% [markdown]
# ## Accuracy, three ways
#
# Longer choices have lower sums. Harnesses therefore report accuracy by the sum (`acc`), and by the sum per byte or per
# token (`acc_norm`). All three log-probabilities are in each choice.

# %%
from collections import defaultdict

RULES = {"sum": "logprob", "per token": "logprob_per_token", "per byte": "logprob_per_byte"}
adapters = list(dict.fromkeys(row["adapter"] for row in answers))


def chosen(row: dict, key: str) -> int:
    values = [choice[key] for choice in row["choices"]]
    return values.index(max(values))


right = defaultdict(int)
for row in answers:
    assert row["error"] is None
    for rule, key in RULES.items():
        right[row["adapter"], rule] += chosen(row, key) == row["metadata"]["answer"]

print(f"{'adapter':<10}" + "".join(f"{rule:>11}" for rule in RULES))
for adapter in adapters:
    print(f"{adapter:<10}" + "".join(f"{right[adapter, rule]:>8}/12" for rule in RULES))

# %% alt="Bars: questions answered rightly by base and adapters, by sum, per token and per byte"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=150, layout="constrained")
for number, rule in enumerate(RULES):
    places = [x + (number - 1) * 0.27 for x in range(len(adapters))]
    axes.bar(places, [right[adapter, rule] / 12 for adapter in adapters], width=0.25, label=rule)
axes.axhline(0.25, color="0.4", linestyle=":", linewidth=1, label="chance")
axes.set_xticks(range(len(adapters)), ["base" if a == "__base__" else a for a in adapters])
axes.set_ylabel("accuracy")
axes.set_ylim(0, 1)
axes.legend(frameon=False, ncols=4, loc="upper left")
plt.show()

# %% [markdown]
# ## Margins
#
# An accuracy over twelve questions moves in steps of 8 %. The **margin**, the right choice's log-probability per token
# minus that of the best wrong one, says how clear each decision was: right above zero, wrong below.


# %% alt="Dots: margin of each question under the base and under the adapter of its own kind"
def margin(row: dict) -> float:
    values = [choice["logprob_per_token"] for choice in row["choices"]]
    truth = values.pop(row["metadata"]["answer"])
    return truth - max(values)


margins = {(row["id"], row["adapter"]): margin(row) for row in answers}
kind_of = {row["id"]: row["metadata"]["kind"] for row in answers}
figure, axes = plt.subplots(figsize=(6.4, 3.4), dpi=150, layout="constrained")
for place, (identity, kind) in enumerate(kind_of.items()):
    base, own = margins[identity, "__base__"], margins[identity, kind]
    axes.plot([place, place], [base, own], color="0.8", zorder=0)
    axes.scatter(place, base, color="0.55", label="base" if place == 0 else None)
    axes.scatter(place, own, color="tab:green", label="its own adapter" if place == 0 else None)
axes.axhline(0, color="0.5", linewidth=0.8)
axes.set_xticks(range(len(kind_of)), kind_of.values(), rotation=60, fontsize=8)
axes.set_ylabel("margin (nats per token)")
axes.legend(frameon=False)
plt.show()

# %%
better = sum(margins[i, kind] > margins[i, "__base__"] for i, kind in kind_of.items())
print(f"the own adapter widens the margin in {better} of {len(kind_of)} questions")
assert better > len(kind_of) / 2

# %% [markdown]
# ## How text becomes context and choice
#
# White space at the end of a context moves to its choices, context and choice are encoded together, and the cut lies
# where the context's own encoding ends: [From text to tokens](../files.md#from-text-to-tokens). `--dry-run` shows the
# token ids that would be scored, and loads no weights:

# %% language="bash"
# moelora prefill examples/tiny-moe --input examples/tiny-moe/choices.jsonl --dry-run | head -n 1 | cut -c 1-200

# %% [markdown]
# Next: [bring your own adapter](4-your-own-adapter.md).
