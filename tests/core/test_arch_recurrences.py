"""Recurrences and convolutions found by the probe: called once a request, or once for all if they know boundaries."""

import itertools

import pytest
import torch

from arch_world import make, runnable, tiny
from core.test_arch_probe import unheard_of
from moelora import EngineOptions, PrefillEngine, Request
from moelora.models.context import forward_context
from moelora.models.mixers import Loop, LoopedCall
from moelora.models.probe import probe
from moelora.models.trial import Trial

FUNCTIONS = {
    "qwen3_next": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "qwen3_5_moe": ("causal_conv1d_fn", "torch_chunk_gated_delta_rule"),
    "bailing_hybrid": ("causal_conv1d_fn", "chunk_kimi_delta_attention"),
    "granitemoehybrid": ("causal_conv1d_fn", "mamba2_chunk_scan"),
    "jamba": ("causal_conv1d_fn", "mamba_selective_scan"),
    "lfm2_moe": ("causal_conv1d_fn",),
}


@pytest.mark.parametrize("name", list(FUNCTIONS))
@pytest.mark.filterwarnings("ignore")
def test_projections_around_a_recurrence_stay_packed(name):
    """Only the convolution and the recurrence are called once per request, not the module around them."""
    runnable(name)
    verdict = probe(unheard_of(name))
    assert verdict.looped == FUNCTIONS[name]
    assert all(loop.namespace.startswith("transformers.models.") for loop in verdict.loops)


def test_functions_of_modelling_files_are_the_originals_outside_an_engines_forward(tmp_path):
    model_class, config = tiny("lfm2_moe")
    model = make(model_class, config, seed=4)
    ids = torch.tensor([list(range(3, 20))])
    before = model(input_ids=ids, use_cache=False).logits
    model.save_pretrained(tmp_path)
    PrefillEngine(tmp_path, options=EngineOptions(device="cpu")).score(
        [Request(token_ids=[5, 6]), Request(token_ids=[7])]
    )
    assert torch.equal(model(input_ids=ids, use_cache=False).logits, before)


def running_sums(calls, *, honest=True, takes=True, decay=1.0):
    """A recurrence: sums along the row, which begin anew at boundaries if it is told of them."""

    def sums(x):
        weights = decay ** torch.arange(x.shape[1])
        return torch.stack(
            [(x[:, : t + 1] * weights[: t + 1].flip(0)[None, :, None]).sum(1) for t in range(x.shape[1])], 1
        )

    def recurrence(x, *, cu_seqlens=None, **others):
        calls.append(x.shape[1])
        if cu_seqlens is None or not takes:
            if cu_seqlens is not None and honest:
                raise ValueError("cannot keep requests apart")
            return sums(x)
        return torch.cat([sums(x[:, a:b]) for a, b in itertools.pairwise(cu_seqlens.tolist())], dim=1)

    return recurrence


@pytest.mark.parametrize("decay", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize(("honest", "takes", "second"), [(True, True, [9]), (True, False, [5]), (False, False, [5])])
def test_kernels_that_know_boundaries_are_called_once(honest, takes, second, decay):
    """One that refuses them, and one that takes no notice of them, get requests of like length side by side.

    However little a state leaves of the request before: less, with the lower decays, than a kernel's rounding.
    """
    calls = []
    loop = Loop(name="recurrence", namespace="somewhere", inputs={"[0][0]": (1,)}, outputs={"": (1,)})
    looped = LoopedCall(running_sums(calls, honest=honest, takes=takes, decay=decay), loop)
    x = torch.randn(1, 9, 3)
    whole = running_sums([], decay=decay)
    expected = torch.cat([whole(x[:, :4]), whole(x[:, 4:])], dim=1)
    context = Trial(make(*tiny("olmoe"), seed=1).model)._context([torch.zeros(4), torch.zeros(5)])
    with forward_context(context):
        torch.testing.assert_close(looped(x), expected)
        calls.clear()
        torch.testing.assert_close(looped(x), expected)
    assert calls == second
