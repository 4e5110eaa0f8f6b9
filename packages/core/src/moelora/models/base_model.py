"""Loading the base model through transformers, with moelora's functions plugged in, or refusing with the reason."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from moelora.adapters.names import canonical
from moelora.errors import CheckpointError, ConfigError, choose_from
from moelora.models.architecture import Architecture
from moelora.models.attention import EAGER, register_attention
from moelora.models.checkpoint import INDEX, CheckpointFiles, check_checkpoint, find_model_folder
from moelora.models.context import row_of
from moelora.models.decoder import ask_for_last_hidden_state, decoder_of, drop_other_modalities, plug_functions
from moelora.models.experts import EXPERTS, register_experts
from moelora.models.kept import widen_kept
from moelora.models.mixers import install_loops, looped_functions
from moelora.models.quantized import (
    Quantisation,
    check_scales,
    is_quantised_tensor,
    read_quantisation,
    settle_dtype,
    whole_blocks,
)
from moelora.models.tensor_names import (
    check_numbers,
    extra_predictions,
    find_odd_shape,
    is_of_other_modality,
    layer_of,
    some,
)
from moelora.models.unregistered import adopt_experts
from moelora.models.verdicts import find_verdict

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}

_DUMMY_STD = 16.0
"""Of the embeddings of random models: far above what 48 layers of random weights add to a token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseSource:
    """A base model before its weights are read: its folder, config, transformers class, and checked weight files.

    files is None for dummy weights. quantisation: how the files hold them; None if they are plain.
    """

    folder: Path
    config: Any
    architecture: Architecture
    model_class: Any
    files: CheckpointFiles | None
    quantisation: Quantisation | None = None

    def skeleton(self) -> torch.nn.Module:
        """The model without weights, on the meta device: enough to know what an adapter can target."""
        return _skeleton(self.model_class, self.config, self.folder)

    def stored_tensor(self, name: str) -> torch.Tensor | None:
        """The checkpoint's own plain tensor of that name, in its own dtype; None if there is none."""
        if self.files is None:
            return None
        if is_quantised_tensor(name, self.files):
            return None
        if name in self.files.tensors:
            return self.files.read(name)
        # Wrappers of multimodal models spell the same names in several ways.
        spelled = {canonical(stored): stored for stored in self.files.tensors}
        wanted = canonical(name)
        if wanted not in spelled and wanted == "lm_head.weight" and _tied(self.config):
            wanted = "embed_tokens.weight"  # stored once
        return self.files.read(spelled[wanted]) if wanted in spelled else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """A loaded base model. `skipped`: checkpoint tensors that text does not need (layers for
    multi-token prediction, other modalities).
    """

    folder: Path
    config: Any
    causal_lm: Any
    architecture: Architecture
    device: torch.device
    dtype: torch.dtype
    skipped: tuple[str, ...] = ()
    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)

    @property
    def body(self) -> Any:
        """The decoder: token ids to hidden states."""
        return decoder_of(self.causal_lm)

    def hidden_states(self, ids_1T: torch.Tensor, positions_1T: torch.Tensor) -> torch.Tensor:
        """Runs the body on one packed row of int64 ids and positions, `[1, T]` each; returns `[T, H]`.

        A body that runs one request at a time counts positions itself: not all begin with 0.
        """
        given = positions_1T if self.architecture.packs else None
        with row_of(positions_1T, self.functions):
            return self.body(input_ids=ids_1T, position_ids=given, use_cache=False).last_hidden_state[0]

    @property
    def nbytes(self) -> int:
        """Bytes of weights and buffers; what is shared (a tied head) counts once."""
        held = {t.data_ptr(): t.nbytes for t in (*self.causal_lm.parameters(), *self.causal_lm.buffers())}
        return sum(held.values())

    @property
    def text_config(self) -> Any:
        """The config of the decoder, also for multimodal wrappers."""
        return self.config.get_text_config()


def open_base(model: str | Path, *, load_format: str = "auto") -> BaseSource:
    """Finds and checks a checkpoint folder or a cached repository; `load_format="dummy"` needs a config alone.

    Reads headers, no weights. Raises `CheckpointError` for whatever could not be loaded.
    """
    folder = find_model_folder(model)
    config = read_config(folder)
    quantisation = read_quantisation(config, folder)
    model_class, config = _class_and_config(config, folder)
    architecture = find_verdict(model_class, config, lambda: decoder_of(_skeleton(model_class, config, folder)))
    files = None if load_format == "dummy" else check_checkpoint(folder)
    if files is not None and quantisation is not None:
        check_scales(files)
    if files is not None:
        layers = config.get_text_config().num_hidden_layers
        check_numbers(folder, files.tensors, layers, lambda: _skeleton(model_class, config, folder))
    return BaseSource(
        folder=folder,
        config=config,
        architecture=architecture,
        model_class=model_class,
        files=files,
        quantisation=quantisation,
    )


