"""Batches and the training loop, for the base model and for adapters alike."""

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast

from tiny_moe_recipe.model import TOP_K

BATCH_TOKENS = 2048
_BALANCE = 0.05
_LENGTHS = (128, 256, 256, 512)
"""Sequence lengths taken in turn: short ones for fresh starts, long ones for the far positions."""


def encode_stream(tokenizer: PreTrainedTokenizerFast, documents: list[str]) -> Tensor:
    """All documents as one stream of token ids, each document ended by EOS. int64, shape (tokens,)."""
    encoded = tokenizer(documents, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in (*ids, tokenizer.eos_token_id)])


class Batches:
    """Random windows over the streams of several sources, drawn by weight, each begun with BOS."""

    def __init__(self, streams: Mapping[str, Tensor], weights: Mapping[str, float], bos: int, seed: int) -> None:
        self._streams = [streams[name] for name in weights]
        self._weights = torch.tensor(list(weights.values()))
        self._bos = bos
        self._random = torch.Generator().manual_seed(seed)
        self._drawn = 0

    def draw(self) -> Tensor:
        """The next batch, shape (windows, length), with BATCH_TOKENS tokens in all."""
        length = _LENGTHS[self._drawn % len(_LENGTHS)]
        self._drawn += 1
        count = BATCH_TOKENS // length
        picked = torch.multinomial(self._weights, count, replacement=True, generator=self._random)
        windows = torch.empty(count, length, dtype=torch.long)
        windows[:, 0] = self._bos
        for row, source in enumerate(picked.tolist()):
            stream = self._streams[source]
            start = int(torch.randint(len(stream) - length, (1,), generator=self._random))
            windows[row, 1:] = stream[start : start + length - 1]
        return windows


def imbalance(router_logits: Sequence[Tensor]) -> Tensor:
    """Load-balancing loss after Switch Transformers (Fedus et al., 2021), meaned over the layers; 1 if all is even.

    transformers computes it over all layers at once, which an expert idle in one layer and busy in another satisfies.
    """
    losses: list[Tensor] = []
    for logits_TE in router_logits:
        probabilities_TE = logits_TE.float().softmax(-1)
        experts = probabilities_TE.shape[-1]
        chosen = probabilities_TE.topk(TOP_K, dim=-1).indices.flatten()
        share_E = torch.bincount(chosen, minlength=experts) / len(chosen)
        losses.append(experts * (share_E * probabilities_TE.mean(0)).sum())
    return torch.stack(losses).mean()


def train(model: nn.Module, batches: Batches, *, steps: int, peak_rate: float, balance: bool, label: str) -> None:
    """Train the parameters that require gradients with AdamW: linear warm-up, then a cosine down to a tenth.

    `balance` adds `imbalance`, so that every expert of the base gets its share.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    # Norms, and nothing else here, have one dimension; decaying them would pull every layer towards zero.
    groups = [
        {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.05},
        {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=peak_rate, betas=(0.9, 0.98))
    warmup = max(1, steps // 20)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    started = time.monotonic()
    recent: list[float] = []
    for step in range(1, steps + 1):
        windows = batches.draw()
        output = model(input_ids=windows, labels=windows, output_router_logits=balance, use_cache=False)
        loss = output.loss + _BALANCE * imbalance(output.router_logits) if balance else output.loss
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        recent.append(output.loss.item())
        if step % 100 == 0 or step == steps:
            mean = sum(recent) / len(recent)
            print(f"  {label}: step {step}/{steps}, loss {mean:.3f}, {time.monotonic() - started:.0f} s", flush=True)
            recent.clear()
    model.eval()
