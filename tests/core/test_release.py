"""An engine gives its memory back with the last reference to it, without waiting for a garbage collection.

Collections of the oldest objects are rare in a process that has imported transformers; until one came, the weights of
every engine so far would stay on the device.
"""

import gc
import subprocess
import sys
import weakref
from contextlib import contextmanager

import pytest
import torch

import moelora.engine
import moelora.options
from adapter_writers import PREFIX, write_adapter
from arch_world import adapt_everything, make, runnable
from core.test_graphs import CapturableTorchBackend, FakeRecorder, FakeRecording
from moelora import CheckpointError, EngineOptions, GraphMode, PrefillEngine, Request
from moelora.graphs.eager import EagerRunner
from moelora.graphs.select import select_runner
from moelora.meter import DeviceMeter
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue


class PartsRecorder(FakeRecorder):
    """Keeps what a recorder of CUDA graphs keeps: the pieces between the parts, and nothing of the forward itself."""

    def record(self, work):
        work()
        return FakeRecording(lambda: None)

    def record_parts(self, work):
        pieces = []

        def pause(eager):
            eager()
            pieces.append(eager)

        work(pause)
        return FakeRecording(lambda: [piece() for piece in pieces])


@contextmanager
def no_collections():
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def save(folder, name):
    """A model, an adapter on all it can take, and one that replaces a norm."""
    model_class, config = runnable(name)
    make(model_class, config, seed=3).save_pretrained(folder / "model")
    catalogue = build_catalogue(open_base(folder / "model").skeleton())
    adapt_everything(catalogue, folder / "tuned", seed=5)
    norm = next(target for target in catalogue if target.name.endswith("input_layernorm"))
    tensors = {f"{PREFIX}{norm.name}.weight": torch.rand(norm.shape)}
    write_adapter(folder / "norm", tensors, r=2, target_modules=[], modules_to_save=[norm.name])


def used_engine(folder, names, **options):
    """What an engine that has scored consists of, as weak references."""
    engine = PrefillEngine(
        folder / "model",
        adapters={name: folder / name for name in names},
        options=EngineOptions(**{"device": "cpu", "max_tokens": 64, "dtype": "float32", **options}),
    )
    names = ["__base__", *names]
    engine.score([Request(token_ids=list(range(5, 9 + i)), adapter=name) for i, name in enumerate(names)])
    stream = engine.score_stream(Request(token_ids=[7, 8, 9], adapter=name) for name in names for _ in range(30))
    next(stream)  # and is left in the middle
    parts = {"engine": engine, "model": engine._base.causal_lm, "bank": engine._bank, "runner": engine._runner}
    parts |= {f"weight {i}": p for i, p in enumerate(engine._base.causal_lm.parameters())}
    return {name: weakref.ref(part) for name, part in parts.items()}


def alive(references):
    return [name for name, reference in references.items() if reference() is not None]


ARCHITECTURES = {
    "qwen3_moe": "routers, experts of the registry",
    "qwen3_5_moe": "functions called once per request",
    "deepseek_v4": "modules called once per request",
    "mixtral+dynamic": "a module that keeps a state",
    "aria": "experts outside the registry, in some versions",
    "llama4": "routers that are linear layers",
}


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_an_engine_is_freed_with_its_last_reference(tmp_path, name):
    save(tmp_path, name)
    with no_collections():
        assert not alive(used_engine(tmp_path, ["tuned", "norm"]))


@pytest.mark.parametrize(
    ("name", "mode"),
    [("qwen3_moe", GraphMode.FULL), ("qwen3_5_moe", GraphMode.BREAKABLE), ("qwen3_moe", GraphMode.AUTO)],
)
@pytest.mark.filterwarnings("ignore")
def test_graphs_do_not_hold_the_engine(tmp_path, monkeypatch, name, mode):
    save(tmp_path, name)
    monkeypatch.setattr(moelora.options, "get_backend", lambda name: CapturableTorchBackend())
    monkeypatch.setattr(moelora.engine, "select_runner", lambda wanted: select_runner(wanted, PartsRecorder))
    with no_collections():
        references = used_engine(tmp_path, ["tuned"], graph=mode, buckets=(16, 64))
        assert not alive(references)


FIRST_ENGINE = """
import gc, sys, weakref
from moelora import EngineOptions, PrefillEngine
gc.collect()
gc.disable()
def made():
    return weakref.ref(PrefillEngine(sys.argv[1], options=EngineOptions(device="cpu")))
sys.exit(made()() is not None)
"""


@pytest.mark.filterwarnings("ignore")
def test_what_the_first_engine_imports_does_not_hold_it(tmp_path):
    save(tmp_path, "qwen3_moe")
    subprocess.run([sys.executable, "-c", FIRST_ENGINE, str(tmp_path / "model")], check=True)


@pytest.mark.parametrize(("name", "backend"), [("qwen3_5_moe", "triton"), ("qwen3_moe", "csgmv")])
@pytest.mark.filterwarnings("ignore")
def test_kernels_do_not_hold_the_engine(tmp_path, name, backend):
    save(tmp_path, name)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with no_collections():
        references = used_engine(tmp_path, ["tuned"], backend=backend, device=device)
        assert not {"engine", "model", "bank", "runner"} & set(alive(references))
        if device == "cpu":  # Triton's interpreter keeps the arguments of its kernels in cycles of its own
            gc.collect()
        assert not alive(references)


def test_a_refused_model_is_freed_with_the_error(tmp_path, monkeypatch):
    save(tmp_path, "qwen3_moe")
    models, load_base = [], moelora.engine.load_base

    def load(*args, **kwargs):
        base = load_base(*args, **kwargs)
        models.append(weakref.ref(base.causal_lm))
        return base

    def fail(*args):
        raise RuntimeError("no")

    monkeypatch.setattr(moelora.engine, "load_base", load)
    monkeypatch.setattr(EagerRunner, "run", fail)
    with no_collections():
        try:
            used_engine(tmp_path, ["tuned"])
        except CheckpointError:
            assert models[0]() is not None
        assert models[0]() is None


def test_the_peak_of_an_engine_is_its_own(monkeypatch):
    """The device keeps one peak for all engines of a process, dead or alive."""
    device, peak = torch.device("cuda", 0), {"now": 900, "highest": 5000}

    def take(nbytes):
        peak["now"] += nbytes
        peak["highest"] = max(peak["highest"], peak["now"])

    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: peak["now"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: peak["highest"])
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda _: peak.update(highest=peak["now"]))
    first = DeviceMeter(device)
    first.kept("base", lambda: take(100))
    assert (first.parts["base"], first.highest()) == (100, 1000)
    first.held("activations", lambda: (take(70), take(-70)))
    second = DeviceMeter(device)
    assert second.highest() == 1000
    second.held("activations", lambda: (take(10), take(-10)))
    assert (first.highest(), second.highest()) == (1070, 1010)
    take(200)
    assert (first.highest(), second.highest()) == (1200, 1200)
    assert first.parts["activations"] == 70
