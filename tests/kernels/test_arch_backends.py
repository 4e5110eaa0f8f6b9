"""Architectures whose parts only look like those that fused substitutes replace, under the Triton backend."""

import pytest
import torch

from adapter_writers import AdapterWriter
from arch_world import logprobs, make, merged, runnable
from moelora import EngineOptions, PrefillEngine, Request
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue


@pytest.mark.parametrize(
    "name",
    [
        "bailing_hybrid",  # a norm with a gate
        "doge",  # an MLP that returns a tuple
        "inkling2",  # a head that leaves out padded rows of the vocabulary
        "zaya",  # rotary heads that are not contiguous
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_what_it_looks_like_stays(tmp_path, name):
    model_class, config = runnable(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(device=device, backend="triton", dtype="float32", graph="off", max_tokens=64)
    prompts = [[5, 9, 11, 3, 8], [7, 4]]
    results = PrefillEngine(tmp_path, options=options).score([Request(token_ids=ids) for ids in prompts])
    for ids, result in zip(prompts, results, strict=True):
        tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32 where a library takes it
        assert (torch.tensor(result.token_logprobs[1:]) - logprobs(model, ids)).abs().max() < tolerance


@pytest.mark.filterwarnings("ignore")
def test_norms_whose_input_is_in_float32_stay_beside_those_that_are_replaced(tmp_path):
    """Some layers of inkling2 are kept in float32 when the model is loaded in 16 bits."""
    model_class, config = runnable("inkling2", torch.float16)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(device=device, backend="triton", dtype="float16", graph="off", max_tokens=64)
    engine = PrefillEngine(tmp_path, options=options)
    assert any("Norm" in name for name in engine._substitutes.used)
    ids = [(7 * i) % 117 + 3 for i in range(20)]
    (result,) = engine.score([Request(token_ids=ids)])
    assert (torch.tensor(result.token_logprobs[1:]) - logprobs(model, ids)).abs().median() < 0.02


@pytest.mark.filterwarnings("ignore")
def test_inputs_that_are_transposed_are_adapted(tmp_path):
    """A state-space layer hands its projection channels that lie one behind the other."""
    model_class, config = runnable("jamba")
    make(model_class, config, seed=3).save_pretrained(tmp_path / "model")
    model = model_class.from_pretrained(tmp_path / "model").eval()
    catalogue = build_catalogue(open_base(tmp_path / "model").skeleton())
    writer = AdapterWriter(catalogue, r=2, alpha=3, seed=5)
    writer.dense(*(target.name for target in catalogue if target.name.endswith("mamba.x_proj"))).write(tmp_path / "a")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(device=device, backend="triton", dtype="float32", graph="off", max_tokens=64)
    ids = [5, 9, 11, 3, 8]
    engine = PrefillEngine(tmp_path / "model", adapters={"a": tmp_path / "a"}, options=options)
    tuned = logprobs(merged(model, catalogue, writer), ids)
    got = torch.tensor(
        engine.score([Request(token_ids=ids, adapter="a"), Request(token_ids=[4])])[0].token_logprobs[1:]
    )
    assert (got - tuned).abs().max() < (1e-2 if device == "cuda" else 1e-4)
    assert (logprobs(model, ids) - tuned).abs().max() > 0.05
