"""Quantised checkpoints: which ones are loaded, dequantised on the way to the device, and which are refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from moelora.errors import CheckpointError
from moelora.models.checkpoint import CheckpointFiles, read_header

METHODS = {
    "fp8": "blocks of 8-bit floats with a scale each, as Qwen and DeepSeek publish them",
    "mxfp4": "4-bit floats in blocks of 32, as gpt-oss is published",
}
"""By quant_method of config.json: what is dequantised at load."""

_FP8 = frozenset({"F8_E4M3", "F8_E5M2"})
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a checkpoint is stored. block: rows and columns of a block that shares a scale, or None."""

    method: str
    block: tuple[int, int] | None

    def told(self, files: CheckpointFiles | None, held_bytes: int) -> str:
        """One sentence for people: what is on disk, and what is held in its place."""
        stored = f"{files.nbytes / 1e9:.2f} GB of " if files is not None else ""
        return f"{stored}{self.method} weights are dequantised at load and held in {held_bytes / 1e9:.2f} GB"


def read_quantisation(config: Any, folder: Path) -> Quantisation | None:
    """What a config says of its weights; None if they are plain. Sets the config to dequantise.

    Raises `CheckpointError` for a method that is not dequantised here.
    """
    found = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    if not found:
        return None
    settings: dict[str, Any] = dict(found) if isinstance(found, Mapping) else found.to_dict()
    method = str(getattr(settings.get("quant_method"), "value", settings.get("quant_method")))
    if method not in METHODS:
        raise CheckpointError(
            f"{folder} is quantised by {method!r}, which moelora does not dequantise; it does for "
            f"{', '.join(sorted(METHODS))}. Give a checkpoint in float16, bfloat16 or float32, or in one of those"
        )
    settings["dequantize"] = True
    config.quantization_config = settings
    block = settings.get("weight_block_size")
    return Quantisation(method=method, block=(int(block[0]), int(block[1])) if block and method == "fp8" else None)


def check_scales(files: CheckpointFiles) -> None:
    """Raises `CheckpointError` for an 8-bit weight without its scale: it would be taken for the weight itself."""
    for path in files.files:
        for name, info in read_header(path)[0].items():
            alone = not any(f"{name}{suffix}" in files.tensors for suffix in _SCALES)
            if info.dtype in _FP8 and alone and name.removesuffix(".weight") + ".scale" not in files.tensors:
                raise CheckpointError(f"{path}: tensor {name} is {info.dtype} and has no scale beside it")


def is_quantised_tensor(name: str, files: CheckpointFiles) -> bool:
    """Whether a stored tensor is no plain weight, so that it cannot be compared with one."""
    return any(f"{name}{suffix}" in files.tensors for suffix in (*_SCALES, "_blocks"))


def settle_dtype(model: torch.nn.Module, dtype: torch.dtype) -> None:
    """Brings dequantised weights to `dtype`: some versions of transformers leave them in bfloat16, whatever is asked.

    What a model keeps in float32 stays there.
    """
    for parameter in model.parameters():
        if parameter.dtype in (torch.bfloat16, torch.float16):
            parameter.data = parameter.data.to(dtype)


@contextmanager
def whole_blocks(quantisation: Quantisation | None) -> Iterator[None]:
    """While weights are loaded: scales belong to blocks of the size that the config names, counted from the origin.

    transformers divides the rows by the number of scales instead, which is another size where the last block is
    smaller than the others (576 rows in blocks of 128).
    """
    if quantisation is None or quantisation.block is None:
        yield
        return
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    original = Fp8Dequantize._dequantize_one
    block = quantisation.block

    def dequantize_one(self: Any, quantized: torch.Tensor, scales: torch.Tensor, output_dtype: Any = None) -> Any:
        if scales.ndim < 2 or not _is_grid(quantized.shape, scales.shape, block):
            return original(self, quantized, scales, output_dtype)
        return dequantise(quantized, scales, block, output_dtype or scales.dtype)

    Fp8Dequantize._dequantize_one = dequantize_one
    try:
        yield
    finally:
        Fp8Dequantize._dequantize_one = original


def _is_grid(shape: torch.Size, scales: torch.Size, block: tuple[int, int]) -> bool:
    return tuple(scales[-2:]) == tuple(-(-n // size) for n, size in zip(shape[-2:], block, strict=True))


def dequantise(weight: torch.Tensor, scales: torch.Tensor, block: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """weight `[…, out, in]` times the scale of its block, scales `[…, ⌈out/b⌉, ⌈in/b⌉]`; in fp32, then cast."""
    rows, columns = weight.shape[-2:]
    if scales.dtype is torch.uint8:  # exponents alone
        scales = (scales.float() - 127.0).exp2()
    by_row = scales.float().repeat_interleave(block[0], dim=-2)[..., :rows, :]
    by_element = by_row.repeat_interleave(block[1], dim=-1)[..., :columns]
    return (weight.float() * by_element).to(dtype)
