# %% [markdown]
# # Bring your own adapter
#
# From a text of your own to its scores: train an adapter with PEFT, look at it with `moelora inspect`, hold it against
# transformers and PEFT with `moelora verify`, and score with `moelora prefill`. With your model and your adapter, begin
# at [Inspect](#inspect).
#
# ## A text of your own
#
# The log of a build service, made up here: regular, and unlike anything that the base has seen.

# %%
import random

random.seed(7)


def log_line() -> str:
    stage = random.choice(["fetch", "compile", "link", "test", "upload"])
    worker, job, seconds = random.randint(1, 8), random.randint(100, 999), random.randint(1, 90)
    if random.random() < 0.2:
        return f"[worker {worker}] ERROR job {job}: {stage} failed after {seconds} s, will try again"
    return f"[worker {worker}] INFO job {job}: {stage} finished in {seconds} s"


training = ["\n".join(log_line() for _ in range(6)) for _ in range(160)]
heldout = ["\n".join(log_line() for _ in range(6)) for _ in range(12)]
print(heldout[0])

# %% [markdown]
# ## Train with PEFT
#
# LoRA on the attention projections and on the routed experts. In transformers 5 the experts of a layer are two stacked
# parameters, which PEFT adapts through `target_parameters`.

# %%
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

torch.manual_seed(0)
tokenizer = AutoTokenizer.from_pretrained("examples/tiny-moe")
base = AutoModelForCausalLM.from_pretrained("examples/tiny-moe", dtype=torch.float32)
model = get_peft_model(
    base,
    LoraConfig(
        r=8,
        lora_alpha=16,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        task_type="CAUSAL_LM",
    ),
)
model.print_trainable_parameters()

# %%
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=5e-3)
losses = []
for _ in range(45):
    batch = tokenizer(random.sample(training, 6), return_tensors="pt", padding=True)
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    loss = model(**batch, labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
model.save_pretrained("tutorial-output/adapters/buildlog")
print(f"loss {losses[0]:.2f} → {losses[-1]:.2f} nats per token in {len(losses)} steps")

# %% alt="Training loss by step"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.4, 2.6), dpi=150, layout="constrained")
axes.plot(losses)
axes.set_xlabel("step")
axes.set_ylabel("loss (nats per token)")
plt.show()

# %% [markdown]
# ## Inspect
#
# What does the folder hold, and does every tensor of it have a place in the base? No weights of the base are read for
# that. An adapter that does not load is refused with the reason, and the exit code is 2.

# %% language="bash"
# moelora inspect tutorial-output/adapters/buildlog --model examples/tiny-moe

# %% [markdown]
# ## Verify
#
# Rows for both: held-out log lines, and some texts of another kind to see what the adapter costs there. `verify` scores
# a sample once as `prefill` does and once with transformers and PEFT, and fails if they differ.

# %%
import json
from pathlib import Path

rows = [{"id": f"log-{n}", "prompt": text, "metadata": {"kind": "buildlog"}} for n, text in enumerate(heldout)]
others = [json.loads(line) for line in Path("examples/tiny-moe/heldout.jsonl").open(encoding="utf-8")]
rows += others[::8]
with open("tutorial-output/rows.jsonl", "w", encoding="utf-8") as file:
    file.writelines(json.dumps(row) + "\n" for row in rows)
print(len(rows), "rows")

# %% language="bash"
# moelora verify examples/tiny-moe --adapters tutorial-output/adapters \
#     --input tutorial-output/rows.jsonl --sample 4 --quiet

# %% [markdown]
# ## Prefill
#
# `--adapters` takes a folder of adapters, `NAME=PATH`, or a list as a `.jsonl` file, and may be given again. Here: the
# new one beside the four that come with the model.

# %% language="bash"
# moelora prefill examples/tiny-moe --with-base \
#     --adapters tutorial-output/adapters --adapters examples/tiny-moe/adapters \
#     --input tutorial-output/rows.jsonl --output tutorial-output/scores.jsonl --overwrite

# %% alt="Bars: mean log-probability per token of the build log and of the other texts, by adapter"
scores = [json.loads(line) for line in Path("tutorial-output/scores.jsonl").open(encoding="utf-8")]
assert not any(row["error"] for row in scores)


def mean(adapter: str, own: bool) -> float:
    mine = [r for r in scores if r["adapter"] == adapter and (r["metadata"]["kind"] == "buildlog") == own]
    return sum(r["logprob_sum"] for r in mine) / sum(r["num_tokens"] - 1 for r in mine)


adapters = list(dict.fromkeys(row["adapter"] for row in scores))
figure, axes = plt.subplots(figsize=(6.4, 3.2), dpi=150, layout="constrained")
for number, (own, label) in enumerate([(True, "build log"), (False, "other texts")]):
    places = [x + (number - 0.5) * 0.4 for x in range(len(adapters))]
    axes.bar(places, [mean(a, own) for a in adapters], 0.38, label=label)
axes.set_xticks(range(len(adapters)), ["base" if a == "__base__" else a for a in adapters], rotation=20)
axes.set_ylabel("nats per token")
figure.legend(frameon=False, loc="outside upper center", ncols=2)
plt.show()

# %%
print(f"build log:   base {mean('__base__', True):.2f}, own adapter {mean('buildlog', True):.2f} nats per token")
print(f"other texts: base {mean('__base__', False):.2f}, own adapter {mean('buildlog', False):.2f} nats per token")
assert mean("buildlog", True) > mean("__base__", True) + 1

# %% [markdown]
# What loads, what is refused and why: [Adapter formats](../adapters.md). Next:
# [policy and reference log-probabilities](5-rl-logprobs.md).
