"""Architectures whose parts only look like those that fused substitutes replace, under the Triton backend."""

import pytest
import torch

from arch_world import logprobs, make, tiny
from moelora import EngineOptions, PrefillEngine, Request


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
    model_class, config = tiny(name)
    make(model_class, config, seed=3).save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path).eval()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = EngineOptions(device=device, backend="triton", dtype="float32", graph="off", max_tokens=64)
    prompts = [[5, 9, 11, 3, 8], [7, 4]]
    results = PrefillEngine(tmp_path, options=options).score([Request(token_ids=ids) for ids in prompts])
    for ids, result in zip(prompts, results, strict=True):
        tolerance = 1e-2 if device == "cuda" else 1e-4  # TF32 where a library takes it
        assert (torch.tensor(result.token_logprobs[1:]) - logprobs(model, ids)).abs().max() < tolerance
