"""Every Triton kernel at one shape, for a memory checker:

    python tests/gpu/memcheck.py && compute-sanitizer --tool memcheck --error-exitcode 1 python tests/gpu/memcheck.py

The first run compiles, so that the checker watches kernels alone. Not a test: pytest does not collect it.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.graph_world import make_engine, mixed_requests, write_adapters, write_config
from moelora import GraphMode
from moelora_kernels.ops.causal_conv import causal_conv

SIZES = {
    "hidden_size": 256,
    "moe_intermediate_size": 128,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 1000,
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
}
TARGETS = (
    "q_proj", "k_proj", "v_proj", "o_proj", "gate", "gate_up_proj", "down_proj", "embed_tokens", "lm_head",
)  # fmt: skip


def main() -> None:
    with tempfile.TemporaryDirectory() as work:
        model = write_config(Path(work) / "model", "qwen3_moe", **SIZES)
        for ranks in ((16, 8, 3), (16, 40, 64)):
            adapters = write_adapters(Path(work) / f"adapters{ranks[-1]}", model, ranks, TARGETS)
            for backend in ("triton", "csgmv"):
                for invariant in (False, True):
                    engine = make_engine(
                        model, adapters, mode=GraphMode.OFF, backend=backend, batch_invariant=invariant, max_tokens=4096
                    )
                    # 2,600 tokens, with LoRA in the base products; a few dozen, with LoRA added; one.
                    for count, longest in ((26, 200), (5, 12), (1, 1)):
                        results = engine.score(mixed_requests(engine, count, longest))
                        assert all(result.error is None for result in results)
                    print(f"{backend}, ranks {ranks}, {'batch-invariant' if invariant else 'as fast as it goes'}: ran")
        x, weight = torch.randn(1001, 300, device="cuda"), torch.randn(300, 4, device="cuda")
        causal_conv(x, weight, None, torch.arange(1001, device="cuda") % 77, activation="silu")
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
