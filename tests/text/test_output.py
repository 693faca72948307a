"""The one output path: streamed pieces and the whole answer are the same, whatever the ids."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qkv import SamplingParams
from qkv.text.answer.output import Delta, OutputPipeline
from qkv.text.answer.thinking import ThinkingSplit


def pipeline(tokenizer, stops=None, prompt=""):
    ids = tokenizer.encode(prompt, markers=True)
    split = ThinkingSplit(tokenizer.id("<think>"), tokenizer.id("</think>"), ids, tokenizer.special_ids)
    return OutputPipeline(tokenizer, SamplingParams(stop=stops or ()).stop, split)


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


@pytest.mark.parametrize("tools", [True, False])
@pytest.mark.parametrize(("said", "stop", "text"), [("", "\ufffd", ""), ("ab", "b\ufffd", "a"), ("a", "x", "a\ufffd")])
def test_a_stop_string_that_only_the_end_completes_is_a_stop(tiny, said, stop, text, tools):
    """An answer that max_tokens cuts off in the middle of a character."""
    path = OutputPipeline(tiny, [stop], ThinkingSplit(None, None, []), tools=tools)
    deltas = [path.push(id) for id in tiny.encode(said) + tiny.encode("😀")[:-1]]
    assert path.finish_reason("length") == "length"
    deltas.append(path.finish(cut=True))
    assert "".join(delta.content for delta in deltas) == text
    assert path.finish_reason("length") == ("length" if text.endswith("\ufffd") else "stop")


@given(st.data())
def test_any_ids_make_the_texts_of_their_parts(tiny, data):
    frequent = st.sampled_from([*tiny.marker_ids.values(), tiny.id("Ċ")])
    ids = data.draw(st.lists(st.integers(0, tiny.vocab_size - 1) | frequent))
    open_id, close_id = tiny.id("<think>"), tiny.id("</think>")
    opened = ids.index(open_id) if open_id in ids else len(ids)
    start = 0 if ids[:1] == [close_id] else opened  # a first marker that closes ends a thinking of nothing
    closed = ids.index(close_id, start) if close_id in ids[start:] else len(ids)
    before, thought, after = (
        tiny.decode([id for id in part if id not in tiny.special_ids], skip_special=False)
        for part in (ids[:start], ids[start + 1 : closed], ids[closed + 1 :])
    )
    thinking, content = thought.strip("\n"), before + after.lstrip("\n")
    assert answer(tiny, ids) == (thinking, content, False)


def test_the_text_room_needs_no_arrays():
    modules = "qkv.text.answer.output, qkv.text.prompt.template"
    code = f"import sys, {modules}; print(sorted({{'numpy', 'numba', 'torch'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
