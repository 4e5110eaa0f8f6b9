# %% [markdown]
# # Write a backend
#
# A backend computes what LoRA adds: `B A x` for rows of different adapters in one batch, on linear layers, embeddings
# and routed experts. You would write one for a device that has no kernels here, or to try out an idea. This one is
# complete and small: it **gathers** each row's own factors, and multiplies all rows at once.
#
# ## What the engine asks of it
#
# | call | when | what |
# |---|---|---|
# | `init_graph_metadata`, `init_moe_buffers` | once per phase | allocate what captured graphs will read |
# | `prepare_batch` | before each forward | which row belongs to which slot |
# | `linear`, `embedding` | in the forward | add `B A x` to an output, in place |
# | `experts` | in the forward | the routed experts, LoRA included |
#
# Slots are adapters that lie on the device: 0 … L − 1, and −1 is the base. The tensors of
# [the contract](../api.md#backends) carry their shape in their name: T tokens, L slots, R rank, E experts, K experts
# per token, P = T · K pairs.

# %%
import torch

from moelora.backends.base import Backend, Capabilities, ExpertsWeights, LoraMetadata
from moelora.types import Phase


class GatherBackend(Backend):
    """Gathers the factors of every row: no sorting, no loops over slots, and a lot of memory."""

    capabilities = Capabilities(name="gather", device_types=frozenset({"cpu", "cuda"}), graph_modes=frozenset())

    def init_graph_metadata(self, phase, capacity, device):
        pass  # graph_modes is empty: no graph will ever read anything of ours

    def init_moe_buffers(self, phase, capacity, device, dtype, shapes):
        pass

    def prepare_batch(self, batch, *, phase, bucket=None):
        return LoraMetadata(phase=phase, token_slot_T=batch.token_slot_T, has_lora=any(s >= 0 for s in batch.slots))

    def rows_metadata(self, row_slot_N, *, has_lora):
        return LoraMetadata(phase=Phase.PREFILL, token_slot_T=row_slot_N, has_lora=has_lora)

    def linear(self, x_TI, out_TO, slots, meta):
        rows, slot_N = adapted(meta.token_slot_T)
        x_NR = torch.einsum("ni,nri->nr", x_TI[rows].float(), slots.a_LRI[slot_N].float())
        add_rows(out_TO, rows, torch.einsum("nr,nor->no", x_NR, slots.b_LOR[slot_N].float()))

    def embedding(self, ids_T, out_TH, slots, meta):
        rows, slot_N = adapted(meta.token_slot_T)
        x_NR = slots.a_LRI[slot_N, :, ids_T[rows]].float()
        add_rows(out_TH, rows, torch.einsum("nr,nhr->nh", x_NR, slots.b_LOR[slot_N].float()))

    def experts(self, x_TH, expert_ids_TK, weights_TK, base, up_slots, down_slots, meta):
        T, K = expert_ids_TK.shape
        expert_P = expert_ids_TK.reshape(-1).long()
        slot_P = meta.token_slot_T.repeat_interleave(K).long()
        real_P = (expert_P >= 0) & (expert_P < base.num_experts)  # padding rows have no expert
        pairs = real_P.nonzero()[:, 0]
        expert_N, slot_N, x_NH = expert_P[pairs], slot_P[pairs], x_TH.repeat_interleave(K, 0)[pairs]
        up_N = expert_product(x_NH, expert_N, slot_N, base.up, base.up_bias, base.transposed, up_slots)
        down_NH = expert_product(
            base.activation(up_N), expert_N, slot_N, base.down, base.down_bias, base.transposed, down_slots
        )
        if base.post_norm is not None:
            down_NH = base.post_norm(down_NH)
        out_PH = torch.zeros(T * K, x_TH.shape[1], dtype=torch.float32, device=x_TH.device)
        out_PH[pairs] = down_NH.float() * weights_TK.reshape(-1)[pairs].float()[:, None]
        return out_PH.view(T, K, -1).sum(1).to(x_TH.dtype)  # the sum over a token's experts, in fp32


