"""Stop strings: nothing of one is sent, nothing else is lost or kept waiting, wherever the pieces are cut."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import example, given
from hypothesis import strategies as st

from qkv.text.answer.stops import StopStrings

LETTERS = st.text("ab.", max_size=40)
STOPS = st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4)


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: the shortest beginning of the text that ends with a stop string, cut before the longest such."""
    for end in range(len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(pieces, stops):
    search = StopStrings(stops)
    sent = [search.push(piece) for piece in pieces]
    return "".join(text for text, _ in sent) + search.finish(), search.found


@given(LETTERS, STOPS, st.lists(st.integers(0, 40)))
@example("ababac", ["abac"], [1, 2, 3, 4, 5])
def test_the_result_is_the_definition_wherever_the_text_is_cut(text, stops, cuts):
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(pieces, stops) == naive(text, stops)


@given(LETTERS, STOPS)
def test_only_the_longest_true_prefix_of_a_stop_string_is_held(text, stops):
    search = StopStrings(stops)
    sent = "".join(search.push(char)[0] for char in text)
    if search.found is None:
        prefixes = {stop[:n] for stop in stops for n in range(1, len(stop))}
        held = max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        assert sent == text[: len(text) - held]
        assert search.finish() == text[len(text) - held :]


def test_the_shapes_users_met():
    assert run(["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"]) == ("ABC", "DEFGHIJ")
    assert run(["a brown", " fox"], ["own fox"]) == ("a br", "own fox")
    assert run(["a...x"], [".."]) == ("a", "..")
    assert run(["ab"], ["abc"]) == ("ab", None)
    assert run(["ab", "cd"], ["bc"]) == ("a", "bc")
    assert run(["ab"], ()) == ("ab", None)


def test_nothing_comes_after_a_stop():
    search = StopStrings(["x"])
    assert search.push("axb") == ("a", True)
    assert search.push("more") == ("", True)
    assert search.finish() == ""


def test_long_stop_strings_are_searched_in_linear_time():
    stop = "a" * 100_000 + "b"
    assert run(["a" * 1000] * 300, [stop]) == ("a" * 300_000, None)
    assert run(["a" * 1000] * 300 + ["b"], [stop]) == ("a" * 200_000, stop)
