"""More adapters than slots on a GPU: copies beside compute change no bit, whichever way the adapters come."""

import random
from pathlib import Path

import pytest
import torch

from gpu.graph_world import QWEN3_30B_A3B, make_engine, mixed_requests, write_adapters, write_config
from moelora import GraphMode
from moelora.adapters.bank import AdapterBank, BankLayout
from moelora.adapters.base import Adapter, Catalogue, Factors, Target, TargetKind

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

# Wide enough that copying an adapter takes as long as some of these batches.
SIZES = {"hidden_size": 1024, "num_experts": 64, "vocab_size": 8192, "num_hidden_layers": 4}
COUNT = 12


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    model = write_config(folder / "model", "qwen3_moe", **{**QWEN3_30B_A3B, **SIZES})
    return model, write_adapters(folder / "adapters", model, tuple((4, 16, 32, 64)[i % 4] for i in range(COUNT)))


@pytest.fixture(scope="module")
def rows(world):
    engine = make_engine(*world, mode=GraphMode.OFF, batch_invariant=True, slots=COUNT)
    requests = mixed_requests(engine, 600, 90)
    random.Random(0).shuffle(requests)
    return requests, values(engine.score(requests))


def values(results):
    assert all(r.error is None for r in results)
    return [(r.token_logprobs, r.next_token) for r in results]


@pytest.mark.parametrize("host_bytes", [None, 0], ids=["pinned", "read again"])
@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("max_tokens", [128, 2048])
@pytest.mark.parametrize("mode", [GraphMode.OFF, GraphMode.FULL])
def test_slots_taken_in_turns_give_the_bits_of_a_slot_for_each(world, rows, mode, max_tokens, slots, host_bytes):
    """Twice over: the second pass begins with slots that the first has filled."""
    requests, expected = rows
    buckets = {} if mode is GraphMode.OFF else {"buckets": (64, 128)}
    engine = make_engine(
        *world, mode=mode, batch_invariant=True, slots=slots, max_tokens=max_tokens, host_bytes=host_bytes, **buckets
    )
    for passes in (1, 2):
        assert values(engine.score(requests)) == expected
        assert COUNT * passes - slots <= engine.report()["adapter_loads"] <= COUNT * passes
    some = [i for i, r in enumerate(requests) if r.adapter in ("a1", "a7")]
    assert values(engine.score([requests[i] for i in some])) == [expected[i] for i in some]


def test_kept_adapters_are_page_locked(world):
    engine = make_engine(*world, mode=GraphMode.OFF, slots=2, max_tokens=256)
    adapters = engine._adapters
    tensors = [t for name in adapters for f in adapters.take(name).factors.values() for t in (f.a, f.b)]
    assert all(t.is_pinned() for t in tensors)


@pytest.mark.parametrize("room", [16, 32], ids=["whole slots", "part of them"])
def test_what_lies_in_ordinary_memory_comes_whole_into_its_slot(room):
    """Factors from a hundredth of a page-locked buffer to many of them, over the slot's former tenant."""
    device = torch.device("cuda")
    targets = {
        "experts": Target(
            name="experts", kind=TargetKind.EXPERTS, in_features=2048, out_features=1536, shape=(64, 1536, 2048),
            num_experts=64,
        ),
        "q": Target(name="q", kind=TargetKind.LINEAR, in_features=2048, out_features=4096, shape=(4096, 2048)),
    }  # fmt: skip
    catalogue = Catalogue(model_type="x", targets=targets, num_layers=1, tied_lm_head=False)
    layout = BankLayout(ranks={"experts": room, "q": room})
    bank = AdapterBank(catalogue, layout, slots=2, device=device, dtype=torch.bfloat16)
    for turn in range(12):
        experts = random.choice([1, 64]) if turn else 64
        factors = {
            "experts": Factors(
                a=torch.randn(experts, 16, 2048).bfloat16(), b=torch.randn(experts, 1536, 16).bfloat16()
            ),
            "q": Factors(a=torch.randn(16, 2048).bfloat16(), b=torch.randn(4096, 16).bfloat16()),
        }
        slot = turn % 2
        bank.load(slot, Adapter(name=f"a{turn}", path=Path(), factors=factors))
        for tensor in (t for f in factors.values() for t in (f.a, f.b)):
            assert not tensor.is_pinned()
        bank.begin_reading([slot])
        a, b = bank.slots["experts"].a_LERI[slot].cpu(), bank.slots["experts"].b_LEOR[slot].cpu()
        assert torch.equal(a[:, :16], factors["experts"].a.expand(64, -1, -1))
        assert torch.equal(b[..., :16], factors["experts"].b.expand(64, -1, -1))
        assert not a[:, 16:].any()
        assert not b[..., 16:].any()
        assert torch.equal(bank.slots["q"].a_LRI[slot, :16].cpu(), factors["q"].a)
        assert torch.equal(bank.slots["q"].b_LOR[slot, :, :16].cpu(), factors["q"].b)
        bank.end_reading([slot])
