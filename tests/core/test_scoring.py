"""The scoring head: chunks, precision, and how many logits exist at once."""

import weakref

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from arch_world import logprobs, make, runnable
from moelora import EngineOptions, PrefillEngine, Request
from moelora.backends import get_backend
from moelora.batching.packing import HeadRows
from moelora.batching.sequences import NO_TARGET
from moelora.jobs.dry import dry_scorer
from moelora.jobs.plan import PlanningEngine
from moelora.models.base_model import load_base, open_base
from moelora.scoring.head import ScoringHead
from tiny_models import VOCAB, save_model, tiny_config

WIDE = 152_064


class PeakBytes(TorchDispatchMode):
    """Counts the bytes of living CPU storages that were made while it is active."""

    def __init__(self):
        super().__init__()
        self.now = self.peak = 0
        self._seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, torch.Tensor):
                self._watch(tensor.untyped_storage())
        return out

    def _watch(self, storage):
        key = storage._cdata
        if key not in self._seen:
            self._seen.add(key)
            self.now += storage.nbytes()
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key, nbytes):
        self._seen.discard(key)
        self.now -= nbytes


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A one-layer model with a real vocabulary, in bf16."""
    folder = tmp_path_factory.mktemp("wide")
    config = tiny_config("qwen3", vocab_size=WIDE, num_hidden_layers=1, hidden_size=8, max_position_embeddings=8192)
    config.save_pretrained(folder)
    return load_base(open_base(folder, load_format="dummy"), device=torch.device("cpu"), dtype="bfloat16")


def rows(count, hidden, seed=0):
    """Hidden states, and rows of them in another order; every ninth has no target."""
    generator = torch.Generator().manual_seed(seed)
    hidden_TH = torch.randn(count, hidden, generator=generator).to(torch.bfloat16)
    target_N = torch.randint(0, WIDE, (count,), generator=generator)
    target_N[::9] = NO_TARGET
    open_M = torch.arange(0, count, 9)
    slot_N = torch.full((count,), -1, dtype=torch.int32)
    return hidden_TH, HeadRows(
        position_N=torch.randperm(count, generator=generator),
        target_N=target_N,
        slot_N=slot_N,
        open_M=open_M,
        slots=slot_N.numpy(),
        opens=open_M.numpy(),
    )


def test_never_more_than_one_chunk_of_logits(wide):
    """8,192 rows at 152,064 entries: the logits alone would be 2.5 GB in bf16 and 5 GB in fp32."""
    head = ScoringHead(wide, get_backend("torch"))
    chunk = head.chunk_rows * WIDE * (2 + 4)
    with torch.inference_mode(), PeakBytes() as memory:
        scores = head.score(*rows(8192, 8), top_k=1)
    assert memory.peak < 1.1 * chunk + 8192 * 100
    assert chunk <= 64 << 20
    assert torch.equal(torch.isfinite(scores.target_logprob_N), torch.arange(8192) % 9 != 0)


@pytest.mark.parametrize("chunk_rows", [1, 7, 1024])
def test_the_chunk_size_changes_nothing(wide, chunk_rows):
    given = rows(50, 8)
    with torch.inference_mode():
        one = ScoringHead(wide, get_backend("torch"), chunk_rows=chunk_rows).score(*given, top_k=2)
        all_at_once = ScoringHead(wide, get_backend("torch"), chunk_rows=50).score(*given, top_k=2)
    same = {"atol": 1e-5, "rtol": 0, "equal_nan": True}
    torch.testing.assert_close(one.target_logprob_N, all_at_once.target_logprob_N, **same)
    assert one.top_ids_MK.shape == (6, 2)
    assert torch.equal(one.top_ids_MK, all_at_once.top_ids_MK)


def test_the_normaliser_is_fp32(wide):
    """log_softmax kept in bf16 is off by up to 0.07 nat at this vocabulary."""
    hidden_TH, given = rows(40, 8)
    head = ScoringHead(wide, get_backend("torch"))
    with torch.inference_mode():
        scores = head.score(hidden_TH, given, top_k=0)
        logits_NV = head.logits(hidden_TH[given.position_N], given.slot_N, has_lora=False).double()
        exact = torch.log_softmax(logits_NV, -1).gather(1, given.target_N.clamp(min=0)[:, None])[:, 0]
    closed = given.target_N != NO_TARGET
    torch.testing.assert_close(scores.target_logprob_N.double()[closed], exact[closed], atol=1e-5, rtol=0)


def test_top_k_of_the_whole_vocabulary(tmp_path):
    save_model(tmp_path, "qwen3")
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    (result,) = engine.score([Request(token_ids=[1, 2], top_k=VOCAB)])
    assert len(result.top_logprobs) == VOCAB
    assert abs(sum(2.718281828459045**t.logprob for t in result.top_logprobs) - 1) < 1e-4


@pytest.mark.filterwarnings("ignore")
def test_padding_of_the_embedding_is_no_vocabulary(tmp_path):
    """A head that leaves it out has no logit for such a token."""
    model_class, config = runnable("inkling2")
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    size = config.unpadded_vocab_size
    assert size < config.vocab_size
    options = EngineOptions(device="cpu")
    engine = PrefillEngine(tmp_path, options=options)
    planned = PlanningEngine(tmp_path, adapters={}, options=options)
    last, beyond = (Request(token_ids=[5, token], top_k=size) for token in (size - 1, size))
    for one in (engine, planned, dry_scorer(tmp_path, [])):
        assert one.vocab_size == size
        assert one.check(last) is None
        assert one.check(beyond) == f"token id {size} is outside the vocabulary [0, {size})"
    (result,) = engine.score([last])
    assert len(result.top_logprobs) == size
    expected = logprobs(model_class.from_pretrained(tmp_path).eval(), last.token_ids)
    assert abs(result.token_logprobs[1] - float(expected)) < 1e-4


def test_a_logit_of_minus_infinity(tmp_path, monkeypatch):
    save_model(tmp_path, "llama")
    engine = PrefillEngine(tmp_path, options=EngineOptions(device="cpu"))
    original = ScoringHead.logits
    monkeypatch.setattr(
        ScoringHead, "logits", lambda *a, **k: original(*a, **k).index_fill(1, torch.tensor([7]), float("-inf"))
    )
    forbidden, allowed = engine.score([Request(token_ids=[1, 7, 2]), Request(token_ids=[1, 6, 2])])
    assert forbidden.error == "the log-probability of token 1 is -inf"
    assert allowed.error is None
