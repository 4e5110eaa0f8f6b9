"""The plan's estimate of device memory against what a run measures, part by part."""

import gc

import pytest
import torch

from gpu.graph_world import QWEN3_30B_A3B, make_engine, mixed_requests, write_adapters, write_config
from moelora import EngineOptions, GraphMode
from moelora.jobs.plan import PlanningEngine

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    folder = tmp_path_factory.mktemp("memory")
    model = write_config(folder / "model", "qwen3_moe", **{**QWEN3_30B_A3B, "num_hidden_layers": 4})
    return model, write_adapters(folder / "adapters", model, (16,) * 8)


@pytest.mark.large
@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("mode", [GraphMode.OFF, GraphMode.FULL, GraphMode.BREAKABLE])
def test_the_estimate_is_within_a_tenth_of_what_the_run_reports(world, backend, mode):
    options = EngineOptions(
        device="cuda", dtype="bfloat16", load_format="dummy", backend=backend, graph=mode, max_tokens=8192
    )
    planned = PlanningEngine(world[0], adapters=world[1], options=options).memory.to_json()
    engine = make_engine(*world, mode=mode, backend=backend)
    measured = engine.report()["memory_measured"]
    table = {name: (planned[name], measured[name], measured[name] / max(planned[name], 1)) for name in measured}
    print(
        "\n"
        + "\n".join(f"{name:<14} {a / 2**20:9.1f} {b / 2**20:9.1f} MiB {r:6.3f}" for name, (a, b, r) in table.items())
    )
    for name in ("base", "bank", "static"):
        assert measured[name] == pytest.approx(planned[name], rel=0.01), table
    assert measured["needed"] == pytest.approx(planned["needed"], rel=0.1), table
    engine.score(mixed_requests(engine, 200, 700))
    assert engine.report()["peak_device_bytes"] <= 1.1 * planned["needed"], table


KEPT_BY_LIBRARIES = 100 * 2**20
"""Bytes of workspaces that cuBLAS keeps for every stream it has seen; the engine holds 6 GB of weights alone."""


@pytest.mark.large
@pytest.mark.parametrize("backend", ["triton", "csgmv"])
@pytest.mark.parametrize("mode", [GraphMode.OFF, GraphMode.FULL, GraphMode.BREAKABLE])
def test_an_engine_gives_its_memory_back_with_its_last_reference(world, backend, mode):
    gc.collect()
    before = torch.cuda.memory_allocated()
    gc.disable()  # collections come when they like
    try:
        engine = make_engine(*world, mode=mode, backend=backend)
        engine.score(mixed_requests(engine, 40, 700))
        held = torch.cuda.memory_allocated() - before
        del engine
        left = torch.cuda.memory_allocated() - before
    finally:
        gc.enable()
    print(f"{backend} {mode}: {held / 2**20:.0f} MiB held, {left / 2**20:.1f} MiB left")
    assert held > 6e9
    assert left < KEPT_BY_LIBRARIES
