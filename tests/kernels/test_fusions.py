"""Sums taken by the norm behind them, norms left to the rotary kernel behind them: when, and with which bits."""

from dataclasses import replace
from threading import Thread

import pytest
import torch

from adapter_writers import PREFIX, AdapterWriter, write_adapter
from arch_world import logprobs
from kernels.dense_common import DEVICES
from moelora import EngineOptions, PrefillEngine, Request, self_check
from moelora.adapters.names import canonical
from moelora.backends import get_backend
from moelora.backends.base import LoraMetadata
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from moelora.models.context import ForwardContext, forward_context
from moelora.models.norms import FusedNorm
from moelora.models.residual_sums import seeing_residual_sums
from moelora.types import Phase
from moelora_kernels.fused import TritonOps
from tiny_models import save_model

DEVICE = DEVICES[0]
WIDTH = 12
OPTIONS = EngineOptions(device=DEVICE, backend="triton", dtype="float32", graph="off", max_tokens=16)


class Counting(TritonOps):
    """Counts what is done together."""

    def __init__(self):
        self.sums = self.norms = 0
        self.places = []

    def add_rms_norm(self, x, residual, *args):
        self.sums += 1
        self.places.append(residual.data_ptr())
        return super().add_rms_norm(x, residual, *args)

    def rotary(self, q, k, cos, sin, norms=None):
        self.norms += norms is not None
        return super().rotary(q, k, cos, sin, norms)


class RMSNorm(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(WIDTH))


class Layer(torch.nn.Module):
    """Two halves, the second of which returns a tuple; `spoil` changes the one thing that makes it another layer."""

    def __init__(self, spoil=None):
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(), RMSNorm()
        self.mix, self.act = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.spoil = spoil
        mix, act = self.mix.forward, self.act.forward
        self.mix.forward = lambda hidden_states, scale, cache=None, rows=5, some=True: (
            mix(hidden_states)[:, :rows] * scale * some
        )
        self.act.forward = lambda x: (act(x), None)
        if spoil == "zeros":
            torch.nn.init.zeros_(self.act.weight)
            torch.nn.init.zeros_(self.act.bias)

    def forward(self, hidden_states, scale=None, cache=None):
        residual = hidden_states
        x = self.norm1(hidden_states)
        if self.spoil == "changed":
            x.mul_(2.0)
        own = {
            "own argument": {"scale": scale * 1.0},
            "own number": {"rows": x.shape[1]},
            "own flag": {"some": x.shape[1] > 0},
        }
        x = self.mix(hidden_states=x, **{"scale": scale, "cache": cache, **own.get(self.spoil, {})})
        if self.spoil == "in place":
            x += residual
        else:
            x = residual + (0.5 * x if self.spoil == "scaled" else x)
        residual = x
        x = self.norm2(residual)
        if self.spoil == "twice":
            self.act(x)
        x, _ = self.act(x)
        x = residual + (1.5 * x if self.spoil == "zeros" else x)
        return (x,) if self.spoil == "in a tuple" else x


class Body(torch.nn.Module):
    def __init__(self, *spoils):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer(spoil) for spoil in spoils)
        self.norm = RMSNorm()
        self.reads = None

    def forward(self, given, scale):
        wide = torch.cat((given, given), -1)
        x = wide[..., :WIDTH] if self.reads == "what its input is a piece of" else given
        for layer in self.layers:
            x = layer(x, scale=scale)
            x = x[0] if isinstance(x, tuple) else x
        if self.reads == "the last sum":
            return 2 * x + self.norm(x)  # reads it before the norm does
        if self.reads == "what its input is a piece of":
            return self.norm(x) + wide[..., :WIDTH]
        return self.norm(x) + given if self.reads == "what layers are given" else self.norm(x)


@pytest.fixture
def body(request):
    torch.manual_seed(0)
    made = Body(*getattr(request, "param", [None, None, None])).to(DEVICE)
    ops = Counting()
    for module in made.modules():
        if isinstance(module, RMSNorm):
            module.forward = FusedNorm(module, ops, 1e-6, "model")
    made.ops = ops
    return made


@torch.inference_mode()
def run(body, seed=1, tokens=5):
    slots = torch.full((tokens,), -1, dtype=torch.int32, device=DEVICE)
    meta = LoraMetadata(phase=Phase.PREFILL, token_slot_T=slots, has_lora=False)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, tokens, WIDTH, generator=generator).to(DEVICE)
    with forward_context(ForwardContext(backend=get_backend("triton"), meta=meta, segments=None)):
        return body(x, torch.tensor(1.25, device=DEVICE))


