"""Which files make up a base checkpoint, and whether they are whole. Reads headers, and weights only one by one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from moelora.errors import CheckpointError, similar_folder
from moelora.safetensors_file import FileProblem, MappedFile, Stamp, TensorInfo, parse_header
from moelora.safetensors_file import read_header as read_raw_header
from moelora.wording import counted

if TYPE_CHECKING:
    import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFiles:
    """A whole checkpoint: its folder, its tensors by name, and whether an index names their files.

    stamps: of the files, by name, when their headers were read.
    """

    folder: Path
    tensors: Mapping[str, TensorInfo]
    stamps: Mapping[str, Stamp]
    has_index: bool

    @property
    def files(self) -> tuple[Path, ...]:
        """The weight files."""
        return tuple(sorted({self.folder / info.shard for info in self.tensors.values()}))

    def read(self, name: str) -> torch.Tensor:
        """One tensor, in its stored dtype, on the host; do not write to it."""
        info = self.tensors[name]
        return MappedFile(self.folder / info.shard, self.stamps[info.shard]).tensor(info)

    @property
    def nbytes(self) -> int:
        """Bytes of all weight files."""
        return sum(f.stat().st_size for f in self.files)


def find_model_folder(model: str | Path) -> Path:
    """A local folder as it is, or the snapshot of a repository id in the Hugging Face cache. Never downloads.

    Raises `CheckpointError` saying what was looked for where.
    """
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.exists():
        raise CheckpointError(f"model {str(model)!r} is a file; give the folder that holds config.json")
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(model), local_files_only=True))
    except HFValidationError:
        raise CheckpointError(f"model folder {str(model)!r} does not exist{similar_folder(folder)}") from None
    except (LocalEntryNotFoundError, OSError):
        raise CheckpointError(
            f"model {str(model)!r} is neither a folder nor a repository in the Hugging Face cache at "
            f"{constants.HF_HUB_CACHE}; check the path, or download the model first (`hf download {model}`)"
            f"{similar_folder(folder)}"
        ) from None


def check_checkpoint(folder: Path) -> CheckpointFiles:
    """Checks that every tensor the index names lies where it says, once, in a file that is whole.

    Raises `CheckpointError` naming the file or tensor: a missing or cut-off shard, a tensor absent from its shard, a
    copy of a tensor that the index does not name.
    """
    index = folder / INDEX
    if not index.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(_no_weights(folder))
        tensors, stamp = read_header(folder / SINGLE)
        return CheckpointFiles(folder=folder, tensors=tensors, stamps={SINGLE: stamp}, has_index=False)
    return _check_sharded(folder, _read_index(index))


def _no_weights(folder: Path) -> str:
    pickles = sorted(p.name for p in folder.glob("pytorch_model*.bin"))
    if pickles:
        return f"{folder} holds only {pickles[0]}, a pickle, which may run code when opened; convert it to safetensors"
    return f"{folder} holds neither {SINGLE} nor {INDEX}"


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8-sig"))["weight_map"]
        if not all(isinstance(file, str) for file in weight_map.values()):
            raise TypeError("weight_map must map names to files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{index} is no safetensors index with a weight_map: {error!r}") from None
    if not weight_map:
        raise CheckpointError(f"{index} names no tensor")
    outside = [f for f in weight_map.values() if Path(f).name != f]
    if outside:
        raise CheckpointError(f"{index} names the file {outside[0]!r}, which is not in its own folder")
    return weight_map


def _check_sharded(folder: Path, weight_map: dict[str, str]) -> CheckpointFiles:
    shards = sorted(set(weight_map.values()))
    absent = [s for s in shards if not (folder / s).exists()]
    if absent:
        more = f" and {len(absent) - 5} more" if len(absent) > 5 else ""
        raise CheckpointError(
            f"{folder / INDEX} names {counted(len(shards), 'shard')}; missing: {', '.join(absent[:5])}{more}"
        )
    headers = {shard: read_header(folder / shard) for shard in shards}
    held = {shard: tensors for shard, (tensors, _) in headers.items()}
    for name, shard in weight_map.items():
        if name not in held[shard]:
            raise CheckpointError(f"tensor {name} is not in {folder / shard}, where {INDEX} places it")
    for shard, names in held.items():
        for name in names:
            if weight_map.get(name) != shard:
                placed = weight_map.get(name)
                where = f"the index places it in {placed}" if placed else "the index does not name it"
                raise CheckpointError(f"unexpected copy of tensor {name} in {folder / shard}: {where}")
    tensors = {name: held[shard][name] for name, shard in weight_map.items()}
    stamps = {shard: stamp for shard, (_, stamp) in headers.items()}
    return CheckpointFiles(folder=folder, tensors=tensors, stamps=stamps, has_index=True)


def read_header(path: Path) -> tuple[dict[str, TensorInfo], Stamp]:
    """The tensors of a safetensors file by name, and the file's stamp.

    Raises `CheckpointError` naming the file and the likely cause.
    """
    try:
        header = read_raw_header(path)
        return parse_header(header), header.stamp
    except FileProblem as problem:
        raise CheckpointError(f"{path}: {problem}") from None
