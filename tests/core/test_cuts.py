"""Joining what a call returned for each request into what it would have returned for the row."""

import pytest
import torch

from moelora.models.cuts import Joined, NotCuttable

DIMS = {"[0]": (1,), "[1]": (0,), "[2]": ()}


def part(length, with_indices=True, fixed=7.0):
    """Hidden states `[1, length, 2]`, indices `[length]` or None, and a tensor that counts no tokens."""
    indices = torch.full((length,), length) if with_indices else None
    return torch.full((1, length, 2), float(length)), indices, torch.tensor([fixed])


def test_rows_of_every_part_and_zeros_elsewhere():
    joined = Joined(part(2), DIMS, tokens=6)
    joined.put(slice(0, 2), part(2))
    joined.put(slice(2, 5), part(3, fixed=8.0))
    hidden, indices, fixed = joined.result
    assert hidden[0, :, 0].tolist() == [2, 2, 3, 3, 3, 0]
    assert indices.tolist() == [2, 2, 3, 3, 3, 0]
    assert fixed.tolist() == [8.0]


def test_what_counts_tokens_in_one_layer_may_be_none_in_another():
    joined = Joined(part(2, with_indices=False), DIMS, tokens=4)
    joined.put(slice(0, 2), part(2, with_indices=False))
    form = joined.form()
    assert [x.device.type for x in form.moving] == ["meta"]
    memory = form.zeros(torch.device("cpu"))
    over = form.over(memory)
    over.put(slice(1, 3), part(2, with_indices=False))
    hidden, indices, _ = over.result
    assert indices is None
    assert hidden is memory[0]
    assert hidden[0, :, 1].tolist() == [0, 2, 2, 0]


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_in_the_results_of_some_requests_alone_is_refused(first):
    joined = Joined(part(2, with_indices=first), DIMS, tokens=4)
    with pytest.raises(NotCuttable, match=r"\[1\] is a tensor in the results of some requests alone"):
        joined.put(slice(0, 2), part(2, with_indices=not first))
