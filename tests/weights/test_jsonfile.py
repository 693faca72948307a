"""JSON from untrusted files: one clean object, or one line that says why not."""

from __future__ import annotations

import pytest

from qkv.errors import ModelFileError
from qkv.weights.jsonfile import parse_json, read_json


@pytest.mark.parametrize(
    ("content", "because"),
    [
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "duplicate key 'c'"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b"[1, 2]", "object is expected, not list"),
        (b"", "not valid JSON"),
        (b'{"a": 1', "not valid JSON"),
        (b'\xef\xbb\xbf{"a": 1}', "not valid JSON"),
        (b'{"a": ' * 40 + b"1" + b"}" * 40, "nested deeper"),
        (b"[" * 200_000, "nested deeper|not valid JSON"),
        (b'{"a": ' + b"9" * 10_000 + b"}", "not valid JSON"),
    ],
    ids=["twice", "nan", "inf", "bytes", "half", "half-key", "list", "empty", "cut", "bom", "deep", "deeper", "digits"],
)
def test_what_is_not_one_clean_object_is_refused(content, because):
    with pytest.raises(ModelFileError, match=because) as caught:
        parse_json(content, "config.json")
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


def test_clean_objects_come_through():
    assert parse_json('{"a": [1, 2.5, null, true, "é😀"]}'.encode(), "x") == {"a": [1, 2.5, None, True, "é😀"]}


def test_large_missing_and_odd_files_are_refused(tmp_path):
    big = tmp_path / "big.json"
    big.write_bytes(b" " * 2000)
    with pytest.raises(ModelFileError, match=r"big\.json: 2,000 bytes; at most 1,000"):
        read_json(big, 1000)
    with pytest.raises(ModelFileError, match=r"none\.json: cannot be read"):
        read_json(tmp_path / "none.json")
    with pytest.raises(ModelFileError, match="not a regular file"):
        read_json(tmp_path)
