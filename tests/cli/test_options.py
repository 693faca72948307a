"""Sizes as people write them."""

from __future__ import annotations

import pytest

from qkv.cli.options import byte_count
from qkv.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (None, None),
        ("512MB", 512_000_000),
        ("512 mb", 512_000_000),
        (" 1.5GiB ", 1_610_612_736),
        ("64kB", 64_000),
        ("64KiB", 65_536),
        ("2TB", 2 * 10**12),
        ("123456789", 123_456_789),
        ("7B", 7),
        ("0", 0),
    ],
)
def test_sizes(text: str | None, count: int | None) -> None:
    assert byte_count("--cache-size", text) == count


@pytest.mark.parametrize(
    "text", ["", "MB", "-1MB", "1e9", "1,5GB", "1 zb", "1GBs", "inf", "\u0661MB", "1.MB", "9" * 99]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ParameterError, match=r"^--cache-size must be a size such as") as caught:
        byte_count("--cache-size", text)
    assert "\n" not in str(caught.value)
