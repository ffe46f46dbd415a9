"""Tokens, and which of them the loss counts."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

from typing import Any

import numpy as np
import pytest
from llama_support.encode import Document, encode_rows
from llama_support.errors import BadInput
from llama_support.model import DEBUG_MODEL, load_tokenizer
from llama_support.rows import Row

LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|role|>' + m['role'] + '<|content|>\n\n' + m['content'] | trim + '<|turn_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|role|>assistant<|content|>\n\n' }}{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'] | trim + ' [/INST]' }}"
    "{% elif m['role'] == 'assistant' %}{{ ' ' + m['content'] | trim + ' ' + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant') }}{% endif %}{% endfor %}"
)
CHATML = "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
CLOSED_ONCE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}"
    "{% if loop.last %}{{ eos_token }}{% endif %}{% endfor %}"
)
NUMBERED = "{% for m in messages %}{{ loop.revindex ~ m['role'] ~ '(' ~ m['content'] ~ ')' }}{% endfor %}"
DATED = "{{ date_string if date_string is defined else strftime_now('%d %b %Y') }}" + CHATML

CHAT = (
    {"role": "user", "content": "Say yes."},
    {"role": "assistant", "content": "yes "},
    {"role": "user", "content": "yes?"},
    {"role": "assistant", "content": "yes, yes"},
)


@functools.cache
def _tokenizer(template: str | None = None) -> Any:
    tokenizer = load_tokenizer(DEBUG_MODEL)
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def _trained_text(document: Document, tokenizer: Any) -> str:
    return tokenizer.decode(document.tokens[document.trained])


def _encode(*rows: Row, template: str | None = None, context: int = 512) -> list[Document]:
    return encode_rows(list(rows), _tokenizer(template), context)[0]


def test_a_completion_is_trained_and_its_prompt_is_not() -> None:
    tokenizer = _tokenizer()
    (document,) = _encode(Row("", prompt="def f(x):", completion="Returns x."))
    assert tokenizer.decode(document.tokens) == "<|begin|>def f(x):Returns x.<|end|>"
    assert _trained_text(document, tokenizer) == "Returns x.<|end|>"
    prompt = tokenizer("def f(x):")["input_ids"]
    assert document.tokens[: len(prompt)].tolist() == prompt


def test_all_of_a_text_is_trained() -> None:
    (document,) = _encode(Row("", text="some text"))
    assert document.trained.all()
    assert _tokenizer().decode(document.tokens) == "<|begin|>some text<|end|>"


@pytest.mark.parametrize(
    ("template", "trained"),
    [
        (None, ["yes <|turn_end|>", "yes, yes<|turn_end|>"]),
        (LLAMA3, ["yes<|turn_end|>", "yes, yes<|turn_end|>"]),
        (LLAMA2, ["yes <|end|>", "yes, yes <|end|>"]),
        (CHATML, ["yes <|im_end|>\n", "yes, yes<|im_end|>\n"]),
        (CLOSED_ONCE, ["yes \n", "yes, yes\n<|end|>"]),
        (NUMBERED, ["yes )", "yes, yes)"]),
        (DATED, ["yes <|im_end|>\n", "yes, yes<|im_end|>\n"]),
    ],
    ids=["debug", "llama3", "llama2", "chatml", "closed-once", "numbered", "dated"],
)
def test_assistant_turns_are_trained_under_many_templates(template: str | None, trained: list[str]) -> None:
    tokenizer = _tokenizer(template)
    (document,) = _encode(Row("", messages=CHAT), template=template)
    text = tokenizer.apply_chat_template(list(CHAT), tokenize=False, date_string="26 Jul 2024")
    assert document.tokens.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]
    edges = np.flatnonzero(np.diff(np.concatenate(([0], document.trained.astype(int), [0]))))
    turns = [tokenizer.decode(document.tokens[start:end]) for start, end in edges.reshape(-1, 2)]
    assert [turn.strip(" ") for turn in turns] == trained


def test_a_conversation_may_begin_with_the_assistant() -> None:
    chat = ({"role": "assistant", "content": "welcome"}, {"role": "user", "content": "hi"})
    (document,) = _encode(Row("", messages=chat))
    assert _trained_text(document, _tokenizer()) == "welcome<|turn_end|>"


def test_special_tokens_are_added_once() -> None:
    (document,) = _encode(Row("", messages=CHAT))
    assert document.tokens.tolist().count(_tokenizer().bos_token_id) == 1


def test_the_date_does_not_enter_the_tokens() -> None:
    (document,) = _encode(Row("", messages=CHAT), template=DATED)
    assert _tokenizer(DATED).decode(document.tokens).startswith("26 Jul 2024")


def test_a_conversation_that_the_template_refuses_names_its_line() -> None:
    chat = ({"role": "tool", "content": "4"}, *CHAT)
    with pytest.raises(BadInput, match=r"^rows.jsonl, line 7: .*only user and assistant"):
        _encode(Row("rows.jsonl, line 7", messages=chat), template=LLAMA2)


def test_a_template_that_hides_a_turn_is_refused() -> None:
    hides = "{% for m in messages %}{{ m['content'] | length }}{% endfor %}"
    with pytest.raises(BadInput, match=r"^line 1: .*cannot be located"):
        _encode(Row("line 1", messages=CHAT), template=hides)


def test_messages_without_a_template() -> None:
    tokenizer = load_tokenizer(DEBUG_MODEL)
    tokenizer.chat_template = None
    with pytest.raises(BadInput, match="no chat template"):
        encode_rows([Row("line 1", messages=CHAT)], tokenizer, 512)


def test_order_is_kept_when_forms_are_mixed() -> None:
    documents = _encode(Row("", text="one"), Row("", messages=CHAT), Row("", text="three"))
    decoded = [_tokenizer().decode(document.tokens) for document in documents]
    assert [decoded[0], decoded[2]] == ["<|begin|>one<|end|>", "<|begin|>three<|end|>"]
    assert "Say yes." in decoded[1]


def test_long_rows_are_cut_or_left_out_and_counted() -> None:
    rows = [
        Row("", text="a b c"),
        Row("", text="word " * 100),
        Row("", prompt="word " * 100, completion="never seen"),
        Row("", prompt="", completion=""),
    ]
    documents, report = encode_rows(rows, _tokenizer(), 16)
    assert [len(document.tokens) for document in documents][1] == 17
    assert (report.used, report.truncated, report.too_long, report.without_target) == (3, 1, 0, 1)
    documents, report = encode_rows(rows, _tokenizer(), 16, long_rows="skip")
    assert (report.used, report.truncated, report.too_long, report.without_target) == (2, 0, 2, 0)
    assert str(report) == "2 rows, 2 left out: 2 longer than the context"


def test_nothing_left_is_an_error_that_says_why() -> None:
    with pytest.raises(BadInput, match=r"1 longer than the context.*--sequence-length"):
        encode_rows([Row("", text="word " * 100)], _tokenizer(), 16, long_rows="skip")
