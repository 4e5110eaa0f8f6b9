"""Adapted layers of one input are computed together; whoever breaks the pattern is computed alone, and right."""

import gc
from itertools import pairwise
from types import SimpleNamespace
from weakref import ref

import pytest
import torch

from adapter_writers import AdapterWriter
from moelora import EngineOptions, PrefillEngine, Request
from moelora.adapters.base import Target, TargetKind
from moelora.backends import get_backend
from moelora.backends.base import DenseSlots, LoraMetadata
from moelora.models.context import ForwardContext, forward_context
from moelora.models.projections import Projections, _join
from moelora.self_check import _reads_rows_apart
from moelora.types import Phase
from tiny_models import save_model

LAYERS = ("a", "b", "c")


class Block(torch.nn.Module):
    """Feeds one tensor to a and b, and their sum to c; `order` and `spoil` change how."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = torch.nn.Linear(6, 4), torch.nn.Linear(6, 5, bias=False), torch.nn.Linear(4, 3)
        self.order, self.spoil = "ab", False

    def forward(self, x):
        outs = {}
        for name in self.order:
            outs[name] = getattr(self, name)(x)
            if self.spoil:
                x.mul_(2.0)
        return self.c(outs["a"]), outs["b"]


@pytest.fixture
def block():
    torch.manual_seed(0)
    return Block()


def install(block):
    projections, slots = Projections(set()), {}
    for name in LAYERS:
        layer = getattr(block, name)
        out, width = layer.weight.shape
        target = Target(name=name, kind=TargetKind.LINEAR, in_features=width, out_features=out, shape=(out, width))
        slots[name] = DenseSlots(
            a_LRI=torch.randn(2, 3, width),
            b_LOR=torch.randn(2, out, 3),
            ranks_L=torch.tensor([3, 3], dtype=torch.int32),
        )
        projections.add(layer, target, slots[name])
    return projections, slots


def run(block, x, slot_T):
    backend, sizes = get_backend("torch"), []
    together = backend.projections

    def counted(x_TI, weights, *others, **how):
        sizes.append(len(weights))
        return together(x_TI, weights, *others, **how)

    backend.projections = counted
    meta = LoraMetadata(phase=Phase.PREFILL, token_slot_T=slot_T, has_lora=bool((slot_T >= 0).any()), private=None)
    with forward_context(ForwardContext(backend=backend, meta=meta, segments=None)):
        return block(x), sizes


def expected(plain, slots, x, slot_T):
    def layer(name, x):
        out = getattr(plain, name)(x)
        for t, slot in enumerate(slot_T.tolist()):
            if slot >= 0:
                out[t] += slots[name].b_LOR[slot] @ (slots[name].a_LRI[slot] @ x[t])
        return out

    return layer("c", layer("a", x)), layer("b", x)


@pytest.mark.parametrize("x_shape", [(7, 6), (1, 7, 6)])
def test_layers_of_one_input_are_computed_together(block, x_shape):
    plain = Block()
    plain.load_state_dict(block.state_dict())
    projections, slots = install(block)
    slot_T = torch.tensor([0, -1, 1, 1, 0, -1, 0], dtype=torch.int32)
    x = torch.randn(x_shape)
    with torch.no_grad():
        _, learning = run(block, x, slot_T)
        projections.finish()
        (c, b), sizes = run(block, x, slot_T)
        want_c, want_b = expected(plain, slots, x.view(7, 6), slot_T)
    assert (learning, sizes) == ([1, 1, 1], [2, 1])
    assert c.shape == (*x_shape[:-1], 3)
    torch.testing.assert_close(c.view(7, 3), want_c)
    torch.testing.assert_close(b.view(7, 5), want_b)
    assert projections.called == set(LAYERS)


def test_another_order_or_another_tensor_is_computed_alone(block):
    projections, _ = install(block)
    slot_T = torch.tensor([0, 1, -1], dtype=torch.int32)
    with torch.no_grad():
        run(block, torch.randn(3, 6), slot_T)
        projections.finish()
        x = torch.randn(3, 6)
        (want, _), _ = run(block, x, slot_T)
        block.order = "ba"
        (c, _), sizes = run(block, x, slot_T)
    # b alone, a with b, whose second output nobody takes, c.
    assert sizes == [1, 2, 1]
    torch.testing.assert_close(c, want)
    with torch.no_grad():
        (again, _), _ = run(block, x.clone(), slot_T)
    torch.testing.assert_close(again, want)


def test_an_input_that_changes_between_two_layers_is_no_shared_one(block):
    projections, _ = install(block)
    slot_T = torch.tensor([0, 1, -1], dtype=torch.int32)
    block.spoil = True
    with torch.no_grad():
        run(block, torch.randn(3, 6), slot_T)
        projections.finish()
        _, sizes = run(block, torch.randn(3, 6), slot_T)
    assert sizes == [1, 1, 1]


def test_joined_weights_stay_what_they_were():
    parameters = [torch.nn.Parameter(torch.randn(n, 4)) for n in (3, 2)]
    before = [p.detach().clone() for p in parameters]
    _join(parameters)
    assert all(torch.equal(p, b) for p, b in zip(parameters, before, strict=True))
    assert parameters[1].data_ptr() == parameters[0].data_ptr() + 3 * 4 * 4


@pytest.fixture
def joins(monkeypatch):
    """As on an accelerator, where the weights of a group lie behind one another."""
    monkeypatch.setattr("moelora.models.projections._joins", lambda weight: True)


class Viewer(Block):
    """Reads its rows as one line, which is no view of rows that lie apart."""

    def forward(self, x):
        outs = super().forward(x)
        return [out.view(-1) for out in outs]


@pytest.mark.parametrize(("kind", "reads"), [(Block, True), (Viewer, False)])
def test_rows_may_lie_apart_where_the_model_reads_them_so(kind, reads, joins):
    torch.manual_seed(0)
    block = kind()
    projections, slots = install(block)
    slot_T = torch.full((5,), -1, dtype=torch.int32)

    def forward(batch):
        outs, _ = run(block, torch.arange(30.0).view(5, 6), slot_T)
        return SimpleNamespace(hidden_TH=outs[1].view(5, -1))

    base = SimpleNamespace(device=torch.device("cpu"), text_config=SimpleNamespace(vocab_size=9))
    runner = SimpleNamespace(run=forward)
    with torch.no_grad():
        want = forward(None).hidden_TH
        assert not projections.any_joined
        projections.finish()
        assert projections.any_joined
        side_by_side = [block.a.weight, block.b.weight, slots["a"].a_LRI, slots["b"].a_LRI]
        for one, other in pairwise(side_by_side):
            assert one.data_ptr() + 4 * one.numel() == other.data_ptr()
        assert _reads_rows_apart(projections, base, runner, want) is reads
        assert not _reads_rows_apart(projections, base, runner, want * 1.1)
        torch.testing.assert_close(forward(None).hidden_TH, want)


def test_an_engine_tells_the_backend_that_rows_may_lie_apart(tmp_path, joins, monkeypatch):
    save_model(tmp_path / "model", "qwen3_moe")
    catalogue = PrefillEngine(tmp_path / "model", options=EngineOptions(device="cpu")).catalogue
    AdapterWriter(catalogue).dense(*[n for n in catalogue.targets if n.endswith(("q_proj", "k_proj"))]).write(
        tmp_path / "adapter"
    )
    requests = [Request(token_ids=[1, 2, 3], adapter="x"), Request(token_ids=[4, 5])]
    told, scores = [], []
    for may in (True, False):
        monkeypatch.setattr("moelora.self_check._reads_rows_apart", lambda *given, may=may: may)
        engine = PrefillEngine(
            tmp_path / "model", adapters={"x": tmp_path / "adapter"}, options=EngineOptions(device="cpu")
        )
        together = engine._backend.projections
        engine._backend.projections = lambda *given, together=together, rows_apart: (
            told.append(rows_apart) or together(*given, rows_apart=rows_apart)
        )
        scores.append([result.token_logprobs for result in engine.score(requests)])
        assert set(told) == {may}
        told.clear()
    assert scores[0] == scores[1]


def test_an_engine_computes_q_k_v_at_once(tmp_path):
    save_model(tmp_path / "model", "qwen2_moe")
    engine = PrefillEngine(tmp_path / "model", options=EngineOptions(device="cpu"))
    names = [n for n in engine.catalogue.targets if n.endswith(("q_proj", "k_proj", "v_proj", "o_proj"))]
    AdapterWriter(engine.catalogue).dense(*names).write(tmp_path / "adapter")
    engine = PrefillEngine(
        tmp_path / "model", adapters={"x": tmp_path / "adapter"}, options=EngineOptions(device="cpu", backend="torch")
    )
    sizes = []
    together = engine._backend.projections
    engine._backend.projections = lambda x, weights, *rest, **how: (
        sizes.append(len(weights)) or together(x, weights, *rest, **how)
    )
    engine.score([Request(token_ids=[1, 2, 3], adapter="x")])
    assert set(sizes) == {3, 1}


def test_outputs_that_nobody_takes_end_with_the_forward(block):
    """After an error they would lack the memory that the batch is tried again in."""
    projections, _ = install(block)
    slot_T = torch.tensor([0, 1, -1], dtype=torch.int32)
    with torch.no_grad():
        run(block, torch.randn(3, 6), slot_T)
        projections.finish()
        block.b.register_forward_pre_hook(fails)
        x = torch.randn(3, 6)
        with pytest.raises(torch.OutOfMemoryError):
            run(block, x, slot_T)
    held = ref(x)
    del x
    gc.collect()
    assert held() is None


def fails(*_):
    raise torch.OutOfMemoryError
