"""Writes docs/support.md: what the probe finds for every MoE architecture of transformers, and for some dense ones.

python tools/support_matrix.py            writes the page
python tools/support_matrix.py --check    exits with 1 if the page is another one, and says where
"""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402
from transformers.utils import logging  # noqa: E402

from arch_world import ARCHITECTURES, WRAPPERS, tiny, wrapped  # noqa: E402
from moelora.adapters.base import Catalogue, TargetKind  # noqa: E402
from moelora.models.architecture import Architecture  # noqa: E402
from moelora.models.attention import BIASED, EAGER, MASKED  # noqa: E402
from moelora.models.catalogue import build_catalogue  # noqa: E402
from moelora.models.decoder import decoder_of  # noqa: E402
from moelora.models.probe import probe  # noqa: E402
from moelora.models.quantized import METHODS  # noqa: E402

PAGE = ROOT / "docs" / "support.md"
DENSE = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_5_text", "gemma2", "gemma3_text", "olmo2", "olmo3", "phi3", "granite",
    "glm4", "smollm3", "cohere2", "starcoder2", "exaone4", "bamba", "mamba2", "gpt2", "falcon_h1",
)  # fmt: skip

HEAD = """# Support matrix

<!-- Written by `nox -s support`; do not edit. -->

Found by the probe on tiny random models of transformers {version}. Nothing here is read by moelora: it tries every
model anew (`moelora inspect MODEL` shows the verdict), so that an architecture that is missing runs too, at worst one
request per forward, eagerly, and says why.

- **Requests per forward**: *many* means that requests are packed into one row and give what each gives alone. Modules
  and functions named behind it are called once per request, with everything around them packed; functions of kernel
  packages that know boundaries (flash-linear-attention, causal-conv1d) once for all, other functions once for all
  requests of like length, where they give the same. On CUDA `causal_conv1d_fn` has a kernel that knows where requests
  begin. *mask* means that the architecture needs its attention mask built: T × T values per forward.
- **Graphs**: what the structure allows on CUDA. `breakable` graphs end at what is called once per request.
  None, where the body reads values on the host, at the places named.
- **LoRA on** linear layers, routers and experts, by their names within a decoder layer; embeddings and lm_head can be
  adapted everywhere. **Not on**: matrices of the layer that take no adapter; one that names them is refused.

{packed} of {total} MoE decoders run packed; {experts} of them take adapters on their routed experts.
"""


