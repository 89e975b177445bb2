"""A line of a stream is one line for every reader, whatever the model writes."""

import json

import pytest

from mlx_parallm.server.generation.responses import event, one_line


def test_no_reader_ends_a_line_within() -> None:
    text = "".join(map(chr, range(0x2100)))  # all that str.splitlines takes for an end, as httpx does
    assert len(text.splitlines()) > 5
    for written in (one_line({"text": text}), event({"text": text})):
        assert len(written.decode().splitlines()) in (1, 2)  # an event ends with an empty line
        assert json.loads(written.removeprefix(b"data: ")) == {"text": text}


@pytest.mark.parametrize("character", ["\u0085", "\u2028", "\u2029"])
def test_each_of_the_characters_alone_is_written_as_an_escape(character: str) -> None:
    assert one_line([f"a{character}b"]).decode() == f'["a\\u{ord(character):04x}b"]'
