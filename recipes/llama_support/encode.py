"""From rows to tokens, each with a mark that says whether the loss counts it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2
import numpy as np
from numpy.typing import NDArray

from .errors import BadInput
from .rows import Row

_BATCH = 1024
# Llama 3.2 templates print the current date into the system turn unless they are given one: a run that is resumed on
# another day must see the same tokens.
_TEMPLATE_DATE = "26 Jul 2024"
_MARKER = "\ue000assistant turn\ue001"


@dataclass(frozen=True)
class Document:
    """One encoded row.

    Attributes:
        tokens: int32, (length,), special tokens included.
        trained: bool, (length,): the loss counts the prediction of this token.
    """

    tokens: NDArray[np.int32]
    trained: NDArray[np.bool_]


@dataclass
class EncodingReport:
    """What became of the rows: how many are used whole, cut to the context, or left out, and why."""

    used: int = 0
    truncated: int = 0
    too_long: int = 0
    without_target: int = 0

    def __str__(self) -> str:
        """For example `512 rows (3 truncated), 2 left out: 2 with nothing to train on within the context`."""
        text = f"{self.used} rows" + (f" ({self.truncated} truncated)" if self.truncated else "")
        reasons = []
        if self.too_long:
            reasons.append(f"{self.too_long} longer than the context")
        if self.without_target:
            reasons.append(f"{self.without_target} with nothing to train on within the context")
        left_out = self.too_long + self.without_target
        return text + (f", {left_out} left out: {', '.join(reasons)}" if left_out else "")


def encode_rows(
    rows: list[Row], tokenizer: Any, context: int, long_rows: str = "truncate"
) -> tuple[list[Document], EncodingReport]:
    """Encode every row, in order.

    Args:
        rows: what to encode.
        tokenizer: a fast tokenizer of transformers; with a chat template where rows hold messages.
        context: most predictions per document. A document has one token more than predictions.
        long_rows: "truncate" keeps the beginning of a longer document, "skip" leaves the document out.

    Rows whose kept part has no trained token are left out. All counts are in the report. Raises BadInput for a row
    that the chat template refuses, and where no row is left.
    """
    report = EncodingReport()
    # In batches: a fast tokenizer does a thousand texts in little more time than it takes to call it a few times.
    documents = [
        document
        for start in range(0, len(rows), _BATCH)
        for document in encode_batch(rows[start : start + _BATCH], tokenizer, context, long_rows, report)
        if document is not None
    ]
    if not documents:
        raise BadInput(
            f"none of the {len(rows)} rows can be used ({report}); raise --sequence-length (now {context})"
            + (", use --long-rows truncate," if report.too_long else "")
            + " or give other data"
        )
    return documents, report


def encode_batch(
    rows: list[Row], tokenizer: Any, context: int, long_rows: str, report: EncodingReport
) -> list[Document | None]:
    """The documents of some rows, in order, None for a row that is left out; `report` counts on.

    Arguments and errors are those of `encode_rows`, but for a batch that leaves nothing.
    """
    documents: list[Document | None] = []
    plain = iter(_encode_plain([row for row in rows if row.messages is None], tokenizer))
    chats = iter(_encode_chats([row for row in rows if row.messages is not None], tokenizer))
    for row in rows:
        document = next(plain if row.messages is None else chats)
        is_longer = len(document.tokens) > context + 1
        if is_longer and long_rows == "skip":
            report.too_long += 1
            documents.append(None)
            continue
        if is_longer:
            document = Document(document.tokens[: context + 1], document.trained[: context + 1])
        if document.trained[1:].any():
            documents.append(document)
            report.used += 1
            report.truncated += is_longer
        else:
            documents.append(None)
            report.without_target += 1
    return documents


def _encode_plain(rows: list[Row], tokenizer: Any) -> list[Document]:
    if not rows:
        return []
    first = [row.text if row.prompt is None else row.prompt for row in rows]
    # The prompt and the completion are encoded apart, as they are in use: the prompt's last token is never merged with
    # the completion's first.
    heads = tokenizer(first, add_special_tokens=True)["input_ids"]
    tails = tokenizer([row.completion or "" for row in rows], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    documents = []
    for row, head, tail in zip(rows, heads, tails):
        if head and head[-1] == end:
            head = head[:-1]
        tokens = np.array([*head, *tail] + ([end] if end is not None else []), dtype=np.int32)
        trained = np.ones(len(tokens), dtype=np.bool_)
        if row.prompt is not None:
            trained[: len(head)] = False
        documents.append(Document(tokens, trained))
    return documents


def _encode_chats(rows: list[Row], tokenizer: Any) -> list[Document]:
    if not rows:
        return []
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(
            f'{rows[0].origin}: has "messages", but the model\'s tokenizer has no chat template; put one beside it'
            ' (chat_template.jinja), or give rows with "prompt" and "completion"'
        )
    rendered = [_render_chat(row, tokenizer) for row in rows]
    encoded = tokenizer([text for text, _ in rendered], add_special_tokens=False, return_offsets_mapping=True)
    documents = []
    for (_, spans), tokens, offsets in zip(rendered, encoded["input_ids"], encoded["offset_mapping"]):
        starts, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
        trained = np.zeros(len(tokens), dtype=np.bool_)
        for start, end in spans:
            trained |= (starts < end) & (ends > start)
        documents.append(Document(np.array(tokens, dtype=np.int32), trained))
    return documents


def _render_chat(row: Row, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """The conversation as text, and the character spans of the assistant's turns with their end-of-turn marks.

    A template may trim a content, number turns, or close the conversation, so a turn is found by what the template
    puts around a marker in its place, not by searching for the content.
    """
    messages = list(row.messages or ())
    try:
        text = _apply_template(tokenizer, messages)
        spans = [
            _assistant_span(tokenizer, messages, index, text)
            for index, message in enumerate(messages)
            if message["role"] == "assistant"
        ]
    except jinja2.TemplateError as error:
        raise BadInput(f"{row.origin}: the model's chat template refuses this conversation ({error})") from error
    found = [span for span in spans if span is not None]
    if len(found) < len(spans):
        raise BadInput(
            f"{row.origin}: the model's chat template changes what stands around an assistant turn with the turn's own"
            " content, so the turn cannot be located; use a template without that"
        )
    return text, found


def _assistant_span(tokenizer: Any, messages: list[dict[str, str]], index: int, text: str) -> tuple[int, int] | None:
    until = [*messages[:index], {**messages[index], "content": _MARKER}]
    before, _, after = _apply_template(tokenizer, until + messages[index + 1 :]).partition(_MARKER)
    start, end = len(before), len(text) - len(after)
    if not (text.startswith(before) and text.endswith(after) and start <= end):
        return None
    # What the template writes after the turn when the conversation stops there is the end-of-turn mark; a model has to
    # learn to write it.
    mark = _apply_template(tokenizer, until).partition(_MARKER)[2]
    while mark and not text.startswith(mark, end):
        mark = mark[:-1]
    return start, end + len(mark)


def _apply_template(tokenizer: Any, messages: list[dict[str, str]]) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, date_string=_TEMPLATE_DATE)
