"""Functions called for several requests at once: only where that gives what calls for each alone give."""

import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from arch_world import make, tiny
from moelora.backends.base import LoraMetadata
from moelora.backends.torch_reference import TorchBackend
from moelora.models.context import ForwardContext, GraphBreak, Segments, current_context, forward_context
from moelora.models.mixers import Loop, LoopedCall
from moelora.models.stacks import alike_lengths
from moelora.types import Phase

TESTS = Path(__file__).resolve().parents[1]
LENGTHS = (5, 1, 16, 7, 2, 30, 15)


def context_of(lengths, backend=None):
    slots = torch.repeat_interleave(torch.arange(len(lengths), dtype=torch.int32), torch.tensor(lengths))
    ends = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return ForwardContext(
        backend=backend or TorchBackend(),
        meta=LoraMetadata(phase=Phase.PREFILL, token_slot_T=slots, has_lora=True),
        segments=Segments(cu_seqlens_S1=ends, lengths=tuple(lengths), longest=max(lengths)),
    )


def sums(x):
    """A recurrence with a batch dimension."""
    return x.cumsum(1)


def with_slots(x):
    """One with LoRA in it, which takes the slot of every row from the context of the forward."""
    slots = current_context().meta.token_slot_T
    assert slots.shape[0] == x.shape[0] * x.shape[1]
    return x.cumsum(1) * (1 + slots.view(x.shape[0], x.shape[1], 1))


def convolution(x):
    return functional.conv1d(functional.pad(x.transpose(1, 2), (3, 0)), torch.ones(3, 1, 4), groups=3).transpose(1, 2)


def looks_ahead(x):
    return x.flip(1).cumsum(1).flip(1)


def mixes_the_batch(x):
    return x.cumsum(1) - x[:, :1].mean(0, keepdim=True)


def keeps_no_batch(x):
    return x.flatten(0, 1).cumsum(0)[None]


def check(function, lengths=LENGTHS, dim=1, backend=None):
    """Calls it on a row of requests, twice, and returns the shapes of the calls of the second time."""
    shapes = []

    def spied(x):
        shapes.append(tuple(x.shape))
        return function(x)

    loop = Loop(name="function", namespace="somewhere", inputs={"[0][0]": (dim,)}, outputs={"": (dim,)})
    looped = LoopedCall(spied, loop)
    for seed in range(2):
        shapes.clear()
        x = torch.randn(1, sum(lengths), 3, generator=torch.Generator().manual_seed(seed))
        context = context_of(lengths, backend)
        with forward_context(context):
            got = looped(x)
        alone = []
        for (rows, part), slot in zip(context.alone(context.segments), range(len(lengths))):
            assert bool((part.meta.token_slot_T == slot).all())
            with forward_context(part):
                alone.append(function(x[:, rows]))
        torch.testing.assert_close(got, torch.cat(alone, 1))
    return shapes


@given(st.lists(st.integers(0, 500), min_size=1, max_size=80))
def test_groups_hold_every_request_once_and_little_besides(lengths):
    groups = alike_lengths(lengths)
    assert sorted(i for group in groups for i in group) == [i for i, length in enumerate(lengths) if length]
    filled = sum(len(group) * max(lengths[i] for i in group) for group in groups)
    assert filled <= 2 * sum(lengths)
    assert len(groups) <= 9


@pytest.mark.parametrize("function", [sums, convolution, with_slots])
def test_requests_of_like_length_are_called_side_by_side(function):
    assert check(function) == [(3, 30, 3), (2, 7, 3), (2, 2, 3)]
    assert check(function, [4] * 50) == [(50, 4, 3)]


@pytest.mark.parametrize("function", [looks_ahead, mixes_the_batch, keeps_no_batch])
def test_what_side_by_side_gives_something_else_is_called_for_each(function):
    assert check(function) == [(1, n, 3) for n in LENGTHS]


def test_batch_invariant_runs_call_for_each():
    backend = TorchBackend()
    backend.batch_invariant = True
    assert check(sums, backend=backend) == [(1, n, 3) for n in LENGTHS]


class Kept(GraphBreak):
    """Keeps what a breakable graph keeps of each piece between its parts; its memory is another's to hold."""

    def __init__(self, segments):
        self.works = []
        self._segments = segments

    @property
    def segments(self):
        return self._segments

    def run(self, work, tensors):
        work(self._segments, *tensors)
        self.works.append(work)


def test_what_is_kept_between_the_parts_of_a_graph_holds_none_of_its_memory():
    loop = Loop(name="function", namespace="somewhere", inputs={"[0][0]": (1,)}, outputs={"": (1,)})
    looped = LoopedCall(sums, loop)
    context = context_of(LENGTHS)
    kept = Kept(context.segments)
    x = torch.randn(1, sum(LENGTHS), 3)
    with forward_context(replace(context, graph_break=kept)):
        expected = looped(x)  # learns the form of its results
        out = looped(x)
    assert torch.equal(out, expected)
    assert len(kept.works) == 1
    memory = [weakref.ref(out.untyped_storage()), weakref.ref(x.untyped_storage())]
    del out, x
    assert [one() for one in memory] == [None, None]


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_moe"])
def test_a_package_for_linear_attention_is_called_once_a_layer(tmp_path, name):
    """It is found by transformers, told of boundaries, and not needed by the probe, which runs on the CPU."""
    make(*tiny(name), seed=3).save_pretrained(tmp_path / "model")
    path = os.pathsep.join([str(TESTS / "fake_fla"), str(TESTS), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "fla_checks.py"), str(tmp_path / "model")],
        env={**os.environ, "PYTHONPATH": path, "XDG_CACHE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["packs"]
    assert sorted(found["loops"]) == ["causal_conv1d_fn", "torch_chunk_gated_delta_rule"]
    for mode in ("off", "breakable"):
        assert found[f"calls {mode}"] == [found["requests"]] * found["layers"]
    assert found["modes breakable"] == ["breakable"]
    assert found["off"] < 1e-4