def adapted(slot_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows that have an adapter, and its slot. Base rows are left alone."""
    rows = (slot_T >= 0).nonzero()[:, 0]
    return rows, slot_T[rows].long()


def add_rows(out_TO: torch.Tensor, rows: torch.Tensor, delta_NO: torch.Tensor) -> None:
    """out += delta on some rows, summed in fp32 and rounded once."""
    out_TO[rows] = (out_TO[rows].float() + delta_NO).to(out_TO.dtype)


def expert_product(x_NI, expert_N, slot_N, weight, bias, transposed, slots) -> torch.Tensor:
    """W x + b + B A x, every pair with its own expert's weight and its own slot's factors: `[N, out]`."""
    out_NO = torch.einsum("ni,nio->no" if transposed else "ni,noi->no", x_NI, weight[expert_N])
    if bias is not None:
        out_NO = out_NO + bias[expert_N]
    if slots is not None:
        rows, slot_M = adapted(slot_N)
        a_MRI = slots.a_LERI[slot_M, expert_N[rows] % slots.a_LERI.shape[1]]  # a dimension of 1 is shared by all
        b_MOR = slots.b_LEOR[slot_M, expert_N[rows] % slots.b_LEOR.shape[1]]
        x_MR = torch.einsum("ni,nri->nr", x_NI[rows].float(), a_MRI.float())
        add_rows(out_NO, rows, torch.einsum("nr,nor->no", x_MR, b_MOR.float()))
    return out_NO


# %% [markdown]
# Ranks need no care: the bank fills a slot beyond its own rank with zeros, and a slot whose adapter leaves this layer
# alone is all zeros.
#
# ## Run it
#
# `backend` takes `MODULE:CLASS`, here the class of this very notebook. The reference backend, `torch`, is what every
# backend is held against: a mixed batch of the base and four adapters, which between them adapt every kind of module.

# %%
import json
from pathlib import Path

from tokenizers import Tokenizer

from moelora import EngineOptions, PrefillEngine, Request

tokenizer = Tokenizer.from_file("examples/tiny-moe/tokenizer.json")
texts = [json.loads(line)["prompt"] for line in Path("examples/tiny-moe/heldout.jsonl").open(encoding="utf-8")]
names = ["python", "scripture", "spanish", "glossary"]
requests = [
    Request(token_ids=tokenizer.encode(text).ids[:48], adapter=name)
    for text in texts[::24]
    for name in ["__base__", *names]
]


def scores(backend: str) -> torch.Tensor:
    engine = PrefillEngine(
        "examples/tiny-moe",
        adapters={name: f"examples/tiny-moe/adapters/{name}" for name in names},
        options=EngineOptions(backend=backend, device="cpu", dtype="float32", max_tokens=512),
    )
    results = engine.score(requests)
    print(engine.report()["backend"], "scored", sum(r.num_tokens for r in results), "tokens")
    return torch.tensor([x for r in results for x in r.token_logprobs if x is not None])


reference, ours = scores("torch"), scores("__main__:GatherBackend")
worst = (reference - ours).abs().max().item()
print(f"largest difference of {len(ours)} log-probabilities: {worst:.1e} nats")
assert worst < 1e-4

# %% [markdown]
# ## Would we notice a mistake?
#
# Leave the experts' LoRA out, and the adapters that live there change by whole nats:


# %%
class ForgetfulBackend(GatherBackend):
    """Drops the factors of experts."""

    def experts(self, x_TH, expert_ids_TK, weights_TK, base: ExpertsWeights, up_slots, down_slots, meta):
        return super().experts(x_TH, expert_ids_TK, weights_TK, base, None, None, meta)


mistaken = (reference - scores("__main__:ForgetfulBackend")).abs().max().item()
print(f"largest difference: {mistaken:.1f} nats")
assert mistaken > 1

# %% [markdown]
# ## Ship it
#
# In a package of your own, an entry point gives it a short name; `moelora env` then lists it, and
# `--backend gather` selects it:
#
# ```toml
# [project.entry-points."moelora.backends"]
# gather = "my_package.backends:GatherBackend"
# ```
#
# Without one, `--backend my_package.backends:GatherBackend` works as it stands. For a backend that captures graphs,
# name the modes in `graph_modes` and keep the rules on static buffers of
# [the contract](../api.md#backends); `tests/kernels/test_dense_backends.py` is a suite to start from.
