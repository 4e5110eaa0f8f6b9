# %% [markdown]
# # Four adapters, one matrix
#
# You have a base model, a folder of adapters and a file of texts, and you want to know how well each adapter predicts
# each kind of text. Here the base is `examples/tiny-moe`, a Mixture-of-Experts model of 3 million parameters; the
# adapters were trained on Python code, the Bible in English, the Bible in Spanish, and dictionary entries.
#
# ## The rows
#
# A row is a JSON object. Whatever stands under `metadata` comes back with the scores: here, which kind of text it is.

# %%
import json
from pathlib import Path

Path("tutorial-output").mkdir(exist_ok=True)
rows = [json.loads(line) for line in Path("examples/tiny-moe/heldout.jsonl").open(encoding="utf-8")]
print(len(rows), "rows; the first:")
print(json.dumps(rows[0], indent=2, ensure_ascii=False)[:330], "…")

# %% [markdown]
# ## Score them
#
# No row names an adapter, so that each is scored under all of them; `--with-base` adds the base model. It is one pass
# over one copy of the weights: rows of different adapters share a batch.

# %% language="bash"
# moelora prefill examples/tiny-moe \
#     --adapters examples/tiny-moe/adapters --with-base \
#     --input examples/tiny-moe/heldout.jsonl --output tutorial-output/scores.jsonl \
#     --overwrite --report tutorial-output/report.html

# %% [markdown]
# [`report.html`](1-adapter-matrix/report.html) is a page about the run: throughput over time, batches, padding, and the
# distribution of every adapter's scores. The scores themselves: 96 rows under the base and four adapters are 480 output
# rows, in the order of the input.

# %%
scores = [json.loads(line) for line in Path("tutorial-output/scores.jsonl").open(encoding="utf-8")]
for row in scores[:5]:
    print(f"{row['id']:<10} {row['adapter']:<10} {row['num_tokens']:>4} tokens {row['logprob_sum']:>9.2f} nats")
assert not any(row["error"] for row in scores)

# %% [markdown]
# ## The matrix
#
# `logprob_sum` is the sum over a text's tokens. The first token has no log-probability (nothing stands before it), so
# that a text of *n* tokens has *n* − 1. Texts differ in length: add up before you divide.

# %%
from collections import defaultdict

total, count = defaultdict(float), defaultdict(int)
for row in scores:
    cell = row["metadata"]["kind"], row["adapter"]
    total[cell] += row["logprob_sum"]
    count[cell] += row["num_tokens"] - 1
kinds = sorted({kind for kind, _ in total})
adapters = ["__base__", *kinds]
matrix = [[total[kind, adapter] / count[kind, adapter] for adapter in adapters] for kind in kinds]

# %% alt="Heat map of mean log-probability per token, four kinds of text by base and four adapters"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.4, 3.6), dpi=150, layout="constrained")
image = axes.imshow(matrix, cmap="viridis")
axes.set_xticks(range(len(adapters)), ["base", *kinds], rotation=20)
axes.set_yticks(range(len(kinds)), kinds)
axes.set_xlabel("scored under")
axes.set_ylabel("text")
for y, line in enumerate(matrix):
    for x, value in enumerate(line):
        best = value == max(line)
        axes.text(
            x,
            y,
            f"{value:.2f}",
            ha="center",
            va="center",
            color="black" if value > -5.6 else "white",
            fontweight="bold" if best else "normal",
        )
figure.colorbar(image, label="nats per token, higher is better")
plt.show()

# %% [markdown]
# Every kind of text is predicted best by its own adapter (bold), and worse than under the base by the others. The
# same numbers as an assertion, so that this page cannot be wrong:

# %%
for kind, line in zip(kinds, matrix, strict=True):
    means = dict(zip(adapters, line, strict=True))
    base, own = means.pop("__base__"), means.pop(kind)
    others = max(means.values())
    assert own > base > others, (kind, line)
    print(f"{kind:<10} own adapter {own - base:+.2f}, best of the others {others - base:+.2f} nats over the base")

# %% [markdown]
# Next: [the same scores token by token](2-token-view.md).
