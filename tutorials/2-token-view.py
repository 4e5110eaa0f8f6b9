# %% [markdown]
# # Token by token
#
# A mean says *that* an adapter knows a text better, not *where*. With `--logprobs tokens` every output row has
# `token_ids` and `token_logprobs`, one entry per token. The difference between an adapter and the base, token by token,
# shows what the adapter has learned.
#
# ## Four texts, each under the base and its own adapter
#
# A row's `adapter` may be a list. `__base__` is the base model.

# %%
import json
from pathlib import Path

texts = {
    "python": "def test_close(self):\n    with self.assertRaises(ValueError):\n        self.stream.read()",
    "scripture": "He said to them, “Go your way, and tell the king of Israel what the Lord has done for you this day.”",
    "spanish": "Y dijo Jehová á Moisés: Habla á los hijos de Israel, y diles: Yo soy Jehová vuestro Dios.",
    "glossary": "ladder (noun): two parallel members connected by rungs; used for climbing up or down",
}
Path("tutorial-output").mkdir(exist_ok=True)
with open("tutorial-output/rows.jsonl", "w", encoding="utf-8") as file:
    for kind, text in texts.items():
        file.write(json.dumps({"id": kind, "prompt": text, "adapter": ["__base__", kind]}) + "\n")

# %% language="bash"
# moelora prefill examples/tiny-moe --adapters examples/tiny-moe/adapters \
#     --input tutorial-output/rows.jsonl --output tutorial-output/scores.jsonl --overwrite --logprobs tokens

# %% [markdown]
# ## Colour each token by what the adapter changes
#
# Green: the adapter finds the token likelier than the base does; red: less likely. Full colour is a factor of
# *e*³ ≈ 20 in probability. The first token has no log-probability, and stays without colour.

# %%
from html import escape

from IPython.display import HTML
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("examples/tiny-moe/tokenizer.json")
scores = {
    (r["id"], r["adapter"]): r for r in map(json.loads, Path("tutorial-output/scores.jsonl").open(encoding="utf-8"))
}


def pieces(token_ids: list[int]) -> list[str]:
    """The text of each token; a character that spans tokens stands with the last of them."""
    ends = [tokenizer.decode(token_ids[: n + 1], skip_special_tokens=True) for n in range(len(token_ids))]
    ends = [text.rstrip("\ufffd") for text in ends]
    return [text[len(before) :] for before, text in zip(["", *ends], ends, strict=False)]


def coloured(kind: str) -> str:
    base, tuned = scores[kind, "__base__"], scores[kind, kind]
    assert base["token_ids"] == tuned["token_ids"]
    spans = []
    for piece, before, after in zip(
        pieces(tuned["token_ids"]), base["token_logprobs"], tuned["token_logprobs"], strict=True
    ):
        gain = 0.0 if before is None else after - before
        colour = "46, 160, 67" if gain > 0 else "218, 54, 51"
        style = f"background: rgba({colour}, {min(abs(gain) / 3, 1) * 0.75:.2f}); border-radius: 3px"
        title = "first token" if before is None else f"base {before:.2f}, adapter {after:.2f} nats"
        spans.append(f'<span style="{style}" title="{title}">{escape(piece)}</span>')
    gain = tuned["logprob_sum"] - base["logprob_sum"]
    text = "".join(spans).replace("\n", "&#10;")
    return f'<p><strong>{kind}</strong>, {gain:+.1f} nats in all</p><p style="white-space: pre-wrap">{text}</p>'


HTML('<div class="tokens">' + "".join(coloured(kind) for kind in texts) + "</div>")

# %% [markdown]
# ## Where the gain sits
#
# Sorted by size, a few tokens carry most of the gain: names, fixed phrases, the layout of an entry.

# %% alt="Cumulative gain over the base by share of tokens, one line per kind of text"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.4, 3.4), dpi=150, layout="constrained")
for kind in texts:
    pairs = zip(scores[kind, "__base__"]["token_logprobs"], scores[kind, kind]["token_logprobs"], strict=True)
    gains = sorted((after - before for before, after in pairs if before is not None), reverse=True)
    running = [sum(gains[: n + 1]) for n in range(len(gains))]
    axes.plot([100 * (n + 1) / len(gains) for n in range(len(gains))], running, label=kind)
axes.axhline(0, color="0.7", linewidth=0.8)
axes.set_xlabel("tokens, largest gain first (%)")
axes.set_ylabel("gain over the base (nats)")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# `logprob_sum` is the sum of `token_logprobs`; nothing else is in it:

# %%
for (kind, adapter), row in scores.items():
    assert abs(row["logprob_sum"] - sum(x for x in row["token_logprobs"] if x is not None)) < 1e-3
    print(f"{kind:<10} {adapter:<10} {row['logprob_sum']:>9.2f} nats over {row['num_tokens'] - 1} tokens")

# %% [markdown]
# Next: [multiple choice](3-multiple-choice.md).
