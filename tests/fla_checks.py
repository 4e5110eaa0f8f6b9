"""Run by test_together.py, with a package in the place of flash-linear-attention: `python fla_checks.py MODEL`.

transformers looks for the package once, when a modelling file is imported. Prints what was found as JSON.
"""

import json
import sys

import pytest
import torch
from fla.ops import gated_delta_rule

import moelora.engine
import moelora.graphs.select
import moelora.options
from core.test_graphs import CapturableTorchBackend, FakeRecorder
from moelora import EngineOptions, GraphMode, PrefillEngine, Request
from moelora.graphs.select import select_runner
from moelora.models.base_model import open_base


def main(model: str) -> None:
    gated_delta_rule.refusing = True  # the probe runs on the CPU, whatever the device of the run
    verdict = open_base(model).architecture
    gated_delta_rule.refusing = False
    patch = pytest.MonkeyPatch()
    patch.setattr(moelora.options, "get_backend", lambda name: CapturableTorchBackend())
    patch.setattr(moelora.engine, "select_runner", lambda wanted: select_runner(wanted, FakeRecorder))
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 9, (12,), generator=generator).tolist()
    requests = [Request(token_ids=torch.randint(0, 90, (n,), generator=generator).tolist()) for n in lengths]
    found = {"packs": verdict.packs, "loops": [loop.name for loop in verdict.loops], "requests": len(requests)}
    scores = {}
    for mode in (GraphMode.OFF, GraphMode.BREAKABLE):
        engine = PrefillEngine(model, options=EngineOptions(device="cpu", graph=mode, max_tokens=128, buckets=(128,)))
        gated_delta_rule.CALLS.clear()
        scores[mode] = engine.score(requests)
        found[f"calls {mode}"] = list(gated_delta_rule.CALLS)
        found[f"modes {mode}"] = sorted({str(result.mode) for result in scores[mode]})
    alone = [engine.score([request])[0] for request in requests]
    found["layers"] = list(engine.model_config.layer_types).count("linear_attention")
    found["off"] = max(
        abs(a - b)
        for results in scores.values()
        for one, other in zip(results, alone)
        for a, b in zip(one.token_logprobs[1:], other.token_logprobs[1:])
    )
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