def see(body):
    with seeing_residual_sums(body) as found:
        run(body)
    return found[0]


def test_each_sum_goes_to_the_norm_behind_it(body):
    sums = see(body)
    assert sums.labels == {"residual sums Layer": 3}
    want = run(body, seed=2)
    assert body.ops.sums == 0
    sums.switch(True)
    assert torch.equal(run(body, seed=2), want)
    assert body.ops.sums == 6  # all of three layers' two: the last by the norm behind the layers
    sums.switch(False)
    assert torch.equal(run(body, seed=2), want)
    assert body.ops.sums == 6


@pytest.mark.parametrize("body", [[None, "in place", None]], indirect=True)
def test_a_layer_that_adds_in_place_is_one_of_halves_too(body):
    assert see(body).labels == {"residual sums Layer": 3}


@pytest.mark.parametrize(
    "body",
    [
        [None, spoil, None]
        for spoil in ("scaled", "changed", "own argument", "own number", "own flag", "twice", "zeros", "in a tuple")
    ],
    indirect=True,
)
def test_a_layer_that_does_anything_else_keeps_its_code(body):
    sums = see(body)
    assert sums.labels == {"residual sums Layer": 2}
    want = run(body, seed=2)
    sums.switch(True)
    assert torch.equal(run(body, seed=2), want)
    assert body.ops.sums == 3  # the first layer's last sum is its own, since no norm alone reads it


def test_a_norm_that_something_else_took_over_takes_no_sum(body):
    ours = body.norm.forward
    body.norm.forward = lambda x: ours(x)
    sums = see(body)
    want = run(body, seed=2)
    sums.switch(True)
    assert torch.equal(run(body, seed=2), want)
    assert body.ops.sums == 5


@pytest.mark.parametrize("reads", ["the last sum", "what layers are given"])
def test_who_reads_a_sum_besides_the_norm_shows_in_the_result(body, reads):
    """Why the engine compares: no hook sees it."""
    body.reads = reads
    sums = see(body)
    want = run(body, seed=2)
    sums.switch(True)
    assert not torch.equal(run(body, seed=2), want)


def test_what_the_first_layer_is_given_a_piece_of_stays_as_it_is(body):
    """A piece of one row has no gaps: it looks like a whole."""
    body.reads = "what its input is a piece of"
    sums = see(body)
    want = [run(body, seed=2, tokens=n) for n in (5, 1)]
    sums.switch(True)
    for n, one in zip((5, 1), want, strict=True):
        assert torch.equal(run(body, seed=2, tokens=n), one), n
    assert body.ops.sums == 12


@pytest.fixture
def model(tmp_path):
    save_model(tmp_path / "model", "qwen3_moe")
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    writer = AdapterWriter(catalogue, r=2, alpha=3, seed=5)
    writer.dense(*(t.name for t in catalogue if t.name.endswith(("q_proj", "k_proj", "o_proj")))).write(tmp_path / "a")
    return tmp_path


REQUESTS = [
    Request(token_ids=[5, 9, 11, 3, 8]),
    Request(token_ids=[7, 4, 20, 33], adapter="a"),
    Request(token_ids=[2], top_k=3, adapter="a"),
]


def rows(engine):
    return [(one.token_logprobs, one.top_logprobs) for one in engine.score(REQUESTS)]


def test_an_engine_gives_the_same_bits_with_and_without(model, monkeypatch):
    adapters = {"a": model / "a"}
    ops = Counting()
    with monkeypatch.context() as patch:
        patch.setattr(self_check, "_switch_on_what_is_equal", lambda *args: None)
        want = rows(PrefillEngine(model / "model", adapters=adapters, options=OPTIONS))
    engine = PrefillEngine(model / "model", adapters=adapters, options=OPTIONS)
    used = engine.report()["substitutes"]["used"]
    layers = engine.model_config.num_hidden_layers
    assert used["residual sums Qwen3MoeDecoderLayer"] == layers
    assert used["norms before rotary Qwen3MoeRMSNorm"] == 2 * layers
    for module in engine._base.body.modules():
        if isinstance(module.forward, FusedNorm):
            module.forward._ops = ops
    engine._backend.fused_ops = ops
    assert rows(engine) == want
    batches = ops.norms // layers
    assert (ops.sums, ops.norms) == (2 * layers * batches, layers * batches)
    assert batches >= 1
    for first in range(0, ops.sums, 2 * layers):
        assert len(set(ops.places[first : first + 2 * layers])) == 1, "one tensor holds all sums of a batch"


