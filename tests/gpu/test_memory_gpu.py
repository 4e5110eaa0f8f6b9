"""The plan's estimate of device memory against what a run measures, part by part."""

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
