"""Calls of `torch.topk` inside a router, in every form: what is taken over gives what torch gives, or its error."""

import numpy
import pytest
import torch

from moelora.models.top_k import install_top_k


class CountingOps:
    """Takes what the kernel takes, by torch's own means, and counts it. The calls that reach it have a whole k."""

    def __init__(self):
        self.taken = 0

    def top_k(self, x_TE, k):
        assert type(k) is int
        if x_TE.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            return None
        self.taken += 1
        order = x_TE.float().sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return x_TE.gather(1, order), order


class Router(torch.nn.Module):
    def choose(self, call):
        return call()  # stands for a topk(

    @property
    def topk(self):
        return self.choose  # no method, though it says topk(

    @staticmethod
    def apart(x):
        return torch.topk(x, 2)


class Experts(torch.nn.Module):
    is_transposed, has_gate, down_proj = False, True, None


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = Router(), Experts()


X = torch.randn(5, 9, generator=torch.Generator().manual_seed(0))

TAKEN = {
    "function": lambda: torch.topk(X, 3),
    "method": lambda: X.topk(3),
    "names": lambda: torch.topk(input=X, k=3, dim=1, largest=True, sorted=True),
    "positions": lambda: X.topk(3, -1, True),
    "one dimension": lambda: torch.topk(X[0], 3),
    "three dimensions": lambda: torch.topk(X.view(5, 3, 3), 2),
    "transposed": lambda: torch.topk(X.t(), 3),
    "16 bits": lambda: torch.topk(X.bfloat16(), 1),
    "result by name": lambda: X.topk(2).indices,
}
LEFT = {
    "no rows": lambda: torch.topk(X[:0], 3),
    "another dimension": lambda: torch.topk(X, 3, 0),
    "smallest": lambda: X.topk(3, -1, False),
    "no dimension": lambda: torch.topk(torch.tensor(3.0), 1),
    "into tensors": lambda: torch.topk(X, 3, out=(torch.empty(5, 3), torch.empty(5, 3, dtype=torch.int64))),
    "whole numbers": lambda: torch.topk((X * 9).int(), 3),
    "doubles": lambda: torch.topk(X.double(), 3),
    "k of 0": lambda: torch.topk(X, 0),
    "nothing wide": lambda: torch.topk(X[:, :0], 0),
    "k as a tensor": lambda: torch.topk(X, torch.tensor(3)),
    "k of numpy": lambda: torch.topk(X, numpy.int64(3)),
}
REFUSED = {
    "k too large": lambda: torch.topk(X, 10),
    "negative k": lambda: torch.topk(X, -1),
    "k of nothing": lambda: torch.topk(X[:, :0], 1),
    "k as a float": lambda: torch.topk(X, 2.0),
    "no k": lambda: torch.topk(X),
}


def wrapped():
    block, ops = Block(), CountingOps()
    assert install_top_k(block, ops) == ["Router"]
    return block.gate, ops


def equal(one, other):
    if isinstance(one, tuple):
        return type(one) is type(other) and all(map(equal, one, other))
    return one.dtype is other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("name", [*TAKEN, *LEFT])
def test_gives_what_torch_gives(name):
    router, ops = wrapped()
    call = {**TAKEN, **LEFT}[name]
    assert equal(router.choose(call), call())
    assert ops.taken == (name in TAKEN)
    assert equal(router.topk(call), call())


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_torch_refuses(name):
    router, _ = wrapped()
    call = REFUSED[name]
    with pytest.raises((RuntimeError, TypeError)) as by_torch:
        call()
    with pytest.raises(by_torch.type) as by_wrapped:
        router.choose(call)
    assert str(by_wrapped.value) == str(by_torch.value)
    assert equal(router.choose(TAKEN["function"]), TAKEN["function"]())  # the mode ended with the exception


def test_methods_without_a_module_stay_torchs():
    router, ops = wrapped()
    assert equal(router.apart(X), X.topk(2))
    assert ops.taken == 0
