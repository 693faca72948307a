"""The one output path: streamed pieces and the whole answer are the same, whatever the ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv.text.answer.output import Delta, OutputPipeline
from qkv.text.answer.thinking import ThinkingSplit


def pipeline(tokenizer, stops=None, prompt=""):
    ids = tokenizer.encode(prompt, markers=True)
    split = ThinkingSplit(tokenizer.id("<think>"), tokenizer.id("</think>"), ids, tokenizer.special_ids)
    return OutputPipeline(tokenizer, stops, split)


def answer(tokenizer, output, **options):
    """(thinking, content, whether stopped) of the answer whose ids are those of `output`, markers parsed."""
    path = pipeline(tokenizer, **options)
    ids = tokenizer.encode(output, markers=True) if isinstance(output, str) else output
    deltas = [path.push(id) for id in ids]
    deltas.append(path.finish())
    return "".join(d.thinking for d in deltas), "".join(d.content for d in deltas), deltas[-1].stopped


@pytest.mark.parametrize(
    ("output", "prompt", "expected"),
    [
        ("Hello", "<think>\n\n</think>\n\n", ("", "Hello")),
        ("Hello", "", ("", "Hello")),
        (" hi\n", "", ("", " hi\n")),
        ("\n\nhi", "", ("", "\n\nhi")),
        ("\n\nhi", "<think>\n\n</think>", ("", "hi")),
        ("<think>\na\n\nb\n</think>\n\n c\n", "", ("a\n\nb", " c\n")),
        ("a</think>b", "<think>\n", ("a", "b")),
        ("a", "<think>\n", ("a", "")),
        ("a\n", "<think>x<|im_end|>", ("", "a\n")),
        ("<think>only", "", ("only", "")),
        ("</think>\n\nx", "", ("", "x")),
    ],
)
def test_thinking_and_content(tiny, output, prompt, expected):
    assert answer(tiny, output, prompt=prompt) == (*expected, False)


def test_markers_and_control_tokens_are_in_no_text(tiny):
    thinking, content, _ = answer(tiny, "<think>a<|im_start|>b</think>c<|im_end|>d")
    assert (thinking, content) == ("ab", "cd")
    assert answer(tiny, "x<tool_call>{}")[1] == "x<tool_call>{}"
    # The letters of a marker are text.
    assert answer(tiny, tiny.encode("<think>1</think>")) == ("", "<think>1</think>", False)


def test_stop_strings_count_in_content_only(tiny):
    assert answer(tiny, "<think>1=1</think>ok=no", stops=["="]) == ("1=1", "ok", True)
    assert answer(tiny, "abcDEFGH", stops="DEFX") == ("", "abcDEFGH", False)
    assert answer(tiny, "abcDEF", stops="DEFX") == ("", "abcDEF", False)


def test_after_a_stop_nothing_comes(tiny):
    path = pipeline(tiny, stops="b")
    for id in tiny.encode("ab"):
        delta = path.push(id)
    assert delta.stopped
    assert path.push(tiny.id("c")) == Delta(stopped=True)
    assert path.finish() == Delta(stopped=True)


def test_half_characters_are_flushed_where_they_belong(tiny):
    half = tiny.encode("😀")[:-1]
    assert tiny.token_bytes(half[-1]) != "😀".encode()
    open_id, close_id = tiny.id("<think>"), tiny.id("</think>")
    assert answer(tiny, [open_id, *half, close_id, *half]) == ("\ufffd", "\ufffd", False)
    # A stop string can be found in what only the end makes complete.
    assert answer(tiny, half, stops="\ufffd") == ("", "", True)


@given(st.data())
def test_any_ids_make_the_texts_of_their_parts(tiny, data):
    frequent = st.sampled_from([*tiny.marker_ids.values(), tiny.id("Ċ")])
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1) | frequent))
    open_id, close_id = tiny.id("<think>"), tiny.id("</think>")
    parts = [("content", [])]
    for id in ids:
        if id in (open_id, close_id):
            parts.append(("thinking" if id == open_id else "content", []))
        else:
            parts[-1][1].append(id)
    first, *others = [(kind, tiny.decode(part)) for kind, part in parts]
    content = first[1] + "".join(text.lstrip("\n") for kind, text in others if kind == "content")
    thinking = "".join(text for kind, text in others if kind == "thinking")
    assert answer(tiny, ids) == (thinking.strip("\n"), content, False)


def test_the_text_room_needs_no_arrays():
    modules = "qkv.text.answer.output, qkv.text.prompt.template"
    code = f"import sys, {modules}; print(sorted({{'numpy', 'numba', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
