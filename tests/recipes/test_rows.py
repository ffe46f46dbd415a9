"""Reading JSONL, and the fixed split."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recipes"))

import pytest
from llama_support.errors import BadInput
from llama_support.rows import Row, read_jsonl, read_rows, split_rows
from llama_support.stdlib_corpus import PROMPT_END, stdlib_functions


def _write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_the_three_forms_of_a_row(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello", "name": "ignored"}]
    path = _write(
        tmp_path / "rows.jsonl",
        json.dumps({"messages": chat}),
        "",
        json.dumps({"prompt": "2 + 2 =", "completion": " 4", "source": "ignored"}),
        json.dumps({"text": "ünïcode"}),
    )
    first, second, third = read_jsonl(path)
    assert first.messages == ({"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"})
    assert (second.prompt, second.completion) == ("2 + 2 =", " 4")
    assert third == Row(f"{path}, line 4", text="ünïcode")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "cut of', "not JSON"),
        ("[1, 2]", "a JSON list"),
        ('"text"', "a JSON str"),
        ("{}", "has the fields"),
        ('{"prompt": "alone"}', r"has the fields \['prompt'\]"),
        ('{"text": null}', '"text" is a NoneType'),
        ('{"prompt": "p", "completion": 4}', '"completion" is a int'),
        ('{"messages": []}', '"messages" must be a list'),
        ('{"messages": "hi"}', '"messages" must be a list'),
        ('{"messages": ["hi"]}', r"messages\[0\] must be an object"),
        ('{"messages": [{"role": "user"}]}', r'messages\[0\]: "content" is missing'),
        ('{"messages": [{"role": "user", "content": "hi"}]}', 'no turn with the role "assistant"'),
        ('{"text": "\\ud800"}', "surrogate"),
        ('{"text": ' + "[" * 100_000, "not JSON"),
    ],
)
def test_a_bad_row_names_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    path = _write(tmp_path / "rows.jsonl", '{"text": "fine"}', "", line)
    with pytest.raises(BadInput, match=message) as raised:
        read_jsonl(path)
    assert f"{path}, line 3: " in str(raised.value)
    assert "\n" not in str(raised.value)


def test_bytes_that_are_not_utf8_name_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    with pytest.raises(BadInput, match=r"line 2: not JSON"):
        read_jsonl(path)


@pytest.mark.parametrize("content", ["", "\n  \n"])
def test_an_empty_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    with pytest.raises(BadInput, match="holds no rows"):
        read_jsonl(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="does not exist"):
        read_rows(str(tmp_path / "none.jsonl"))
    with pytest.raises(BadInput, match="is not a file"):
        read_rows(str(tmp_path))


def test_a_row_keeps_its_side_whatever_the_others_are() -> None:
    rows = [Row(f"line {i}", text=f"text {i}") for i in range(2000)]
    _, validation = split_rows(rows, 0.05)
    assert 60 < len(validation) < 140
    assert [row for row in rows if row in set(validation)] == validation
    of_half = split_rows(rows[::2], 0.05)[1]
    assert of_half == [row for row in validation if row in set(rows[::2])]


def test_equal_rows_never_stand_on_both_sides() -> None:
    rows = [Row(f"line {i}", text=f"text {i % 100}") for i in range(400)]
    training, validation = split_rows(rows, 0.1)
    assert {row.text for row in training} & {row.text for row in validation} == set()


def test_a_small_file_still_has_a_validation_row() -> None:
    training, validation = split_rows([Row("1", text="a"), Row("2", text="b")], 1e-9)
    assert (len(training), len(validation)) == (1, 1)
    with pytest.raises(BadInput, match="leaves none to train on"):
        split_rows([Row("1", text="a")], 1e-9)


def test_functions_of_a_library(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text('def late(x):\n    "Doc of late."\n    return x\n')
    (tmp_path / "broken.py").write_text("def (:\n")
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "a.py").write_text('def tested():\n    "Not for training."\n')
    (tmp_path / "a.py").write_text(
        "class A:\n"
        "    @property\n"
        "    async def method(self,\n"
        "                     y=1):\n"
        '        """Doc of method.\n'
        "\n"
        '        More of it."""\n'
        "        # a comment stays\n"
        "        return y\n"
        "\n"
        "    def bare(self):\n"
        "        return 0\n"
    )
    method, late = stdlib_functions(tmp_path)
    assert method == (
        "async def method(self,\n                 y=1):\n    # a comment stays\n    return y" + PROMPT_END,
        "Doc of method.\n\nMore of it.",
    )
    assert late == ("def late(x):\n    return x" + PROMPT_END, "Doc of late.")


def test_a_form_feed_ends_no_line(tmp_path: Path) -> None:
    """Python 3.10's library has them between the functions of a file."""
    (tmp_path / "a.py").write_text('"Doc of a module."\n\f\ndef paged(x):\n    "Doc of paged."\n    return x\n')
    assert stdlib_functions(tmp_path) == [("def paged(x):\n    return x" + PROMPT_END, "Doc of paged.")]


@pytest.mark.full
def test_the_standard_library_is_there() -> None:
    rows = read_rows("stdlib")
    assert len(rows) > 3000
    assert len(set(rows)) == len(rows)
    assert not any('"""' + (row.completion or "") in (row.prompt or "") for row in rows)