def load_base(source: BaseSource, *, device: torch.device, dtype: str = "auto") -> BaseModel:
    """Loads the weights onto `device`, or makes random ones where the source has no files.

    dtype "auto" is the checkpoint's own on an accelerator and float32 on the CPU, where it is both faster and closer to
    the truth. Raises `CheckpointError` or `ConfigError`; nothing is ever left at random values silently.
    """
    config, architecture = source.config, source.architecture
    torch_dtype = resolve_dtype(dtype, config, device)
    register_attention()
    register_experts()
    own: dict[str, Any] = {"attn_implementation": EAGER}
    skipped: set[str] = set()
    if source.files is None:
        causal_lm = _random_model(source, config, device, torch_dtype, own)
    else:
        causal_lm, skipped = _load_weights(source, source.files, device, torch_dtype, own)
    drop_other_modalities(causal_lm)
    causal_lm = causal_lm.to(device).eval().requires_grad_(False)
    decoder = decoder_of(causal_lm)
    plug_functions(decoder, attention=architecture.attention, experts=EXPERTS if architecture.experts else EAGER)
    if architecture.experts:
        adopt_experts(decoder)
    install_loops(decoder, architecture.loops)
    return BaseModel(
        folder=source.folder,
        config=causal_lm.config,
        causal_lm=causal_lm,
        architecture=architecture,
        device=device,
        dtype=torch_dtype,
        skipped=tuple(sorted(skipped)),
        functions=looped_functions(architecture.loops),
    )


def load_plain(
    source: BaseSource,
    *,
    device: torch.device,
    dtype: torch.dtype,
    attention: str = "eager",
    experts: str | None = "eager",
) -> Any:
    """The model as transformers alone runs it; nothing of moelora is plugged in.

    attention, experts: transformers' names of its functions; None for the experts function that it chooses itself.
    Raises `CheckpointError`.
    """
    own: dict[str, Any] = {"attn_implementation": attention}
    if experts is not None and source.model_class._can_set_experts_implementation():
        own["experts_implementation"] = experts
    config = copy.deepcopy(source.config)
    if source.files is None:
        causal_lm = _random_model(source, config, device, dtype, own)
    else:
        causal_lm, _ = _load_weights(replace(source, config=config), source.files, device, dtype, own)
    return causal_lm.to(device).eval().requires_grad_(False)


def read_config(folder: Path) -> Any:
    """The transformers config of a folder. Raises `CheckpointError` for what cannot be run as it is."""
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.exists():
        raise CheckpointError(f"{folder} has no config.json; is this a model folder?")
    try:
        json.loads(path.read_text(encoding="utf-8"))
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except json.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    except Exception as error:
        raise CheckpointError(f"{path} is not understood by transformers: {_first_line(error)}") from None
    read_quantisation(config, folder)  # refuses some
    ask_for_last_hidden_state(config)
    return config


def resolve_dtype(dtype: str, config: Any, device: torch.device) -> torch.dtype:
    """The dtype to run in; see `load_base` for "auto"."""
    if dtype == "auto":
        own = getattr(config.get_text_config(), "dtype", None) or torch.float32
        return torch.float32 if device.type == "cpu" else own
    if dtype not in DTYPES:
        raise ConfigError(choose_from("dtype", dtype, [*DTYPES, "auto"]))
    return DTYPES[dtype]


def _tied(config: Any) -> bool:
    return any(getattr(c, "tie_word_embeddings", False) for c in (config, config.get_text_config()))


def _skeleton(model_class: Any, config: Any, folder: Path) -> Any:
    try:
        with torch.device("meta"), _Quiet():
            return model_class._from_config(copy.deepcopy(config))
    except Exception as error:  # whatever a config of impossible numbers provokes in a model's code
        path = folder / "config.json"
        raise CheckpointError(f"no model can be made from {path}: {_first_line(error)}") from error


def _class_and_config(config: Any, folder: Path) -> tuple[Any, Any]:
    """The class with a language model's head, and the config it takes: that of the text part where it takes no more.

    Multimodal checkpoints that have no class for text alone get the one for all their modalities.
    """
    import transformers

    found = None
    for mapping in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        classes: Any = getattr(transformers, f"MODEL_FOR_{mapping}_MAPPING", {})
        if type(config) in classes:
            found = classes[type(config)]
            break
    for name in [] if found else getattr(config, "architectures", None) or []:
        found = getattr(transformers, name, None)
    if found is None:
        raise CheckpointError(
            f"{folder}: transformers has no causal language model for model_type {config.model_type!r}"
        )
    if found.config_class is not type(config) and found.config_class is type(config.get_text_config()):
        text = config.get_text_config()
        if getattr(config, "quantization_config", None):
            text.quantization_config = config.quantization_config
        return found, text
    return found, config


