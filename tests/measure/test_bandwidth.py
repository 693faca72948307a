"""Every way of reading memory reads each number once. How fast is nobody's test."""

from __future__ import annotations

import numpy as np
import pytest

from qkv.errors import ParameterError
from qkv.measure.bandwidth import LINE, PIECES, WAYS, Reader, Way


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_each_way_covers_a_piece_once(way: Way):
    passes, step, _, *offsets = way.numbers()
    starts = np.add.outer(step * np.arange(passes), np.array(offsets))
    read = np.add.outer(starts, np.arange(8)).ravel()
    assert np.array_equal(np.sort(read), np.arange(way.piece // 4))


@pytest.mark.parametrize("threads", [1, 3])
def test_the_memory_is_read_and_added_up(threads):
    reader = Reader(threads, 5 * max(PIECES) + 1)
    assert reader.bytes == 5 * max(PIECES)
    # Distinct powers of two at a few places: a number that was read twice, or never, would show in the sum.
    reader._numbers[:] = 0
    places = np.linspace(0, reader._numbers.size - 1, 30).astype(int)
    reader._numbers[places] = 1 << np.arange(30)
    for way in WAYS:
        reader.way = way
        assert reader.seconds() > 0
        assert reader.sum() == (1 << 30) - 1, way
    reader.close()


def test_tuning_keeps_the_fastest_way(monkeypatch):
    reader = Reader(1, max(PIECES))
    seconds = {way: 10.0 + (way != Way(4, PIECES[1], 8192)) for way in WAYS}
    monkeypatch.setattr(Reader, "seconds", lambda self: seconds[self.way])
    rates = reader.tune()
    assert reader.way == Way(4, PIECES[1], 8192)
    assert rates[reader.way] == reader.bytes / 10
    assert set(rates) == set(WAYS)


def test_what_a_stream_reads_is_whole_cache_lines():
    for way in WAYS:
        assert way.piece // 4 // way.streams % LINE == 0


@pytest.mark.parametrize("threads", [0, 10_000])
def test_impossible_threads(threads):
    with pytest.raises(ParameterError, match="threads must be a whole number from 1 to"):
        Reader(threads)
