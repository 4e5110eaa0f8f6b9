"""Floors of time against arithmetic by hand, and the part that each kernel counts for."""

import re
from pathlib import Path

import pytest
import torch

from moelora.backends.base import MoeShape
from moelora.bench.ceilings import Ceilings, measure_ceilings
from moelora.bench.floor import (
    AttentionShape,
    Cost,
    DecoderShape,
    Linears,
    batch_costs,
    decoder_shape,
    floor_seconds,
    touched_experts,
)
from moelora.bench.parts import PARTS, KernelRun, busy_seconds, part_of, seconds_by_part, top_kernels
from moelora.models.base_model import open_base
from moelora.models.catalogue import build_catalogue
from moelora.models.experts import moe_shapes

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "benchmarks" / "shapes"

LAYER = MoeShape(num_experts=8, top_k=2, hidden=16, up_out=24, inter=12, max_rank_up=0, max_rank_down=0)
SHAPE = DecoderShape(
    linears=Linears(weights=1000, widths=70),
    experts=(LAYER, LAYER),
    attention=(AttentionShape(width=64, kv_width=32), AttentionShape(width=64, kv_width=32, window=3)),
    hidden=16,
    vocab=100,
    itemsize=2,
)


def shape_of(name: str) -> tuple[DecoderShape, torch.nn.Module]:
    """A published model in bfloat16, and its skeleton."""
    source = open_base(SHAPES / name, load_format="dummy")
    skeleton = source.skeleton()
    config = source.config.get_text_config()
    return decoder_shape(config, build_catalogue(skeleton), moe_shapes(skeleton, config, {}), 2), skeleton


class TestFloor:
    def test_costs_by_hand(self):
        costs = batch_costs(SHAPE, [5, 2], scored_rows=3)
        assert costs["dense"] == Cost(bytes=2 * (1000 + 7 * 70), flops=2 * 7 * 1000)
        per_expert = 16 * 24 + 12 * 16
        touched = 8 * (1 - 0.75**7)
        assert costs["experts"].flops == 2 * 2 * 7 * 2 * per_expert
        assert costs["experts"].bytes == pytest.approx(2 * 2 * (touched * per_expert + 2 * 7 * 16))
        # Pairs that see each other: 15 + 3 without a window; 1 + 2 + 3 + 3 + 3 and 1 + 2 with one of 3.
        assert costs["attention"].flops == 2 * 64 * ((15 + 3) + (12 + 3))
        assert costs["attention"].bytes == 2 * 2 * 7 * (64 + 32)
        assert costs["head"] == Cost(bytes=2 * (100 + 3) * 16, flops=2 * 3 * 16 * 100)

    def test_a_part_takes_the_longer_of_its_times_and_batches_add_up(self):
        slow_memory = Ceilings(bytes_per_second=1.0, flops_per_second=1e12)
        slow_math = Ceilings(bytes_per_second=1e12, flops_per_second=1.0)
        costs = batch_costs(SHAPE, [5, 2], scored_rows=3)
        for ceilings, field in ((slow_memory, "bytes"), (slow_math, "flops")):
            floor = floor_seconds(SHAPE, [([5, 2], 3)] * 4, ceilings)
            assert floor == pytest.approx({part: 4 * getattr(cost, field) for part, cost in costs.items()})

    def test_touched_experts(self):
        assert touched_experts(8, 2, 1) == pytest.approx(2)
        assert touched_experts(8, 2, 10_000) == pytest.approx(8)
        assert touched_experts(4, 4, 1) == 4

    @pytest.mark.parametrize(
        ("name", "billions", "layers", "attention"),
        [
            ("Qwen3-30B-A3B", 30.532, 48, 48),
            ("Qwen3.5-35B-A3B", 34.661, 40, 10),
            ("Mixtral-8x7B", 46.703, 32, 32),
            ("gpt-oss-20b", 20.915, 24, 24),
            ("OLMoE-1B-7B", 6.919, 16, 16),
        ],
    )
    def test_published_shapes(self, name, billions, layers, attention):
        """Parameters as published; the floor counts every weight but embeddings, norms and biases."""
        shape, skeleton = shape_of(name)
        parameters = {n: p.numel() for n, p in skeleton.named_parameters()}
        assert sum(parameters.values()) / 1e9 == pytest.approx(billions, abs=1e-3)
        assert len(shape.experts) == layers
        assert len(shape.attention) == attention
        experts = sum(e.num_experts * (e.hidden * e.up_out + e.inter * e.hidden) for e in shape.experts)
        counted = shape.linears.weights + experts + shape.vocab * shape.hidden
        embedding = next(n for n in parameters if n.endswith("embed_tokens.weight"))
        left_out = sum(n for name, n in parameters.items() if name == embedding or (n < 1e6 and "gate" not in name))
        assert counted + left_out == pytest.approx(sum(parameters.values()), rel=2e-3)

    def test_the_known_floor_of_a_known_shape(self):
        """125,000 tokens per second with scoring, at 790 TFLOP/s: worked out elsewhere from FLOPs alone."""
        shape, _ = shape_of("Qwen3-30B-A3B")
        ceilings = Ceilings(bytes_per_second=4.27e12, flops_per_second=790e12)
        floor = floor_seconds(shape, [([512] * 32, 32 * 512)] * 8, ceilings)
        assert 8 * 32 * 512 / sum(floor.values()) == pytest.approx(125_000, rel=0.02)

    def test_ceilings_are_measured(self):
        found = measure_ceilings(torch.device("cpu"), torch.float32)
        assert 1e8 < found.bytes_per_second < 1e13
        assert 1e8 < found.flops_per_second < 1e15