def test_what_changes_a_result_is_not_used_and_reported(model, monkeypatch):
    original = TritonOps.add_rms_norm

    def off_by_a_little(self, *args):
        return original(self, *args) * (1 + 1e-5)

    monkeypatch.setattr(TritonOps, "add_rms_norm", off_by_a_little)
    engine = PrefillEngine(model / "model", options=OPTIONS)
    found = engine.report()["substitutes"]
    assert found["kept"]["residual sums Qwen3MoeDecoderLayer"] == engine.model_config.num_hidden_layers
    assert "norms before rotary Qwen3MoeRMSNorm" in found["used"]
    own = type(engine._base.causal_lm).from_pretrained(model / "model").eval()
    (result,) = engine.score(REQUESTS[:1])
    assert (torch.tensor(result.token_logprobs[1:]) - logprobs(own, REQUESTS[0].token_ids)).abs().max() < 1e-4


def test_what_changes_queries_alone_shows_in_batches_of_two_tokens(model, monkeypatch):
    original = TritonOps.rotary

    def off(self, q, k, cos, sin, norms=None):
        q, k = original(self, q, k, cos, sin, norms)
        return q if norms is None else q * 1.5, k

    monkeypatch.setattr(TritonOps, "rotary", off)
    found = PrefillEngine(model / "model", options=replace(OPTIONS, max_tokens=2)).report()["substitutes"]
    assert "norms before rotary Qwen3MoeRMSNorm" in found["kept"]
    assert "residual sums Qwen3MoeDecoderLayer" in found["used"]


@pytest.mark.parametrize("ending", ["q_norm", "input_layernorm"])
def test_norms_that_an_adapter_replaces(model, ending):
    """Beside others that are not replaced: each run differs from the base, and equals the model with that weight."""
    targets = build_catalogue(open_base(model / "model").skeleton()).targets
    (name, *_) = [name for name in targets if name.endswith(ending)]
    weight = torch.randn(targets[name].shape)
    write_adapter(model / "own", {f"{PREFIX}{name}.weight": weight}, modules_to_save=[ending], target_modules=[])
    engine = PrefillEngine(model / "model", adapters={"own": model / "own"}, options=OPTIONS)
    changed = type(engine._base.causal_lm).from_pretrained(model / "model").eval().requires_grad_(False)
    base = [logprobs(changed, REQUESTS[0].token_ids)]
    parameters = {canonical(one): parameter for one, parameter in changed.named_parameters()}
    parameters[canonical(f"{name}.weight")].copy_(weight)
    base.append(logprobs(changed, REQUESTS[0].token_ids))
    results = engine.score([Request(token_ids=REQUESTS[0].token_ids, adapter=one) for one in ("__base__", "own")])
    for result, want in zip(results, base, strict=True):
        assert (torch.tensor(result.token_logprobs[1:]) - want).abs().max() < 1e-4
    assert (base[0] - base[1]).abs().max() > 0.01


def fusions(engine):
    """How many layers and norms do something together with another kernel."""
    found = engine.report()["substitutes"]["used"]
    return {name: count for name, count in found.items() if name.startswith(("residual sums", "norms before"))}


def test_what_other_threads_run_while_an_engine_looks_changes_nothing(model, monkeypatch):
    """All engines of an architecture, and its plain models, call one rotary function."""
    other = PrefillEngine(model / "model", options=OPTIONS)
    original = FusedNorm.__call__
    ran = []

    def call(self, hidden_states):
        result = original(self, hidden_states)
        if hidden_states.ndim == 4 and len(ran) < 2 and not self.left_to_rotary:
            ran.append(Thread(target=other.score, args=(REQUESTS[:1],)))
            ran[-1].start()
            ran[-1].join()
        return result

    monkeypatch.setattr(FusedNorm, "__call__", call)
    engine = PrefillEngine(model / "model", options=OPTIONS)
    assert ran
    assert fusions(engine) == fusions(other) != {}


def test_a_first_token_whose_embedding_is_zero_hides_nothing(tmp_path):
    """The row of a padding token often is."""
    own = save_model(tmp_path, "qwen3_moe")
    with torch.no_grad():
        own.model.embed_tokens.weight[0] = 0.0
    own.save_pretrained(tmp_path)
    found = fusions(PrefillEngine(tmp_path, options=OPTIONS))
    assert found == {"residual sums Qwen3MoeDecoderLayer": 2, "norms before rotary Qwen3MoeRMSNorm": 4}
