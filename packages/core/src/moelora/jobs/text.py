"""From a row's text to token ids: the tokenizer, the opening token, the split into context and choice, cutting.

Rules, the same for `prompt` and for the text that the chat template makes of `messages`:

- What the tokenizer puts in front of a text (BOS, as a rule) is put there once: not if the text begins with it already.
  What it would put behind a text is left out, since the prompt is something to be continued.
- With choices, white space at the end of the context belongs to the choice. Context and choice are encoded together and
  cut where the context's own encoding ends. Where the two encodings disagree before that point, or the cut would leave
  the choice without a token, the choice is encoded apart: no token then spans the join.
- An empty context is the opening token (BOS, else EOS) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moelora.errors import CheckpointError, RequestError
from moelora.jobs.rows import Row
from moelora.models.checkpoint import find_model_folder

# A folder with none of these has no tokenizer. Asking transformers is no test: for some model types it answers with an
# empty vocabulary that encodes every text to nothing.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "tokenizer.model.v3",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A row as token ids. truncated_tokens: how many tokens of the prompt were cut away on its left."""

    token_ids: tuple[int, ...]
    choices: tuple[tuple[int, ...], ...] = ()
    truncated_tokens: int = 0


class TextEncoder:
    """Encodes rows. Without a tokenizer, rows of token ids still pass, and rows with text raise `RequestError`.

    tokenizer: of transformers, or None. missing: what to tell rows with text if it is None.
    """

    def __init__(self, tokenizer: Any | None, *, missing: str = "the model has no tokenizer") -> None:
        self._tokenizer = tokenizer
        self._missing = missing
        self.prefix: tuple[int, ...] = _prefix(tokenizer) if tokenizer is not None else ()
        self._adds_space = tokenizer is not None and _adds_space(tokenizer)

    @property
    def opening(self) -> tuple[int, ...]:
        """What stands for an empty context: the tokenizer's prefix, else BOS, else EOS, else nothing."""
        if self.prefix or self._tokenizer is None:
            return self.prefix
        for name in ("bos_token_id", "eos_token_id"):
            token_id = getattr(self._tokenizer, name, None)
            if token_id is not None:
                return (int(token_id),)
        return ()

    def encode(self, row: Row) -> Encoded:
        """Token ids of the row's prompt and choices, uncut. Raises `RequestError` if there are none."""
        if row.prompt_token_ids is not None:
            context = row.prompt_token_ids or self._opening_or_refuse("prompt_token_ids")
            choices = [self._apart(text) for text in row.choices] or list(row.choices_token_ids)
        else:
            text = row.prompt if row.prompt is not None else self.render(row.messages or ())
            if row.choices:
                context, choices = self._split(text, row.choices)
            else:
                context = self._with_prefix(self._ids([text])[0]) if text else self._opening_or_refuse("prompt")
                choices = list(row.choices_token_ids)
        if not context:
            raise RequestError("the prompt is encoded to no token")
        if () in choices:
            raise RequestError(f"choices[{choices.index(())}] is encoded to no token")
        return Encoded(token_ids=context, choices=tuple(choices))

    def render(self, messages: Sequence[dict[str, Any]]) -> str:
        """The text that the chat template makes of `messages`, opened for the assistant's turn.

        The turn is not opened if the last message is the assistant's own. Raises `RequestError` if there is no template
        or the template refuses the messages.
        """
        tokenizer = self._require()
        if not getattr(tokenizer, "chat_template", None):
            raise RequestError("messages need a chat template, and the model's tokenizer has none; give prompt instead")
        opened = messages[-1]["role"] != "assistant"
        try:
            text = tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=opened)
        except Exception as error:  # templates are programs of the model's author and raise what they like
            raise RequestError(f"the chat template refuses these messages: {error}") from error
        if not text:
            raise RequestError("the chat template makes an empty text of these messages")
        return str(text)

    def _split(self, text: str, choices: Sequence[str]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
        """The context's ids and each choice's ids, by the rules in the module docstring."""
        context = text.rstrip()
        moved = text[len(context) :]
        full = [moved + choice for choice in choices]
        if not context:
            opening = self._opening_or_refuse("the prompt")
            return opening, [_without(opening, ids) for ids in self._ids(full)]
        context_ids, *joint = self._ids([context, *(context + choice for choice in full)])
        cut = len(context_ids)
        spans = [ids[cut:] if ids[:cut] == context_ids else () for ids in joint]
        spans = [span or self._apart(choice) for span, choice in zip(spans, full, strict=True)]
        return self._with_prefix(context_ids), spans

    def _apart(self, text: str) -> tuple[int, ...]:
        """Ids of a text that continues something, encoded without what stands before it."""
        if self._adds_space:
            # A line break in front takes the tokenizer's own space upon itself.
            newline, both = self._ids(["\n", "\n" + text])
            if both[: len(newline)] == newline:
                return both[len(newline) :]
        return self._ids([text])[0]

    def _ids(self, texts: list[str]) -> list[tuple[int, ...]]:
        encoded = self._require()(texts, add_special_tokens=False, verbose=False)["input_ids"]
        return [tuple(ids) for ids in encoded]

    def _with_prefix(self, ids: tuple[int, ...]) -> tuple[int, ...]:
        return ids if ids[: len(self.prefix)] == self.prefix else self.prefix + ids

    def _opening_or_refuse(self, what: str) -> tuple[int, ...]:
        if self._tokenizer is None:
            raise RequestError(f"{what} is empty, and {self._missing}; give prompt_token_ids of a token or more")
        if not self.opening:
            raise RequestError(f"{what} is empty, and the tokenizer has neither BOS nor EOS to stand for it")
        return self.opening

    def _require(self) -> Any:
        if self._tokenizer is None:
            raise RequestError(f"{self._missing}; give prompt_token_ids (and choices_token_ids) instead of text")
        return self._tokenizer


def fit(
    encoded: Encoded,
    *,
    limit: int | None,
    truncate: bool,
    opening: tuple[int, ...] = (),
    origin: str = "",
) -> Encoded:
    """Makes prompt and longest choice fit into `limit` tokens together, or raises `RequestError`.

    With `truncate` the prompt loses tokens on its left, behind `opening` if it begins with that; choices stay whole
    and at least one token of the prompt stays. origin: where the limit comes from, for the message.
    """
    longest = max(map(len, encoded.choices), default=0)
    over = 0 if limit is None else len(encoded.token_ids) + longest - limit
    if over <= 0:
        return encoded
    size = f"{len(encoded.token_ids)} tokens" + (f" and {longest} of the longest choice" if longest else "")
    exceed = f"exceed the limit of {limit}" + (f" ({origin})" if origin else "")
    kept = encoded.token_ids[: len(opening)] == opening
    head = len(opening) if kept else 0
    if over > len(encoded.token_ids) - max(head, 1):
        raise RequestError(f"too long: {size} {exceed}, and choices are never cut")
    if not truncate:
        raise RequestError(f"too long: {size} {exceed}; --on-long truncate-left cuts the prompt on its left")
    return Encoded(
        token_ids=encoded.token_ids[:head] + encoded.token_ids[head + over :],
        choices=encoded.choices,
        truncated_tokens=over,
    )


def load_encoder(model: str | Path) -> TextEncoder:
    """The encoder of a checkpoint folder or of a model in the Hugging Face cache.

    A checkpoint without tokenizer files gives an encoder that takes token ids only. Raises `CheckpointError` if there
    are files but they cannot be loaded.
    """
    folder = find_model_folder(model)
    if not has_tokenizer(folder):
        return TextEncoder(None, missing=f"the model {model} has no tokenizer files")
    from transformers import AutoTokenizer

    try:
        return TextEncoder(AutoTokenizer.from_pretrained(str(folder), local_files_only=True))
    except Exception as error:  # whatever a broken file provokes in any of the tokenizer libraries
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the tokenizer in {folder} cannot be loaded: {reason}") from error


def has_tokenizer(folder: Path) -> bool:
    """True if the folder holds a tokenizer's files."""
    return any((folder / name).exists() for name in _TOKENIZER_FILES)


def _prefix(tokenizer: Any) -> tuple[int, ...]:
    """What the tokenizer puts in front of every text, found by trying, since its settings do not always tell."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a", add_special_tokens=True)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return tuple(full[:start])
    return ()


def _adds_space(tokenizer: Any) -> bool:
    """True if the tokenizer begins every text with a space of its own."""
    ids = tokenizer("a", add_special_tokens=False)["input_ids"]
    tokens = tokenizer.convert_ids_to_tokens(ids)
    return bool(tokens) and str(tokens[0]).startswith(("\u2581", "\u0120"))


def _without(opening: tuple[int, ...], ids: tuple[int, ...]) -> tuple[int, ...]:
    """`ids` without a second `opening` at its start, if something is left then."""
    head = len(opening)
    return ids[head:] if ids[:head] == opening and len(ids) > head else ids