def main() -> int:
    """Writes or checks the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    text = page()
    if not check:
        PAGE.write_text(text, encoding="utf-8")
        return 0
    difference = compare(text)
    print(difference or f"{PAGE} is what the probe finds")
    return 1 if difference else 0


def compare(text: str) -> str:
    """How the page on disk differs from `text`; empty if it does not."""
    old = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    return "\n".join(difflib.unified_diff(old.splitlines(), text.splitlines(), "docs/support.md", "probe", lineterm=""))


def page() -> str:
    """The whole page."""
    logging.set_verbosity_error()
    names = [
        name for name in ARCHITECTURES if "+" not in name and name not in ("qwen4_exp-ple", "deepseek_v4-compress")
    ]
    rows = [(name, *_facts(_tiny(name))) for name in sorted(names)]
    settings = [(name, *_facts(_tiny(name))) for name in sorted(set(ARCHITECTURES) - set(names))]
    dense = [(name, *_facts(_dense(name))) for name in DENSE]
    head = HEAD.format(
        version=version("transformers"),
        packed=sum(verdict.packs for _, verdict, _, _ in rows),
        total=len(rows),
        experts=sum(any(t.kind is TargetKind.EXPERTS for t in catalogue) for _, _, catalogue, _ in rows),
    )
    wrapped = sorted({f"`{wrapper}`" for wrapper, _ in WRAPPERS.values()})
    return "\n".join(
        [
            head,
            "## Mixture-of-Experts decoders\n",
            *_table(rows),
            "\n## Settings that change the verdict\n",
            *_table(settings),
            "\n## Dense decoders\n",
            *_table(dense),
            "\n## Multimodal checkpoints\n",
            f"Text prompts run on the language model of these, tried in the tests: {', '.join(wrapped)}.",
            "What only images, sound and video go through is not kept in memory. Keys of adapters may carry",
            "`language_model.` or not; an adapter on an encoder of another modality is refused.\n",
            "## Quantised checkpoints\n",
            "The report of a run says what is on disk and what is held in its place.\n",
            "| method | what happens |",
            "|---|---|",
            *(f"| `{method}` | {what}: dequantised at load |" for method, what in METHODS.items()),
            "| any other | refused by name |",
            "",
        ]
    )


def _tiny(name: str) -> Any:
    model_class, config = wrapped(name) if name in WRAPPERS else tiny(name)
    with torch.device("meta"):
        return model_class(config)


def _dense(name: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(name))


def _facts(model: Any) -> tuple[Architecture, Catalogue, list[str]]:
    catalogue = build_catalogue(model)
    return probe(decoder_of(model)), catalogue, sorted(set(_left_out(model, catalogue)))


def _left_out(model: Any, catalogue: Catalogue) -> Iterator[str]:
    """Matrices of decoder layers that are no targets."""
    taken = {name if t.kind is TargetKind.EXPERTS else f"{name}.weight" for name, t in catalogue.targets.items()}
    decoder = {id(parameter) for parameter in decoder_of(model).parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) in decoder and name not in taken and parameter.ndim > 1 and (inner := _within_layer(name)):
            yield inner.removesuffix(".weight")


def _within_layer(name: str) -> str:
    """The name below a decoder layer, numbers left out; empty if it is not in one."""
    found = re.search(r"\.(layers|h|blocks)\.\d+\.(.+)", name)
    return re.sub(r"\.\d+(?=\.)", ".#", found[2]) if found else ""


def _table(rows: list[tuple[str, Architecture, Catalogue, list[str]]]) -> Iterator[str]:
    yield "| architecture | requests per forward | graphs | LoRA on | not on |"
    yield "|---|---|---|---|---|"
    for name, verdict, catalogue, left_out in rows:
        cells = (f"`{name}`", _requests(verdict), _graphs(verdict), _targets(catalogue), _names(left_out))
        yield f"| {' | '.join(cells)} |"


def _requests(verdict: Architecture) -> str:
    if not verdict.packs:
        return f"one: {verdict.reason}"
    more = [f"`{name}`" for name in verdict.looped]
    if verdict.attention in (MASKED, BIASED):
        more.append("mask")
    if verdict.attention == EAGER:
        more.append("own attention")
    if not verdict.experts:
        more.append("own experts")
    return f"many; {', '.join(more)}" if more else "many"


def _graphs(verdict: Architecture) -> str:
    if verdict.syncs:
        return f"none: {', '.join(verdict.syncs[:2])}"
    return ", ".join(str(mode) for mode in verdict.graph_modes) or "none"


def _targets(catalogue: Catalogue) -> str:
    kinds = (TargetKind.LINEAR, TargetKind.ROUTER, TargetKind.EXPERTS)
    return _names(sorted({_within_layer(t.name) for t in catalogue if t.kind in kinds} - {""}))


def _names(names: list[str]) -> str:
    """Names with a common parent share it."""
    groups: dict[str, list[str]] = {}
    for name in names:
        parent, _, leaf = name.rpartition(".")
        groups.setdefault(parent, []).append(leaf)
    shown = [
        f"`{parent}.{{{','.join(leaves)}}}`" if parent and len(leaves) > 1 else f"`{f'{parent}.'.lstrip('.')}{leaf}`"
        for parent, leaves in groups.items()
        for leaf in (leaves if not parent or len(leaves) == 1 else leaves[:1])
    ]
    return ", ".join(shown)


if __name__ == "__main__":
    sys.exit(main())
