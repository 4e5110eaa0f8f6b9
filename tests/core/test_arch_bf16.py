"""Every MoE architecture in bfloat16, its token mixers between the parts of graphs that a fake recorder plays back.

Some models keep weights in float32 then, and hand each other tensors of both dtypes; some layers return None where
others return a tensor. Only whether all of it runs, and on the right weights, is seen here: `test_arch_coverage.py`
compares to the last digit, in float32.
"""

import pytest
import torch

import moelora.engine
import moelora.options
from arch_world import ARCHITECTURES, adapt_everything, logprobs, make, runnable
from fake_recorder import CapturableTorchBackend, FakeRecorder
from moelora import EngineOptions, GraphMode, PrefillEngine, Request, RunMode
from moelora.graphs.base import BodyOutput
from moelora.graphs.select import select_runner
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
@pytest.mark.filterwarnings("ignore")
def test_bfloat16_between_the_parts_of_graphs(tmp_path, monkeypatch, name):
    model_class, config = runnable(name, torch.bfloat16)
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    adapt_everything(build_catalogue(open_base(tmp_path / "model").skeleton()), tmp_path / "tuned", seed=5)
    monkeypatch.setattr(moelora.options, "get_backend", lambda backend: CapturableTorchBackend())
    monkeypatch.setattr(moelora.engine, "select_runner", lambda wanted: select_runner(wanted, FakeRecorder))
    options = EngineOptions(
        device="cpu", dtype="bfloat16", graph=GraphMode.BREAKABLE, max_tokens=64, buckets=(64,), score_chunk_rows=64
    )
    engine = PrefillEngine(tmp_path / "model", adapters={"tuned": tmp_path / "tuned"}, options=options)
    ids = [(7 * i) % 117 + 3 for i in range(30)]
    requests = [
        Request(token_ids=ids),
        Request(token_ids=ids[:20], adapter="tuned"),
        Request(token_ids=ids[5:7], adapter="tuned"),
    ]
    results = engine.score(requests)
    assert [result.error for result in results] == [None] * 3
    packs, graphs = engine._base.architecture.packs, engine.report()["graphs"]
    assert graphs["mode"] == ("breakable" if packs else "off"), graphs["notes"]
    assert {result.mode for result in results} == {RunMode.BREAKABLE if packs else RunMode.EAGER}
    if packs:
        monkeypatch.setattr(engine._runner, "run", lambda batch: padded(engine._runner, batch))
        again = engine.score(requests)
        assert [result.token_logprobs for result in again] == [result.token_logprobs for result in results]
    exact = logprobs(model_class.from_pretrained(tmp_path / "model").eval(), ids)
    # Rounding moves tokens between experts, so that some are far off.
    assert (torch.tensor(results[0].token_logprobs[1:]) - exact).abs().median() < 0.5


def padded(runner, batch):
    return BodyOutput(hidden_TH=runner.run_padded(batch), mode=RunMode.EAGER, admission=runner.admit(batch))
