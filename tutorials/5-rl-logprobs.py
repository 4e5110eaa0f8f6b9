# %% [markdown]
# # Policy and reference log-probabilities for RL
#
# Policy-gradient methods with LoRA (PPO, GRPO, DPO and their kin) need log-probabilities of the same completions under
# two models that share a base: the **policy**, an adapter, and the **reference**, the base or an earlier adapter. Here
# both come out of one engine and one call, as tensors.
#
# ## Prompts and completions
#
# In training the completions are sampled from the policy. Here they are passages of a held-out text, cut in two.

# %%
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer

tokenizer = Tokenizer.from_file("examples/tiny-moe/tokenizer.json")
rows = [json.loads(line) for line in Path("examples/tiny-moe/heldout.jsonl").open(encoding="utf-8")]
texts = [row["prompt"] for row in rows if row["metadata"]["kind"] == "spanish"][:16]
sequences = [tokenizer.encode(text).ids for text in texts]
prompt_lengths = [len(ids) // 3 for ids in sequences]
tokens = sum(map(len, sequences))
print(f"{len(sequences)} sequences, {tokens:,} tokens, of which {tokens - sum(prompt_lengths):,} belong to completions")

# %% [markdown]
# ## One engine, both models
#
# `score_from` is the first position whose log-probability is wanted: the prompt is read, and only the completion's rows
# go through the vocabulary, which is where most of the memory would go.

# %%
from moelora import BASE_ADAPTER, EngineOptions, PrefillEngine, Request

engine = PrefillEngine(
    "examples/tiny-moe",
    adapters={"policy": "examples/tiny-moe/adapters/spanish"},
    options=EngineOptions(device="cpu", max_tokens=4096),
)
requests = [
    Request(token_ids=ids, adapter=adapter, score_from=start)
    for ids, start in zip(sequences, prompt_lengths, strict=True)
    for adapter in ("policy", BASE_ADAPTER)
]
results = engine.score(requests)
print(f"{len(results)} results in {sum(p['count'] for p in engine.report()['passes'])} batches")

# %% [markdown]
# ## As tensors
#
# Completions differ in length: pad to `[B, C]` with a mask. float32 throughout; log-probabilities in nats.


# %%
def padded(results: list) -> torch.Tensor:
    """Log-probabilities of the completions: float32 `[B, C]`, 0 behind the end of each."""
    return torch.nn.utils.rnn.pad_sequence([torch.tensor(r.token_logprobs) for r in results], batch_first=True)


policy_BC, reference_BC = padded(results[0::2]), padded(results[1::2])
lengths_B = torch.tensor([len(r.token_logprobs) for r in results[0::2]])
mask_BC = torch.arange(policy_BC.shape[1]) < lengths_B[:, None]
print("policy", tuple(policy_BC.shape), policy_BC.dtype, "and mask", tuple(mask_BC.shape))

# %% [markdown]
# ## What training makes of them
#
# The KL divergence from the reference, with the estimator that is never negative and has a low variance,
# *r* − 1 − log *r* with *r* = p_ref / p_policy ([Schulman, 2020](http://joschu.net/blog/kl-approx.html)); and
# advantages within the group as GRPO takes them ([Shao et al., 2024](https://arxiv.org/abs/2402.03300)). The reward is
# a stand-in: how often the completion says "que".

# %%
log_ratio_BC = (reference_BC - policy_BC).masked_fill(~mask_BC, 0.0)
kl_BC = log_ratio_BC.exp() - 1 - log_ratio_BC
kl = kl_BC.sum() / mask_BC.sum()

completions = [tokenizer.decode(ids[start:]) for ids, start in zip(sequences, prompt_lengths, strict=True)]
reward_B = torch.tensor([float(text.split().count("que")) for text in completions])
advantage_B = (reward_B - reward_B.mean()) / (reward_B.std() + 1e-6)
print(f"KL from the reference {kl:.3f} nats per token; advantages {advantage_B.min():.2f} to {advantage_B.max():.2f}")
assert (kl_BC >= 0).all()

# %% alt="Histogram of the per-token difference between policy and reference"
import matplotlib.pyplot as plt

figure, axes = plt.subplots(figsize=(6.4, 3), dpi=150, layout="constrained")
axes.hist(-log_ratio_BC[mask_BC].numpy(), bins=60)
axes.axvline(0, color="0.5", linewidth=0.8)
axes.set_xlabel("log p(policy) − log p(reference), nats per token")
axes.set_ylabel("tokens")
plt.show()

# %% [markdown]
# ## The same numbers from transformers and PEFT
#
# One sequence at a time, with the logits of the whole vocabulary: slower, and the same to rounding.

# %%
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained("examples/tiny-moe", dtype=torch.float32)
model = PeftModel.from_pretrained(base, "examples/tiny-moe/adapters/spanish").eval()


def expected(ids: list[int], start: int) -> torch.Tensor:
    """Log-probabilities of the tokens from `start` on under the model as it stands: float32 `[C]`."""
    with torch.inference_mode():
        logits_TV = model(input_ids=torch.tensor([ids])).logits[0].float()
    logprobs_T = logits_TV[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    return logprobs_T[start - 1 :]


def largest_difference(results: list) -> float:
    """Of any log-probability of the first four sequences, in nats."""
    pairs = zip(results[:4], sequences, prompt_lengths, strict=False)
    return max(
        (torch.tensor(result.token_logprobs) - expected(ids, start)).abs().max().item() for result, ids, start in pairs
    )


worst = {"policy": largest_difference(results[0::2])}
with model.disable_adapter():
    worst["reference"] = largest_difference(results[1::2])
print(", ".join(f"{name}: off by {nats:.1e} nats at most" for name, nats in worst.items()))
assert max(worst.values()) < 1e-4

# %% [markdown]
# The log-probabilities of a trainer and of another engine differ by rounding, in bfloat16 by far more than here, and so
# do importance ratios. Take policy and reference from the *same* engine, in the same dtype: a policy that equals its
# reference then has a ratio of 1 to rounding, and of exactly 1 with `batch_invariant=True` (on CUDA). Next:
# [write a backend](6-backend.md).
