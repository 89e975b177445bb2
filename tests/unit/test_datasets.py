"""JSON-lines files: which tokens are learnt, what is cut, what is refused and how that is said, how rows are split."""

import json
from pathlib import Path
from typing import Any

import pytest

from mlx_parallm.errors import ConfigError
from mlx_parallm.text.prompts import Prompts
from mlx_parallm.training.supervised.datasets import DatasetReader, Example, read_rows, split
from tests.tiny import tiny_tokenizer

USER, ASSISTANT = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"


def reader(max_length: int = 1000, *, chat: bool = True, template: str | None = None) -> DatasetReader:
    tokenizer = tiny_tokenizer()
    if template is not None:
        tokenizer._tokenizer.chat_template = template
    return DatasetReader(Prompts(tokenizer), tokenizer.eos_token_id, max_length, chat)


def written(folder: Path, *rows: Any) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows) + b"\n")
    return path


def text(tokens: list[int]) -> str:
    return str(tiny_tokenizer()._tokenizer.decode(tokens))


def learnt(example: Example) -> str:
    return text([token for token, one in zip(example.tokens, example.mask, strict=True) if one])


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_assistant_s_turns_are_learnt_and_nothing_else(tmp_path: Path) -> None:
    turns = [said("user", "the sea"), said("assistant", "is wide"), said("user", "and"), said("assistant", "wet")]
    (found,) = reader().examples(written(tmp_path, {"messages": turns})).items
    assert text(found.tokens) == "".join(
        (USER.format("the sea"), ASSISTANT.format("is wide"), USER.format("and"), ASSISTANT.format("wet"))
    )
    assert learnt(found) == "is wide<|im_end|>\nwet<|im_end|>\n"


def test_prompts_and_completions(tmp_path: Path) -> None:
    history = [said("user", "a"), said("assistant", "b"), said("user", "the sea")]
    rows = (
        {"prompt": "the sea", "completion": "is wide"},
        {"prompt": history, "completion": [said("assistant", "is wide")]},
        {"prompt": history[2:], "completion": "is wide", "source": "some other field"},
    )
    found = reader().examples(written(tmp_path, *rows)).items
    assert [learnt(one) for one in found] == ["is wide<|im_end|>\n"] * 3  # an earlier answer is part of the prompt
    assert text(found[0].tokens) == USER.format("the sea") + ASSISTANT.format("is wide")
    assert found[0] == found[2]


def test_text_without_a_template_ends_with_the_end_of_sequence(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "1 + 1 =", "completion": " 2"}, {"prompt": "in", "completion": "g the"})
    one, other = reader(chat=False).examples(path).items
    assert text(one.tokens) == "1 + 1 = 2<|im_end|>"
    assert learnt(one) == " 2<|im_end|>"
    assert text(other.tokens) == "ing the<|im_end|>"
    assert learnt(other) == "ing the<|im_end|>"  # "ing" is one token: it belongs to what is learnt


def test_preferences(tmp_path: Path) -> None:
    rows = (
        {"prompt": "the sea", "chosen": "is wide", "rejected": "is dry"},
        {"prompt": [said("user", "the sea")], "chosen": [said("assistant", "is wide")], "rejected": "is dry"},
    )
    first, second = reader().preferences(written(tmp_path, *rows)).items
    assert first == second
    assert learnt(first.chosen) == "is wide<|im_end|>\n"
    assert learnt(first.rejected) == "is dry<|im_end|>\n"
    plain = reader(chat=False).preferences(written(tmp_path, rows[0])).items[0]
    assert learnt(plain.rejected) == "is dry<|im_end|>"


def test_a_template_that_changes_earlier_turns_gives_an_example_for_each(tmp_path: Path) -> None:
    """As Qwen3's, which leaves out the thoughts of all turns but the last."""
    template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{% if m['role'] == 'assistant' and loop.last %}(hm) {% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [said("user", "a"), said("assistant", "b"), said("user", "c"), said("assistant", "d")]
    found = reader(template=template).examples(written(tmp_path, {"messages": turns})).items
    assert [learnt(one) for one in found] == ["(hm) b<|im_end|>\n", "(hm) d<|im_end|>\n"]


def test_long_rows_are_cut_and_counted(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "completion": word} for word in ("b", "long " * 40)]
    rows.append({"prompt": "long " * 40, "completion": "b"})
    found = reader(40).examples(written(tmp_path, *rows))
    assert (len(found.items), found.cut, found.left_out) == (2, 2, 1)
    assert len(found.items[1].tokens) == len(found.items[1].mask) == 40
    with pytest.raises(ConfigError, match=r"anything to learn within 5 tokens"):
        reader(5).examples(written(tmp_path, *rows))


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (b'{"prompt": "a", ', "line 2: it is not JSON"),
        (b"\xff\xfe", "line 2: it is not UTF-8"),
        ([1], "line 2: a row must be an object, and this is list"),
        ({"prompt": "a"}, "line 2: field 'completion' is missing; there is 'prompt'"),
        ({"text": "a"}, "line 2: field 'messages' is missing; there is 'text'"),
        ({}, "line 2: field 'messages' is missing; there is none"),
        ({"prompt": "", "completion": "a"}, "line 2: field 'prompt' must be a string or a list of messages"),
        ({"prompt": "a", "completion": 3}, "line 2: field 'completion' must be a string"),
        ({"messages": [{"role": "user"}]}, "line 2: message 0 of field 'messages' has no 'content'"),
        ({"messages": [said("user", "a")]}, "line 2: there is no message of the assistant's"),
        ({"messages": [said("assistant", "a")]}, "line 2: the first message is the assistant's"),
    ],
)
def test_what_is_wrong_with_a_row_is_said_with_its_file_and_line(tmp_path: Path, row: Any, problem: str) -> None:
    path = written(tmp_path, {"prompt": "a", "completion": "b"}, row)
    with pytest.raises(ConfigError) as caught:
        reader().examples(path)
    assert f"{path}, {problem}" in caught.value.message


@pytest.mark.parametrize("missing", ["prompt", "chosen", "rejected"])
def test_pairs_without_a_field(tmp_path: Path, missing: str) -> None:
    row = {"prompt": "a", "chosen": "b", "rejected": "c"}
    del row[missing]
    with pytest.raises(ConfigError, match=f"line 1: field '{missing}' is missing"):
        reader().preferences(written(tmp_path, row))


def test_files_that_are_empty_or_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no rows"):
        read_rows(written(tmp_path, b"", b"  "))
    with pytest.raises(ConfigError, match="can't be read: No such file"):
        read_rows(tmp_path / "nothing.jsonl")


def test_a_template_s_refusal_names_the_line(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a", "completion": "b"})
    with pytest.raises(ConfigError, match="line 1: the model's chat template can't render"):
        reader(template="{{ raise_exception('no') }}").examples(path)


def test_a_split_depends_on_the_seed_alone() -> None:
    rows = list(range(40))
    kept, held_out = split(rows, 0.1, 3)
    assert len(held_out) == 4
    assert sorted(kept + held_out) == rows
    assert split(rows, 0.1, 3) == (kept, held_out)
    assert split(rows, 0.1, 4) != (kept, held_out)
    assert split(rows, 0.0, 3) == (rows, [])
    assert len(split(rows, 0.001, 3)[1]) == 1
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(ConfigError):
            split(rows, wrong, 0)
    with pytest.raises(ConfigError, match="none be left"):
        split([1], 0.5, 0)
