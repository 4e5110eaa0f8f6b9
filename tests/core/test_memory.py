"""Device memory by part: the arithmetic against tensors, and what is given up where memory is short."""

import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig

from arch_world import make, runnable
from moelora import EngineOptions, GraphMode, PrefillEngine, Request, memory
from moelora.backends import get_backend
from moelora.batching.packing import pack
from moelora.batching.sequences import expand
from moelora.jobs.plan import PlanningEngine
from moelora.memory import Sizing, activation_width, choose_capacity, plan_memory
from moelora.meter import DeviceMeter, measure_largest_batch
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from tiny_models import peft_adapter, save_model

CPU = torch.device("cpu")
SHAPES = Path(__file__).parents[2] / "benchmarks/shapes"


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    model = save_model(folder / "model", "qwen3_moe", seed=1)
    for i in range(6):
        peft_adapter(folder / f"a{i}", model, i, rank=4, target_modules=["q_proj", "o_proj"])
    save_model(folder / "dense", "qwen3", seed=1)
    return folder


def sizing_of(world, names):
    source = open_base(world / "model")
    skeleton = source.skeleton()
    planning = PlanningEngine(
        world / "model", adapters={n: world / n for n in names}, options=EngineOptions(device="cpu")
    )
    return Sizing(
        skeleton=skeleton,
        catalogue=build_catalogue(skeleton),
        architecture=source.architecture,
        adapters=planning._adapters.values(),
        device=CPU,
        dtype=torch.float32,
    )


NAMES = [f"a{i}" for i in range(6)]


def fitted(world, monkeypatch, free, **options):
    monkeypatch.setattr(memory, "free_device_memory", lambda device: (free, 1 << 40))
    said = []
    capacity, plan = choose_capacity(
        EngineOptions(device="cpu", score_chunk_rows=1, **options), sizing_of(world, NAMES), said.append
    )
    return capacity, plan, said


