"""What the names of a checkpoint's tensors say: their layer, what text does not need, whether all experts are there."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from moelora.adapters.names import canonical
from moelora.errors import CheckpointError
from moelora.safetensors_file import TensorInfo

_SHOWN = 5
# Parts of a multimodal checkpoint that a class for text alone has no place for. Nothing of a decoder is called so.
_OTHER_MODALITY = re.compile(r"(^|\.|_)(vision|visual|image|audio|video|multi_modal|multimodal|mm)(_|\.)")
_PREDICTION = re.compile(r"(^|\.)mtp\.")
_JOINS = re.compile(r"\.(eh_proj|enorm|hnorm)\.")
_LAYER = re.compile(r"(?:^|\.)layers\.([0-9]+)\.")
# One of the tensors that transformers puts together in the order of their numbers: before it, the number, behind it.
_NUMBERED = re.compile(r"(.*?(?:experts\.|\.shard_))([0-9]+)(\..+)")


def layer_of(name: str) -> int | None:
    """The number of the decoder layer that a tensor belongs to."""
    found = _LAYER.search(name)
    return int(found[1]) if found else None


def is_of_other_modality(name: str) -> bool:
    """Whether a tensor belongs to images, sound or video."""
    return _OTHER_MODALITY.search(name) is not None


def extra_predictions(names: Iterable[str], layers: int, announced: int) -> set[str]:
    """The tensors of multi-token prediction: `mtp.…`, and the decoder layers past the last one that serve it.

    Such a layer is among the `announced` ones, or has the parts that join a hidden state with the next token's
    embedding. Any other layer past the last one belongs to a model of more layers than the config says.
    """
    names = set(names)
    serving = set(range(layers, layers + announced))
    serving |= {layer for name in names if _JOINS.search(name) and (layer := layer_of(name)) is not None}
    serving = {layer for layer in serving if layer >= layers}
    return {name for name in names if _PREDICTION.search(name) or layer_of(name) in serving}


def some(names: Iterable[str]) -> str:
    """Tensors by name, the first few of them, for a message."""
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    return f"tensor{'s' if len(ordered) > 1 else ''} {', '.join(ordered[:_SHOWN])}{more}"


def check_numbers(folder: Path, names: Iterable[str], layers: int, skeleton: Callable[[], Any]) -> None:
    """Raises `CheckpointError` unless the tensors of experts that are stored one by one are numbered 0, 1, 2, ….

    transformers stacks them in the order of their numbers: behind a gap, each would silently stand in the place of the
    one before, as long as there are as many as the config says. How many there are is compared with the config when
    they are loaded; it may differ from layer to layer.

    layers: of the decoder; what lies past them is not loaded. skeleton: makes the model without weights.
    """
    for before, held in sorted(_numbers(names, layers).items()):
        if len({frozenset(numbers) for numbers in held.values()}) == 1 and not any(map(_has_gap, held.values())):
            continue
        model = skeleton()
        stored = {f"{before}{number}{behind}" for behind, numbers in held.items() for number in numbers}
        if set(map(canonical, stored)) & set(map(canonical, model.state_dict())):
            continue  # not stacked: loading compares the names themselves
        # Where it is not known, projections may differ: LongCat keeps more experts of one than of the other.
        wanted = _experts_beside(model, before)
        counts = {behind: wanted or len(numbers) for behind, numbers in held.items()}
        right = {f"{before}{number}{behind}" for behind in held for number in range(counts[behind])}
        told = [f"{word} {some(odd)}" for word, odd in (("lacks", right - stored), ("holds", stored - right)) if odd]
        if told:
            raise CheckpointError(
                f"{folder}: the checkpoint {' and '.join(told)}; numbers there go from 0 to "
                f"{max(counts.values()) - 1}, each once for every projection"
            )


def find_odd_shape(tensors: Mapping[str, TensorInfo], layers: int) -> str | None:
    """Of tensors of experts that are stored one by one: one whose shape differs from that of most others, in words."""
    alike = defaultdict(list)
    for name in _loaded(tensors, layers):
        if _NUMBERED.fullmatch(name):
            alike[re.sub(r"[0-9]+", "N", name)].append(name)
    for names in alike.values():
        usual = Counter(tensors[name].shape for name in names).most_common(1)[0][0]
        for name in names:
            if tensors[name].shape != usual:
                return f"tensor {name} has shape {tensors[name].shape}, and that of other experts is {usual}"
    return None


def _numbers(names: Iterable[str], layers: int) -> dict[str, dict[str, set[str]]]:
    """The numbers of experts, as they are written, by what stands before and behind them in the names of tensors."""
    found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in _loaded(names, layers):
        if match := _NUMBERED.fullmatch(name):
            before, number, behind = match.groups()
            found[before][behind].add(number)
    return found


def _loaded(names: Iterable[str], layers: int) -> Iterable[str]:
    """Without what is never loaded, or refused when it is: other modalities, and layers past the last one."""
    for name in names:
        layer = layer_of(name)
        if (layer is None or layer < layers) and not _PREDICTION.search(name) and not is_of_other_modality(name):
            yield name


def _has_gap(numbers: set[str]) -> bool:
    return numbers != set(map(str, range(len(numbers))))


def _experts_beside(model: Any, before: str) -> int:
    """How many experts there are in the layer of tensors whose names begin with `before`; 0 if that is not clear."""
    layer = layer_of(before) if before.endswith("experts.") else None
    if layer is None:
        return 0
    sizes = defaultdict(set)
    for name, parameter in model.named_parameters():
        if layer_of(name) == layer and ".experts." in name and parameter.ndim == 3:
            sizes[name.rpartition(".")[0]].add(parameter.shape[0])
    return sum(map(max, sizes.values())) if all(len(size) == 1 for size in sizes.values()) else 0
