"""Routers of transformers that one kernel takes over, and those that keep their own code."""

from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

from kernels.dense_common import DEVICES
from moelora.models.routers import RouterForm
from moelora.models.substitutes import install_substitutes
from moelora_kernels.fused import TritonOps

DEVICE = torch.device(DEVICES[0])
SIZES = {"hidden_size": 24, "num_experts_per_tok": 3}
TAKEN = {
    "qwen3_moe": ("Qwen3MoeTopKRouter", {"num_experts": 10, "norm_topk_prob": True}, True),
    "qwen2_moe": ("Qwen2MoeTopKRouter", {"num_experts": 10, "norm_topk_prob": False}, False),
    "olmoe": ("OlmoeTopKRouter", {"num_experts": 10, "norm_topk_prob": False}, False),
    "mixtral": ("MixtralTopKRouter", {"num_local_experts": 10}, True),
}


def make(model, name, settings):
    module = import_module(f"transformers.models.{model}.modeling_{model}")
    router = getattr(module, name)(SimpleNamespace(**SIZES, **settings)).to(DEVICE)
    with torch.no_grad():
        for parameter in router.parameters():
            parameter.normal_()
    return router


def install(router):
    block = torch.nn.Module()
    block.gate = router
    return install_substitutes(block, TritonOps(), torch.float32, DEVICE, {})


@pytest.mark.parametrize("model", TAKEN)
@torch.inference_mode()
def test_a_router_of_the_usual_form_is_one_kernel(model):
    name, settings, normed = TAKEN[model]
    router = make(model, name, settings)
    x = torch.randn(2, 9, SIZES["hidden_size"], device=DEVICE)
    want = router(x)
    done = install(router)
    assert done.used[f"router {name}"] == 1
    assert not done.kept
    assert router.forward.args[2] == RouterForm(top_k=3, normed=normed, dtype=torch.float32)
    got = router(x)
    for one, other in zip(got, want, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
    assert torch.equal(got[2], want[2])
    assert router.get_parameter("weight").requires_grad  # the parameter stays where it was


class Sigmoid(torch.nn.Module):
    """As many newer models choose: every expert by itself."""

    def __init__(self):
        super().__init__()
        self.weight, self.top_k = torch.nn.Parameter(torch.randn(10, 24)), 3

    def forward(self, x):
        logits = torch.nn.functional.linear(x, self.weight)
        return logits, *logits.sigmoid().topk(self.top_k)


@torch.inference_mode()
def test_other_routers_keep_their_code():
    gpt_oss = make("gpt_oss", "GptOssTopKRouter", {"num_local_experts": 10})
    for router in (gpt_oss, Sigmoid().to(DEVICE)):
        x = torch.randn(5, SIZES["hidden_size"], device=DEVICE)
        want = router(x)
        done = install(router)
        assert not any(kind.startswith("router") for kind in done.used)
        for one, other in zip(router(x), want, strict=True):
            torch.testing.assert_close(one, other)


class Scaled(torch.nn.Module):
    """Looks like the usual form, and multiplies its weights by a factor."""

    def __init__(self, factor):
        super().__init__()
        self.weight, self.top_k, self.factor = torch.nn.Parameter(torch.randn(10, 24, device=DEVICE)), 3, factor

    def forward(self, x):
        logits = torch.nn.functional.linear(x, self.weight)
        values, indices = logits.float().softmax(-1).topk(self.top_k)
        return logits, values * self.factor, indices


@torch.inference_mode()
def test_each_setting_of_a_class_is_tried():
    model = torch.nn.ModuleList([Scaled(1.0), Scaled(2.5), Scaled(1.0)])
    done = install_substitutes(model, TritonOps(), torch.float32, DEVICE, {})
    assert (done.used["router Scaled"], done.kept["router Scaled"]) == (2, 1)