class TestParts:
    @pytest.mark.parametrize(
        ("kernel", "part"),
        [
            ("attend", "attention"),
            ("void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
            ("grouped_product", "experts"),
            ("scatter_items", "experts"),
            ("shrink", "lora"),
            ("expand_kernel", "lora"),
            ("score_tile", "head"),
            ("nvjet_tst_256x128_64x4_2x1_v_bz_coopA_NNT", "dense"),
            ("void cutlass::Kernel2<cutlass_80_tensorop_bf16_s16816gemm_bf16_128x128>", "dense"),
            ("rms_norm_kernel", "small"),
            ("void at::native::vectorized_elementwise_kernel<4, at::native::BUnaryFunctor>", "small"),
            ("Memcpy DtoH (Device -> Pinned)", "copies"),
            ("something_new", "other"),
        ],
    )
    def test_kernels_by_name(self, kernel, part):
        assert part_of(kernel) == part
        assert part in PARTS

    def test_every_kernel_of_ours_has_a_part(self):
        source = "\n".join(p.read_text() for p in (ROOT / "packages" / "kernels" / "src").rglob("*.py"))
        kernels = re.findall(r"@triton\.jit\ndef (\w+)", source)
        launched = [name for name in kernels if re.search(rf"\b{name}\[[(g]", source)]
        assert len(launched) > 12
        assert [name for name in launched if part_of(name) == "other"] == []

    def test_busy_time_counts_overlaps_once_and_parts_count_each(self):
        runs = [
            KernelRun(name="attend", begin_s=0.0, end_s=2.0),
            KernelRun(name="shrink", begin_s=1.0, end_s=1.5),
            KernelRun(name="shrink", begin_s=1.5, end_s=3.0),
            KernelRun(name="grouped_product", begin_s=5.0, end_s=6.0),
        ]
        assert busy_seconds(reversed(runs)) == 4.0
        by_part = seconds_by_part(runs)
        assert by_part["attention"] == 2.0
        assert by_part["lora"] == 2.0
        assert sum(by_part.values()) == 5.0
        assert top_kernels(runs, 2) == [("attend", 1, 2.0), ("shrink", 2, 2.0)]
