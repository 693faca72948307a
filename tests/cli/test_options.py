"""Groups of options, and sizes as people write them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer

from qkv.cli.options import SamplingOptions, byte_count, grouped
from qkv.engine.params import SamplingParams
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


@dataclass
class Size:
    width: Annotated[int, typer.Option("--width", "-w")] = 3
    height: Annotated[int | None, typer.Option("--height")] = None


def test_a_group_of_options_is_what_typer_sees_and_a_dataclass_is_what_the_command_gets() -> None:
    seen: list[tuple[str, Size, bool]] = []

    @grouped
    def paint(size: Size, name: Annotated[str, typer.Argument()], dry: Annotated[bool, typer.Option("--dry")] = False):
        """Paint it."""
        seen.append((name, size, dry))

    app = typer.Typer()
    app.command()(paint)
    command = typer.main.get_command(app)
    command.main(["red", "--height", "5", "--dry"], standalone_mode=False)
    command.main(["-w", "1", "blue"], standalone_mode=False)
    assert seen == [("red", Size(3, 5), True), ("blue", Size(1, None), False)]
    assert command.help == "Paint it."
    with pytest.raises(Exception, match="valid integer"):
        command.main(["red", "--height", "tall"], standalone_mode=False)


def test_the_sampling_options_are_fields_of_the_parameters_with_their_defaults() -> None:
    assert SamplingOptions().params() == SamplingParams()
    assert SamplingOptions(seed=3, top_k=2).params(stop=("a",)) == SamplingParams(seed=3, top_k=2, stop=("a",))
