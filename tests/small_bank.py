"""A catalogue of two small targets, and adapters on them, for tests of the bank and of what feeds it."""

from pathlib import Path

import torch

from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind

LINEAR = Target(name="q", kind=TargetKind.LINEAR, in_features=3, out_features=4, shape=(4, 3))
EXPERTS = Target(name="e", kind=TargetKind.EXPERTS, in_features=3, out_features=5, shape=(2, 5, 3), num_experts=2)
CATALOGUE = Catalogue(model_type="x", targets={"q": LINEAR, "e": EXPERTS}, num_layers=1, tied_lm_head=False)


def make_adapter(name: str, seed: int) -> Adapter:
    """Some touch one target, some both, in ranks of their own."""
    rng = torch.Generator().manual_seed(seed)
    rank = 1 + seed % 3
    factors = {}
    if seed % 4 != 1:
        factors["q"] = Factors(a=torch.randn(rank, 3, generator=rng), b=torch.randn(4, rank, generator=rng))
    if seed % 4 != 2:
        factors["e"] = Factors(a=torch.randn(2, rank, 3, generator=rng), b=torch.randn(2, 5, rank, generator=rng))
    return Adapter(name=name, path=Path(name), factors=factors)
