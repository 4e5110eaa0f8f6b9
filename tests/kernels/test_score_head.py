"""The scoring head: equal to all logits at once, whatever the chunking, and bit-equal for a row wherever it stands."""

from dataclasses import replace

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from adapter_writers import AdapterWriter
from arch_world import make as make_model
from arch_world import runnable
from moelora import EngineOptions, PrefillEngine, Request, Result
from moelora.backends import get_backend
from moelora.backends.base import DenseSlots
from moelora.backends.fused_ops import RowScores
from moelora.batching.packing import HeadRows
from moelora.batching.sequences import NO_TARGET
from moelora.errors import ConfigError
from moelora.models.base_model import load_base, open_base
from moelora.models.catalogue import build_catalogue
from moelora.scoring import head as head_module
from moelora.scoring.head import ScoringHead
from moelora_kernels.ops import score_head
from moelora_kernels.ops.score_head import HeadConfig, score_rows
from moelora_kernels.ops.score_head.naive import naive_scores
from tiny_models import save_model

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FEW = settings(max_examples=10, deadline=None, derandomize=True, phases=[Phase.generate])
SMALL = HeadConfig(block_m=16, block_n=32, block_k=32, warps=4, stages=2, group=2)


def make(N, V, H, *, seed, dtype=torch.float32, ranks=None, R=0):
    g = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=g).to(dtype).to(DEVICE)

    x, w = randn(N, H), randn(V, H) * H**-0.5
    targets = torch.randint(-1, V, (N,), generator=g).to(DEVICE)
    if ranks is None:
        return x, w, targets, None, None
    a, b = randn(len(ranks), R, H) * H**-0.5, randn(len(ranks), V, R)
    for slot, rank in enumerate(ranks):
        a[slot, rank:] = 0
        b[slot, :, rank:] = 0
    slots = DenseSlots(a_LRI=a, b_LOR=b, ranks_L=torch.tensor(ranks, dtype=torch.int32, device=DEVICE))
    row_slot = torch.randint(-1, len(ranks), (N,), generator=g, dtype=torch.int32).to(DEVICE)
    return x, w, targets, slots, row_slot


def compare(scores, expected, top_k):
    target, argmax, best, lse, top_ids, top = expected
    torch.testing.assert_close(scores.target_logprob.double(), target, rtol=1e-6, atol=2e-5, equal_nan=True)
    torch.testing.assert_close(scores.argmax_logprob.double(), best, rtol=1e-6, atol=2e-5)
    torch.testing.assert_close(scores.lse.double(), lse, rtol=1e-6, atol=2e-5)
    assert torch.equal(scores.argmax_id, argmax)
    assert torch.equal(scores.top_ids, top_ids)
    torch.testing.assert_close(scores.top_logprobs.double(), top, rtol=1e-6, atol=2e-5)
    assert scores.top_ids.shape[1] == top_k


