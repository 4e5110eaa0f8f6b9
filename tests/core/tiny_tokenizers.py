"""Small byte-level BPE tokenizers, made in memory, for tests of encoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SENTENCES = [
    "Answer: C",
    "Answer: Answer: hello world, hello world! hello worn",
    "the quick brown fox says yes and no, and the answer is no",
]
CHATML = (
    "{% for m in messages %}<|im|>{{ m['role'] }}\n{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|im|>assistant\n{% endif %}"
)


def byte_level(*, bos: str | None = None, adds_bos: bool = False, eos: str | None = "</s>", **extra: Any) -> Any:
    """A byte-level BPE tokenizer trained on `SENTENCES`, where "Ans" + "wer" and " wor" + "ld" merge across a join."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    core.train_from_iterator(SENTENCES * 20, trainer)
    core.add_special_tokens([AddedToken(token, special=True) for token in (bos, eos, "<|im|>") if token])
    if adds_bos:
        assert bos is not None
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token=bos, eos_token=eos, **extra)


def metaspace() -> Any:
    """A tokenizer that begins every text with a space of its own, as Llama's first ones did, and adds BOS."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, special_tokens=["<s>"], initial_alphabet=["\n"])
    core.train_from_iterator(SENTENCES * 20, trainer)
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>")


def save(tokenizer: Any, folder: Path) -> Path:
    """Writes the tokenizer into a checkpoint folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    return folder