def test_slots_go_first_then_batches_are_halved(world, monkeypatch):
    everything, plan, said = fitted(world, monkeypatch, 1 << 40)
    assert (everything.slots, everything.max_tokens, said) == (6, 2048, [])
    assert plan.fits
    one_slot = (plan.bank + 5) // 6
    capacity, plan_5, said = fitted(world, monkeypatch, int((plan.needed - one_slot // 2) / 0.95))
    assert (capacity.slots, capacity.max_tokens) == (5, 2048)
    assert "batches of 2,048 tokens and 5 adapter slots instead of 2,048 and 6" in said[0]
    assert plan.bank - plan_5.bank == one_slot
    capacity, plan_small, _ = fitted(world, monkeypatch, int((plan.needed - 5 * one_slot) / 0.95))
    assert capacity.slots == 2
    assert 512 <= capacity.max_tokens < 2048
    assert plan_small.needed <= plan.needed - 5 * one_slot
    capacity, nothing, _ = fitted(world, monkeypatch, 1000)
    assert (capacity.slots, capacity.max_tokens) == (2, 512)
    assert nothing.fits is False


def test_what_is_given_is_kept(world, monkeypatch):
    assert fitted(world, monkeypatch, 1000, slots=5)[0].slots == 5
    assert fitted(world, monkeypatch, 1000, max_tokens=1600)[0].max_tokens == 1600
    assert fitted(world, monkeypatch, 1000, buckets=(16, 2048))[0].max_tokens == 2048
    capacity, _, said = fitted(world, monkeypatch, 1000, slots=5, max_tokens=1600)
    assert (capacity.slots, capacity.max_tokens, said) == (5, 1600, [])


def test_engine_and_plan_choose_alike(world, monkeypatch):
    monkeypatch.setattr(memory, "free_device_memory", lambda device: (1000, 1 << 40))
    adapters = {n: world / n for n in NAMES}
    options = EngineOptions(device="cpu")
    planned = PlanningEngine(world / "model", adapters=adapters, options=options).report()
    real = PrefillEngine(world / "model", adapters=adapters, options=options).report()
    assert (planned["slots"], planned["max_tokens"]) == (real["slots"], real["max_tokens"]) == (2, 512)
    assert planned["memory"] == real["memory"]
    assert real["memory_measured"] == {}


@pytest.mark.parametrize("backend", ["triton", "csgmv"])
def test_static_buffers_are_counted_without_being_made(world, backend):
    sizing = sizing_of(world, NAMES)
    options = EngineOptions(device="cpu", backend=backend, max_tokens=256)
    capacity, plan = choose_capacity(options, sizing)
    made = get_backend(backend)
    engine = PrefillEngine(world / "model", adapters={n: world / n for n in NAMES}, options=options)
    buffers = engine._backend
    seen = {}
    for holder in (*buffers._buffers.values(), *buffers._moe.values()):
        collect(holder, seen)
    assert plan.static == sum(seen.values())
    assert not made._buffers, "planning leaves backends alone"
    assert capacity == engine._capacity


def collect(value, seen, depth=0):
    """Bytes of all storages below an object, by address."""
    if isinstance(value, torch.Tensor):
        seen[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
    elif isinstance(value, tuple | list):
        for item in value:
            collect(item, seen, depth + 1)
    elif depth < 5 and type(value).__module__.startswith("moelora"):
        names = getattr(value, "__dict__", None) or dict.fromkeys(getattr(type(value), "__slots__", ()))
        for name in names:
            collect(getattr(value, name, None), seen, depth + 1)


def test_graphs_share_activations_and_results(world, monkeypatch):
    sizing = sizing_of(world, NAMES)
    monkeypatch.setattr(memory, "first_mode", lambda *args, **facts: (GraphMode.FULL, None))
    options = EngineOptions(device="cpu", backend="triton", max_tokens=1024)
    _, plan = choose_capacity(options, sizing)
    width = activation_width(sizing.config, fused=True)
    assert plan.graphs == 4 * 1024 * width
    assert plan.activations == 4 * 1024 * width
    assert plan.needed == plan.base + plan.bank + plan.static + plan.graphs + max(plan.activations, plan.scoring_chunk)


def test_gated_linear_attention_is_counted():
    """At the shape of Qwen3.5-35B-A3B a batch of 16,384 tokens took 2,001 MiB on an H200, of two bytes an element."""
    config = AutoConfig.from_pretrained(SHAPES / "Qwen3.5-35B-A3B").get_text_config()
    planned = 16384 * 2 * activation_width(config, fused=True)
    assert planned == pytest.approx(2001 * 2**20, rel=0.05)


def test_the_fused_head_needs_no_chunk_of_logits(world):
    sizing = sizing_of(world, [])
    for backend, chunk in (("torch", 1000), ("triton", 255)):
        options = EngineOptions(device="cpu", backend=backend, max_tokens=64, score_chunk_rows=1000)
        assert choose_capacity(options, sizing)[1].scoring_chunk == chunk * sizing.config.vocab_size * 8


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["hy_v4", "ernie4_5_moe"])
def test_what_a_model_keeps_in_float32_is_counted_as_such(tmp_path, name):
    model_class, config = runnable(name, torch.bfloat16)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    options = EngineOptions(device="cpu", backend="triton", dtype="bfloat16", max_tokens=4096, score_chunk_rows=2)
    planned = PlanningEngine(tmp_path, adapters={}, options=options).report()["memory"]
    engine = PrefillEngine(tmp_path, options=options)
    head = engine._base.causal_lm.lm_head.weight
    wide = sum(p.numel() for p in engine._base.causal_lm.parameters() if p.dtype is torch.float32)
    assert (head.dtype is torch.float32, wide > 0) == (name == "hy_v4", True)
    buffers = sum(b.nbytes for b in engine._base.causal_lm.buffers())
    assert planned["base"] - engine._base.nbytes == pytest.approx(0, abs=buffers)  # some are made in another dtype
    tiles = 12 * -(-head.shape[0] // 256)
    gathered = head.shape[1] * (6 if name == "hy_v4" else 2)
    assert planned["scoring_chunk"] == 4096 * (tiles + gathered)


class Alive(TorchDispatchMode):
    """The most bytes that were alive at once among those made within the context."""

    def __init__(self):
        super().__init__()
        self.peak = self._now = 0
        self._known = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in given | self._known:
                    self._known.add(storage._cdata)
                    self._now += storage.nbytes()
                    self.peak = max(self.peak, self._now)
                    weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())
        return out

    def _drop(self, address, nbytes):
        self._known.discard(address)
        self._now -= nbytes


def test_activations_are_what_a_forward_holds(world):
    engine = PrefillEngine(world / "dense", options=EngineOptions(device="cpu", dtype="float32"))
    sequences = [s for _ in range(4) for s in expand(0, Request(token_ids=[1] * 60))]
    batch = pack(sequences, {}, CPU)
    with torch.inference_mode(), Alive() as alive:
        engine._runner.run(batch)
    estimate = 240 * 4 * activation_width(engine._base.text_config, fused=False)
    assert alive.peak == pytest.approx(estimate, rel=0.2)


def test_the_meter_knows_nothing_off_cuda(world):
    meter = DeviceMeter(CPU)
    assert meter.kept("base", lambda: 5) == meter.held("x", lambda: 5) == 5
    assert meter.pooled("graphs", lambda: 6) == 6
    assert (meter.parts, meter.highest()) == ({}, None)


@pytest.mark.parametrize(
    ("tokens", "requests", "positions"), [(700, 700, 256), (700, 2, None), (50, 1, 30), (8, 8, 256)]
)
def test_the_largest_batch_is_within_limits(world, monkeypatch, tokens, requests, positions):
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    engine = PrefillEngine(
        world / "model", options=EngineOptions(device="cpu", max_tokens=tokens, max_requests=requests)
    )
    seen = []
    run = type(engine._runner).run
    monkeypatch.setattr(type(engine._runner), "run", lambda self, batch: seen.append(batch) or run(self, batch))
    measure_largest_batch(
        DeviceMeter(CPU), engine._runner, engine._head, engine._capacity, positions, lambda text: None
    )
    largest = seen[0]
    assert largest.num_tokens == (min(tokens, positions) if requests == 1 else tokens)
    assert largest.num_sequences <= requests
    assert max(largest.lengths) <= (positions or tokens)


def test_plan_memory_is_public_for_one_capacity(world):
    sizing = sizing_of(world, NAMES[:2])
    options = EngineOptions(device="cpu")
    capacity, plan = choose_capacity(options, sizing)
    assert plan_memory(sizing, options, capacity, backend=get_backend("torch"), free=None, total=None) == plan