@FEW
@given(
    N=st.integers(1, 40),
    V=st.sampled_from([5, 64, 100]),
    H=st.sampled_from([32, 36]),
    ranks=st.none() | st.lists(st.integers(0, 20), min_size=1, max_size=4),
    extras=st.sampled_from([{}, {"logit_scale": 0.25}, {"softcap": 2.0}, {"logit_scale": 3.0, "softcap": 5.0}]),
    top_k=st.sampled_from([0, 1, 5]),
    with_bias=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_all_logits_at_once(N, V, H, ranks, extras, top_k, with_bias, seed):
    x, w, targets, slots, row_slot = make(N, V, H, seed=seed, ranks=ranks, R=max([1, *(ranks or [])]))
    bias = torch.linspace(-1, 1, V, device=DEVICE) if with_bias else None
    more = {"bias_V": bias, "slots": slots, "row_slot_N": row_slot, "top_k": top_k, **extras}
    compare(score_rows(x, w, targets, config=SMALL, **more), naive_scores(x, w, targets, **more), top_k)


@pytest.mark.parametrize("flatten", [False, True])
def test_bulk_copies_give_the_bits_of_loads(monkeypatch, flatten):
    """The same product through tensor descriptors: tiles over both edges, a persistent grid."""
    x, w, targets, _, _ = make(37, 70, 40, seed=5, dtype=torch.bfloat16)
    more = {"bias_V": torch.linspace(-1, 1, 70, device=DEVICE).bfloat16(), "top_k": 3, "softcap": 4.0}
    config = replace(SMALL, flatten=flatten)
    loads = score_rows(x, w, targets, config=config, **more)
    monkeypatch.setattr(score_head, "bulk_copies", lambda *matrices: True)
    bulk = score_rows(x, w, targets, config=config, **more)
    compare(bulk, naive_scores(x, w, targets, **more), 3)
    for name in ("target_logprob", "argmax_id", "argmax_logprob", "lse", "top_ids", "top_logprobs"):
        assert torch.equal(getattr(bulk, name).nan_to_num(7), getattr(loads, name).nan_to_num(7)), name


def test_ties_go_to_the_lowest_id():
    x = torch.ones(3, 32, device=DEVICE)
    w = torch.zeros(100, 32, device=DEVICE)
    w[[90, 40, 41]] = 0.5
    scores = score_rows(x, w, torch.tensor([40, 90, 0], device=DEVICE), top_k=4, config=SMALL)
    assert scores.argmax_id.tolist() == [40, 40, 40]
    assert scores.top_ids.tolist() == [[40, 41, 90, 0]] * 3
    assert scores.target_logprob[0] == scores.target_logprob[1] == scores.argmax_logprob[0]


def test_minus_infinity_and_nan_stay_in_their_rows():
    x, w, targets, _, _ = make(4, 70, 32, seed=1)
    bias = torch.zeros(70, device=DEVICE)
    bias[:64] = float("-inf")
    targets[:] = torch.tensor([3, 65, 69, 64])
    x[3, 0] = float("nan")
    scores = score_rows(x, w, targets, bias_V=bias, top_k=8, config=SMALL)
    assert scores.target_logprob[0] == float("-inf")
    assert torch.isfinite(scores.target_logprob[1:3]).all()
    assert (scores.argmax_id[:3] >= 64).all()
    assert (scores.top_ids[:3, 6:] == -1).all()
    assert scores.target_logprob[3].isnan()
    assert scores.lse[3].isnan()
    assert scores.argmax_id[3] == 0
    assert scores.top_ids[3].tolist() == list(range(8))


def test_sixteen_bits_with_blocks_of_their_own():
    x, w, targets, _, _ = make(5, 300, 64, seed=2, dtype=torch.float16)
    scores = score_rows(x, w, targets, top_k=2)
    compare(scores, naive_scores(x, w, targets, top_k=2), 2)


def test_a_row_has_the_same_bits_alone_and_in_any_batch(monkeypatch):
    x, w, targets, slots, row_slot = make(37, 70, 32, seed=3, ranks=[4, 16, 9], R=16)
    more = {"slots": slots, "config": SMALL, "top_k": 2}
    together = score_rows(x, w, targets, row_slot_N=row_slot, **more)
    for row in (0, 20, 36):
        part = slice(row, row + 1)
        alone = score_rows(x[part], w, targets[part], row_slot_N=row_slot[part], **more)
        for name in ("target_logprob", "argmax_logprob", "lse", "top_logprobs"):
            assert torch.equal(getattr(alone, name).nan_to_num(7), getattr(together, name)[part].nan_to_num(7))
    monkeypatch.setattr(score_head, "_SCRATCH_BYTES", 1)
    chunked = score_rows(x, w, targets, row_slot_N=row_slot, **more)
    assert torch.equal(chunked.lse, together.lse)
    assert torch.equal(chunked.top_ids, together.top_ids)


def test_base_rows_have_the_bits_of_a_head_without_lora():
    x, w, targets, slots, row_slot = make(20, 70, 32, seed=4, ranks=[4, 80], R=80)
    mixed = score_rows(x, w, targets, slots=slots, row_slot_N=row_slot, config=SMALL)
    plain = score_rows(x, w, targets, config=SMALL)
    rows = row_slot == -1
    assert torch.equal(mixed.lse[rows], plain.lse[rows])
    assert not torch.equal(mixed.lse[~rows], plain.lse[~rows])


def test_no_rows_and_refusals():
    x, w, targets, _, _ = make(3, 70, 32, seed=1)
    assert score_rows(x[:0], w, targets[:0]).lse.shape == (0,)
    with pytest.raises(ConfigError, match="top_k must lie between 0 and 64"):
        score_rows(x, w, targets, top_k=65)
    with pytest.raises(ConfigError, match="softcap must be positive"):
        score_rows(x, w, targets, softcap=0.0)
    with pytest.raises(ConfigError, match="shapes disagree"):
        score_rows(x, w, targets[:2])


def test_an_engine_scores_through_the_fused_head_with_and_without_top_k(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    requests = [
        Request(token_ids=[3, 1, 4, 1, 5], top_k=0),
        Request(token_ids=[2, 7], top_k=3),
        Request(token_ids=[6], choices=((1, 2), (3,))),
    ]

    def run(backend: str, batch_invariant: bool) -> list[Result]:
        options = EngineOptions(device="cpu", backend=backend, batch_invariant=batch_invariant)
        return PrefillEngine(tmp_path, options=options).score(requests)

    for got, want in zip(run("triton", True), run("torch", False), strict=True):
        assert got.token_logprobs[1:] == pytest.approx(want.token_logprobs[1:], abs=1e-5)
        assert got.next_token.token_id == want.next_token.token_id
        assert [t.token_id for t in got.top_logprobs] == [t.token_id for t in want.top_logprobs]
        assert [c.logprob for c in got.choices] == pytest.approx([c.logprob for c in want.choices], abs=1e-5)


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_a_row_of_nan_has_the_first_ids_in_either_head(tmp_path, backend):
    model = save_model(tmp_path, "qwen3_moe")
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    model.save_pretrained(tmp_path)
    options = EngineOptions(device="cpu", backend=backend, batch_invariant=backend == "triton")
    engine = PrefillEngine(tmp_path, options=options)
    poisoned, clean = engine.score([Request(token_ids=[3, 7], top_k=3), Request(token_ids=[3, 5, 2], top_k=3)])
    assert [one.token_id for one in poisoned.top_logprobs] == [0, 1, 2]
    assert poisoned.next_token.token_id == 0
    assert "nan" in poisoned.error
    assert clean.error is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_soft_cap_is_recognised_though_it_hardly_shows_on_small_logits(tmp_path, dtype):
    AutoConfig.for_model(
        "gemma2", vocab_size=96, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, final_logit_softcapping=30.0,
    ).save_pretrained(tmp_path)  # fmt: skip
    base = load_base(open_base(tmp_path, load_format="dummy"), device=torch.device("cpu"), dtype=dtype)
    head = ScoringHead(base, get_backend("triton"))
    head.recognise(torch.randn(4, base.text_config.hidden_size).to(base.dtype) * 1e-3)
    assert head.fused
    assert head._fused_head.softcap == 30.0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("backend", "invariant"), [("torch", False), ("triton", False), ("triton", True)])
def test_a_head_kept_in_float32_scores_as_in_the_models_own_forward(tmp_path, monkeypatch, backend, invariant):
    """hy_v4 in bf16 brings its hidden rows to fp32 for lm_head, base and LoRA alike."""
    monkeypatch.setattr(head_module, "FUSED_ROWS", 1)
    model_class, config = runnable("hy_v4", torch.bfloat16)
    make_model(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    plain = model_class.from_pretrained(tmp_path / "model", dtype=torch.bfloat16).eval()
    assert plain.lm_head.weight.dtype is torch.float32
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    AdapterWriter(catalogue, r=4, alpha=8, seed=5).dense("lm_head").write(tmp_path / "tuned")
    options = EngineOptions(
        device="cpu", backend=backend, batch_invariant=invariant, dtype="bfloat16", graph="off", max_tokens=64
    )
    engine = PrefillEngine(tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=options)
    assert engine._head.fused is (backend == "triton")
    ids = torch.randint(3, 120, (30,), generator=torch.Generator().manual_seed(1))
    (tuned,) = engine.score([Request(token_ids=ids.tolist(), adapter="tuned")])  # loads it into slot 0
    assert tuned.error is None

    with torch.inference_mode():
        hidden_TH = plain.model(input_ids=ids[None]).last_hidden_state[0]
        logits_TV = plain(input_ids=ids[None]).logits[0].double()
        assert hidden_TH.dtype is torch.bfloat16
        slots = engine._bank.slots["lm_head"]
        slot_N = torch.tensor([0, -1] * 15, dtype=torch.int32)
        logits_TV[::2] += hidden_TH[::2].double() @ slots.a_LRI[0].double().T @ slots.b_LOR[0].double().T
        target_N = ids.roll(-1)
        target_N[-2:] = NO_TARGET
        open_M = torch.tensor([28, 29])
        rows = HeadRows(
            position_N=torch.arange(30), target_N=target_N, slot_N=slot_N, open_M=open_M,
            slots=slot_N.numpy(), opens=open_M.numpy(),
        )  # fmt: skip
        scores = engine._head.score(hidden_TH, rows, top_k=3)
    expected_TV = torch.log_softmax(logits_TV, -1)
    wanted_N = expected_TV.gather(1, target_N.clamp(min=0)[:, None])[:, 0]
    near = {"atol": 2e-5, "rtol": 1e-6}
    torch.testing.assert_close(scores.target_logprob_N[:28].double(), wanted_N[:28], **near)
    best = expected_TV[28:].topk(3)
    assert torch.equal(scores.top_ids_MK, best.indices)
    torch.testing.assert_close(scores.top_logprobs_MK.double(), best.values, **near)


def test_factors_may_be_narrower_than_rows_in_fp32_alone():
    x, w, targets, slots, row_slot = make(20, 70, 32, seed=6, ranks=[4, 16], R=16)
    narrow = DenseSlots(a_LRI=slots.a_LRI.bfloat16(), b_LOR=slots.b_LOR.bfloat16(), ranks_L=slots.ranks_L)
    more = {"slots": narrow, "row_slot_N": row_slot, "top_k": 2}
    compare(score_rows(x, w, targets, config=SMALL, **more), naive_scores(x, w, targets, **more), 2)
    with pytest.raises(ConfigError, match=r"A of lm_head is torch\.float32, its rows are torch\.bfloat16"):
        score_rows(x.bfloat16(), w.bfloat16(), targets, slots=slots, row_slot_N=row_slot)


def test_an_unfused_head_gives_a_row_the_same_bits_in_any_number_of_rows(tmp_path):
    save_model(tmp_path, "qwen3_moe")
    backend = get_backend("triton")
    backend.batch_invariant = True
    base = load_base(open_base(tmp_path), device=torch.device("cpu"), dtype="float32")
    head = ScoringHead(base, backend, replaced=True)
    assert not head.fused
    hidden_NH, vocab = torch.randn(37, base.text_config.hidden_size), base.text_config.vocab_size
    targets = torch.randint(-1, vocab, (37,))

    def score(begin: int, end: int) -> RowScores:
        target_N = targets[begin:end]
        opens = (target_N < 0).nonzero()[:, 0]
        slots = torch.full((end - begin,), -1, dtype=torch.int32)
        rows = HeadRows(
            position_N=torch.arange(begin, end), target_N=target_N, slot_N=slots, open_M=opens,
            slots=slots.numpy(), opens=opens.numpy(),
        )  # fmt: skip
        return head.score(hidden_NH, rows, top_k=3)

    whole = score(0, 37)
    alone = [score(i, i + 1) for i in range(37)]
    for name in ("target_logprob_N", "best_logprob_N", "best_id_N", "is_greedy_N", "top_ids_MK", "top_logprobs_MK"):
        joined = torch.cat([getattr(one, name) for one in alone])
        assert torch.equal(joined.nan_to_num(1.0), getattr(whole, name).nan_to_num(1.0)), name
    assert whole.top_ids_MK.shape == (int((targets < 0).sum()), 3)