def _load_weights(
    source: BaseSource, files: CheckpointFiles, device: torch.device, dtype: torch.dtype, plugged: dict[str, Any]
) -> tuple[torch.nn.Module, set[str]]:
    """Streams the weights from the files to the device, tensor by tensor: the host never holds a copy of the model."""
    folder, config = source.folder, source.config
    if files.has_index:
        config.transformers_weights = INDEX  # else a stray model.safetensors beside the index would win
    with _Quiet(), whole_blocks(source.quantisation):
        try:
            causal_lm, info = source.model_class.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                device_map={"": device},
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # so that they are reported by name, below
                local_files_only=True,
                use_safetensors=True,
                **plugged,
            )
        except Exception as error:
            _refuse_for_memory(error, source, device, dtype)
            raise CheckpointError(f"{folder} could not be loaded: {_why_not(error, config, files)}") from error
    if info["mismatched_keys"]:
        name, given, wanted = sorted(info["mismatched_keys"])[0]
        raise CheckpointError(f"{folder}: tensor {name} has shape {tuple(given)}, config.json asks for {tuple(wanted)}")
    if info["missing_keys"]:
        raise CheckpointError(f"{folder}: the checkpoint lacks {some(info['missing_keys'])}")
    layers = config.get_text_config().num_hidden_layers
    announced = getattr(config.get_text_config(), "num_nextn_predict_layers", None) or 0
    skipped = extra_predictions(info["unexpected_keys"], layers, announced)
    skipped |= {name for name in info["unexpected_keys"] if is_of_other_modality(name)}
    unexpected = set(info["unexpected_keys"]) - skipped
    if unexpected:
        beyond = {layer for layer in map(layer_of, unexpected) if layer is not None and layer >= layers}
        if beyond:
            raise CheckpointError(
                f"{folder}: config.json says {layers} layers (num_hidden_layers), and the checkpoint holds layers up "
                f"to number {max(beyond)}, counted from 0; without them the model would be another one"
            )
        raise CheckpointError(f"{folder}: the checkpoint holds {some(unexpected)}, which the model has no place for")
    if source.quantisation is not None:
        settle_dtype(causal_lm, dtype)
    return causal_lm, skipped


def _random_model(
    source: BaseSource, config: Any, device: torch.device, dtype: torch.dtype, plugged: dict[str, Any]
) -> torch.nn.Module:
    """Random weights of the right shapes, made on the device itself.

    Embeddings are large, so that a token keeps a direction of its own through all layers, and routers spread tokens as
    trained ones do: with the config's small ones all tokens end up alike after some layers and choose the same few
    experts. Where they are the head's weights too, they stay as they are.
    """
    try:
        with device, _Quiet():
            model: torch.nn.Module = source.model_class._from_config(config, dtype=dtype, **plugged)
            widen_kept(model, dtype)
            embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
            if isinstance(embeddings, torch.nn.Embedding) and head.weight is not embeddings.weight:
                torch.nn.init.normal_(embeddings.weight, std=_DUMMY_STD)
            return model
    except Exception as error:
        _refuse_for_memory(error, source, device, dtype)
        raise CheckpointError(f"no model can be made from this config: {_first_line(error)}") from error


def _refuse_for_memory(error: Exception, source: BaseSource, device: torch.device, dtype: torch.dtype) -> None:
    """Raises `CheckpointError` with what the weights take, if `error` says that memory ran out."""
    ran_out = isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
    if ran_out:
        needed = sum(parameter.numel() for parameter in source.skeleton().parameters()) * dtype.itemsize
        raise CheckpointError(
            f"out of memory on {device} while loading {source.folder}: its weights alone take {needed / 2**30:.1f} GiB "
            f"in {str(dtype).removeprefix('torch.')}; moelora plan shows all parts"
        ) from error


def _why_not(error: Exception, config: Any, files: CheckpointFiles) -> str:
    """What `error`, raised by transformers while it loads `files`, is about."""
    if "automatic conversion" not in str(error):
        return _first_line(error)
    # Its report of tensors that it cannot put together is not shown, and names none of them.
    odd = find_odd_shape(files.tensors, config.get_text_config().num_hidden_layers)
    return odd or "the shapes of its tensors do not go together as config.json says"


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300]


class _Quiet:
    """Silences transformers' own load report and progress bar: what they would say is raised as an error here."""

    def __enter__(self) -> None:
        from transformers.utils import logging as transformers_logging

        self._level = transformers_logging.get_verbosity()
        self._bar = transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity(logging.CRITICAL)
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        from transformers.utils import logging as transformers_logging

        transformers_logging.set_verbosity(self._level)
        if self._bar:
            transformers_logging.enable_progress_bar()
