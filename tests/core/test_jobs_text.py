"""From text to token ids: the opening token, the join of context and choice, templates, cutting."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from core.tiny_tokenizers import CHATML, byte_level, metaspace, save
from moelora.errors import CheckpointError, RequestError
from moelora.jobs.rows import Row
from moelora.jobs.text import Encoded, TextEncoder, fit, load_encoder

PLAIN = byte_level()
BOS = byte_level(bos="<s>", adds_bos=True)
IDLE_BOS = byte_level(bos="<s>")
NEITHER = byte_level(eos=None)
SPACED = metaspace()


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])


def row(prompt: str | None = None, **fields: Any) -> Row:
    return Row(line=1, id=1, prompt=prompt, **fields)


def encode(tokenizer: Any, prompt: str | None = None, **fields: Any) -> Encoded:
    return TextEncoder(tokenizer).encode(row(prompt, **fields))


def shown(tokenizer: Any, tokens: tuple[int, ...]) -> str:
    return str(tokenizer.decode(list(tokens)))


# The opening token.


def test_bos_is_added_exactly_as_the_tokenizer_does():
    assert encode(BOS, "hello").token_ids == (BOS.bos_token_id, *ids(BOS, "hello"))
    assert encode(PLAIN, "hello").token_ids == ids(PLAIN, "hello")
    assert encode(IDLE_BOS, "hello").token_ids == ids(IDLE_BOS, "hello")


def test_bos_is_never_there_twice():
    assert encode(BOS, "<s>hello").token_ids == (BOS.bos_token_id, *ids(BOS, "hello"))
    assert encode(IDLE_BOS, "<s>hello").token_ids.count(IDLE_BOS.bos_token_id) == 1
    with_choices = encode(BOS, "<s>hello", choices=(" world",))
    assert with_choices.token_ids == (BOS.bos_token_id, *ids(BOS, "hello"))


def test_token_ids_are_taken_as_they_are():
    assert encode(BOS, prompt_token_ids=(5, 6)).token_ids == (5, 6)


def test_a_token_that_the_tokenizer_puts_at_the_end_is_left_out():
    tokenizer = byte_level(bos="<s>", adds_bos=True)
    from tokenizers import processors

    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    assert encode(tokenizer, "hello").token_ids == (tokenizer.bos_token_id, *ids(tokenizer, "hello"))


# The join of context and choice.


def test_a_choice_is_what_follows_the_context_in_the_joint_encoding():
    encoded = encode(PLAIN, "Answer:", choices=(" C", " yes"))
    assert encoded.token_ids == ids(PLAIN, "Answer:")
    for choice, text in zip(encoded.choices, (" C", " yes"), strict=True):
        assert encoded.token_ids + choice == ids(PLAIN, "Answer:" + text)


@pytest.mark.parametrize(("context", "choice"), [("Ans", "wer"), ("hello wor", "ld"), ("hello wor", "ld!")])
def test_a_token_across_the_join_makes_the_choice_encoded_apart(context: str, choice: str):
    joint = ids(PLAIN, context + choice)
    assert joint[: len(ids(PLAIN, context))] != ids(PLAIN, context), "the example does not merge across the join"
    encoded = encode(PLAIN, context, choices=(choice,))
    assert encoded.token_ids == ids(PLAIN, context)
    assert encoded.choices == (ids(PLAIN, choice),)


def test_white_space_at_the_end_of_the_context_moves_to_the_choice():
    spaced = encode(PLAIN, "Answer: ", choices=("C", "yes"))
    assert spaced == encode(PLAIN, "Answer:", choices=(" C", " yes"))
    assert encode(PLAIN, "Answer:\n", choices=("C",)).token_ids == ids(PLAIN, "Answer:")


def test_special_tokens_in_the_context_stay_special():
    encoded = encode(PLAIN, "<|im|>Answer:", choices=(" C",))
    assert encoded.token_ids[0] == PLAIN.convert_tokens_to_ids("<|im|>")


def test_a_tokenizer_that_begins_with_a_space_adds_none_to_a_choice():
    encoded = encode(SPACED, "Ans", choices=("wer",))
    assert SPACED.convert_ids_to_tokens(list(encoded.choices[0]))[0] != "\u2581"
    assert "".join(SPACED.convert_ids_to_tokens(list(encoded.choices[0]))) == "wer"
    by_ids = encode(SPACED, prompt_token_ids=(5,), choices=("wer", " wer"))
    assert ["".join(SPACED.convert_ids_to_tokens(list(c))) for c in by_ids.choices] == ["wer", "\u2581wer"]


@pytest.mark.parametrize("context", ["", " ", "\n "])
def test_an_empty_context_is_the_opening_token(context: str):
    assert encode(BOS, context, choices=("yes",)) == Encoded(
        token_ids=(BOS.bos_token_id,), choices=(ids(BOS, context + "yes"),)
    )
    assert encode(IDLE_BOS, context, choices=("yes",)).token_ids == (IDLE_BOS.bos_token_id,)
    assert encode(PLAIN, context, choices=("yes",)).token_ids == (PLAIN.eos_token_id,)
    with pytest.raises(RequestError, match="neither BOS nor EOS"):
        encode(NEITHER, context, choices=("yes",))


def test_an_empty_context_and_a_choice_that_begins_with_bos():
    assert encode(BOS, "", choices=("<s>yes",)).choices == (ids(BOS, "yes"),)


def test_choices_as_token_ids_leave_the_context_alone():
    encoded = encode(PLAIN, "Answer: ", choices_token_ids=((5,), (6, 7)))
    assert encoded == Encoded(token_ids=ids(PLAIN, "Answer: "), choices=((5,), (6, 7)))
    assert encode(PLAIN, prompt_token_ids=(), choices_token_ids=((5,),)).token_ids == (PLAIN.eos_token_id,)


words = st.text("Answerhlowd :!C\n", min_size=0, max_size=12)


@given(context=words, choices=st.lists(words.filter(bool), min_size=1, max_size=3))
@pytest.mark.parametrize("tokenizer", [PLAIN, BOS], ids=["plain", "bos"])
def test_no_character_is_lost_or_counted_twice_at_the_join(tokenizer: Any, context: str, choices: list[str]):
    encoder = TextEncoder(tokenizer)
    encoded = encoder.encode(row(context, choices=tuple(choices)))
    kept = context.rstrip()
    body = encoded.token_ids[len(encoder.opening) if not kept else len(encoder.prefix) :]
    assert shown(tokenizer, body) == kept
    for tokens, choice in zip(encoded.choices, choices, strict=True):
        assert tokens
        assert shown(tokenizer, tokens) == context[len(kept) :] + choice


# Chat templates.


def test_messages_are_rendered_and_opened_for_the_assistant():
    tokenizer = byte_level(bos="<s>", adds_bos=True)
    tokenizer.chat_template = "<s>" + CHATML
    messages = ({"role": "user", "content": "hello"},)
    encoded = encode(tokenizer, messages=messages)
    assert encoded.token_ids.count(tokenizer.bos_token_id) == 1
    assert shown(tokenizer, encoded.token_ids) == "<s><|im|>user\nhello\n<|im|>assistant\n"
    tokenizer.chat_template = CHATML
    assert encode(tokenizer, messages=messages) == encoded


def test_a_last_message_of_the_assistant_is_not_followed_by_another_turn():
    tokenizer = byte_level()
    tokenizer.chat_template = CHATML
    messages = ({"role": "user", "content": "hello"}, {"role": "assistant", "content": "yes"})
    assert shown(tokenizer, encode(tokenizer, messages=messages).token_ids).endswith("assistant\nyes\n")


def test_messages_without_template_or_refused_by_it_are_errors_of_the_row():
    messages = ({"role": "user", "content": "x"},)
    with pytest.raises(RequestError, match="chat template"):
        encode(PLAIN, messages=messages)
    tokenizer = byte_level()
    tokenizer.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate"):
        encode(tokenizer, messages=messages)
    tokenizer.chat_template = "{{ messages[0].content.nothing.more }}"
    with pytest.raises(RequestError, match="refuses these messages"):
        encode(tokenizer, messages=messages)


# Without a tokenizer.


def test_without_a_tokenizer_token_ids_pass_and_text_is_refused():
    encoder = TextEncoder(None, missing="the model x has no tokenizer files")
    assert encoder.encode(row(prompt_token_ids=(1, 2), choices_token_ids=((3,),))).choices == ((3,),)
    for bad in (row("hello"), row(prompt_token_ids=(1,), choices=("a",)), row("", choices_token_ids=((1,),))):
        with pytest.raises(RequestError, match="no tokenizer files; give prompt_token_ids"):
            encoder.encode(bad)
    with pytest.raises(RequestError, match="prompt_token_ids is empty, and the model x has no tokenizer files"):
        encoder.encode(row(prompt_token_ids=(), choices_token_ids=((3,),)))


def test_an_empty_folder_has_no_tokenizer_even_if_transformers_would_make_one(tmp_path: Path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}')
    with pytest.raises(RequestError, match="has no tokenizer files"):
        load_encoder(tmp_path).encode(row("hello"))


def test_a_tokenizer_is_loaded_from_the_model_folder(tmp_path: Path):
    encoder = load_encoder(save(BOS, tmp_path / "m"))
    assert encoder.encode(row("hello")).token_ids == (BOS.bos_token_id, *ids(BOS, "hello"))


def test_a_broken_tokenizer_or_a_missing_model_is_refused(tmp_path: Path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_encoder(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not exist|neither a folder nor"):
        load_encoder(tmp_path / "none")
    with pytest.raises(CheckpointError, match="is a file"):
        load_encoder(tmp_path / "tokenizer.json")


# Cutting.


@pytest.mark.parametrize(("limit", "cut"), [(8, 0), (7, 0), (6, 1), (4, 3), (3, 4)])
def test_the_prompt_is_cut_on_its_left_and_choices_stay_whole(limit: int, cut: int):
    encoded = Encoded(token_ids=(1, 2, 3, 4, 5), choices=((8,), (9, 9)))
    fitted = fit(encoded, limit=limit, truncate=True)
    assert fitted == Encoded(token_ids=(1, 2, 3, 4, 5)[cut:], choices=encoded.choices, truncated_tokens=cut)
    if cut:
        with pytest.raises(
            RequestError, match=rf"5 tokens and 2 of the longest choice exceed the limit of {limit}; --on"
        ):
            fit(encoded, limit=limit, truncate=False)


def test_a_choice_that_leaves_no_room_for_the_prompt_is_an_error():
    encoded = Encoded(token_ids=(1, 2), choices=((7, 8, 9),))
    assert fit(encoded, limit=4, truncate=True).token_ids == (2,)
    for limit in (3, 2, 1):
        for truncate in (True, False):
            with pytest.raises(RequestError, match="choices are never cut"):
                fit(encoded, limit=limit, truncate=truncate)


def test_an_opening_token_survives_the_cut():
    encoded = Encoded(token_ids=(0, 1, 2, 3), choices=((9,),))
    assert fit(encoded, limit=3, truncate=True, opening=(0,)).token_ids == (0, 3)
    assert fit(encoded, limit=2, truncate=True, opening=(0,)).token_ids == (0,)
    assert fit(encoded, limit=3, truncate=True, opening=(5,)).token_ids == (2, 3)


def test_no_limit_no_cut():
    encoded = Encoded(token_ids=tuple(range(10_000)))
    assert fit(encoded, limit=None, truncate=False) is encoded
