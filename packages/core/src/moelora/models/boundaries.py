"""Kernels that know boundaries: one call for all requests of a row."""

from __future__ import annotations

from typing import Any

import torch

from moelora.models.context import Segments
from moelora.models.together import Together


class Boundaries(Together):
    """Tells a function of boundaries under the names that kernel packages use for them.

    `cu_seqlens` is what flash-linear-attention takes, `seq_idx` causal-conv1d and mamba-ssm. Without such a package
    transformers' own function refuses them, or takes no notice.
    """

    def call(self, given: Any, segments: Segments) -> Any:
        args, kwargs = given
        key = "seq_idx"
        if key not in segments.cache:
            ends = segments.cu_seqlens_S1[1:].contiguous()
            rows = torch.arange(sum(segments.lengths or ()), device=ends.device, dtype=ends.dtype)
            segments.cache[key] = torch.searchsorted(ends, rows, right=True).to(torch.int32).unsqueeze(0)
        told = {"cu_seqlens": segments.cu_seqlens_S1, "seq_idx": segments.cache[key]}
        return self._function(*args, **{**kwargs, **told})
