"""The calls of topk that a backend's kernel takes over: those of routers, in their usual form, and no others."""

import pytest
import torch
from torch import nn

from moelora.models.top_k import install_top_k


class Ops:
    """Takes rows of up to 8; remembers what it was asked for."""

    def __init__(self):
        self.asked = []

    def top_k(self, x_TE, k):
        self.asked.append((tuple(x_TE.shape), k))
        if x_TE.shape[1] > 8:
            return None
        return tuple(x_TE.topk(k))


class Experts(nn.Module):
    is_transposed, has_gate, down_proj = False, True, None


class Router(nn.Module):
    def forward(self, x):
        return torch.topk(x, 2, dim=-1)

    def groups(self, x):
        return x.topk(k=2, sorted=False).indices

    def other_forms(self, x):
        return x.topk(2, dim=0).values, x.topk(1, largest=False).values, torch.topk(x[:, :0], 0).values

    def no_choice(self, x):
        return x.sum()


class Indexer(nn.Module):
    def forward(self, x):
        return torch.topk(x, 2).indices


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Router(), Experts()

    def forward(self, x):
        return self.gate(x).values.topk(1).values


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.mlp = Indexer(), Block()


@pytest.fixture
def world():
    layer, ops = Layer(), Ops()
    found = install_top_k(layer, ops)
    assert sorted(found) == ["Block", "Router"]
    return layer, ops


def test_routers_are_taken_over_and_give_named_results(world):
    layer, ops = world
    x = torch.randn(2, 3, 8)
    result, want = layer.mlp.gate(x), torch.topk(x, 2)
    assert ops.asked == [((6, 8), 2)]
    assert torch.equal(result.values, want.values)
    assert torch.equal(result.indices, want.indices)
    assert torch.equal(layer.mlp.gate.groups(x[0]), want.indices[0])
    assert ops.asked[1:] == [((3, 8), 2)]


def test_the_block_around_a_router_is_taken_over_too(world):
    layer, ops = world
    x = torch.randn(4, 8)
    assert torch.equal(layer.mlp(x), x.max(dim=-1, keepdim=True).values)
    assert [k for _, k in ops.asked][-1] == 1


def test_what_the_kernel_refuses_reaches_torch(world):
    layer, ops = world
    x = torch.randn(4, 9)
    assert torch.equal(layer.mlp.gate(x).indices, torch.topk(x, 2).indices)
    assert ops.asked == [((4, 9), 2)]


def test_other_forms_reach_torch(world):
    layer, ops = world
    x = torch.randn(4, 5)
    columns, least, nothing = layer.mlp.gate.other_forms(x)
    assert not ops.asked
    assert torch.equal(columns, x.topk(2, dim=0).values)
    assert torch.equal(least, x.topk(1, largest=False).values)
    assert nothing.shape == (4, 0)


def test_an_indexer_of_attention_keeps_torch(world):
    """Its scores are often equal after a ReLU, and which of the equals it takes decides what a token sees."""
    layer, ops = world
    assert torch.equal(layer.attention(torch.zeros(3, 8)), torch.zeros(3, 8).topk(2).indices)
    assert not ops.asked
