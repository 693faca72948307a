"""The front door when it is known what the model says: thinking, tool calls, stop strings and log-probabilities, each
as a whole answer and as a stream.

The model is tiny and really runs; only its logits are replaced, by ones that favour a text. A grammar, a ban or a
budget can still forbid it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from qkv import LLM, SamplingParams
from qkv.errors import ParameterError
from tiny import tiny_config
from tinyllm import HELLO, MARKERS, TEMPLATE, VOCABULARY, come_back, opened, write_model

PIECES = ["DEF", "HI", "...x", "own"]  # tokens that no text is encoded to: only a model writes them
TOOL_MARKERS = ["<tool_call>", "</tool_call>"]
NAMES = [*VOCABULARY[:256], *PIECES, *MARKERS, *TOOL_MARKERS]
CONFIG = tiny_config(vocab_size=len(NAMES), max_position_embeddings=2048)
END = NAMES.index("<|im_end|>")
SWITCH = (  # as Qwen3's: thinking turned off is a closed block, and old thinking is left out
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}"
)
OPENED = TEMPLATE.replace("assistant\n", "assistant\n<think>\n")
SAID = SamplingParams(temperature=0, max_tokens=200)
ARGUMENTS = '{"a":"x}","b":[1,{}],"c":"東京"}'
CALL = f'<tool_call>\n{{"name":"f","arguments":{ARGUMENTS}}}\n</tool_call>'
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"enum": [{"k": 1}]}}}


def write_dictated(folder: Path, *, template: str = SWITCH, tool_markers: bool = True) -> Path:
    write_model(folder, CONFIG, tokenizer=False, eos=END)
    markers = [*MARKERS, *TOOL_MARKERS] if tool_markers else MARKERS
    known = {text: i for i, text in enumerate(NAMES[: 256 + len(PIECES)])}
    bpe = tokenizers.Tokenizer(models.BPE(known, []))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in markers])
    bpe.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return folder


@pytest.fixture(scope="module")
def llms(tmp_path_factory):
    """Models by (template, whether the vocabulary has the markers of tool calls, speculation), opened once."""
    made: dict[tuple, LLM] = {}

    def get(template: str = SWITCH, *, tool_markers: bool = True, speculation: str | None = None) -> LLM:
        key = template, tool_markers, speculation
        if key not in made:
            folder = tmp_path_factory.mktemp("model") / "tiny"
            write_dictated(folder, template=template, tool_markers=tool_markers)
            made[key] = opened(folder, context=1000, speculation=speculation)
        return made[key]

    yield get
    for llm in made.values():
        assert come_back(llm)
        llm.close()


def ids_of(llm: LLM, *said: str) -> list[int]:
    """Tokens of a text, markers and pieces as one each: a piece is an argument of its own."""
    ids: list[int] = []
    for part in said:
        ids += [NAMES.index(part)] if part in PIECES else llm.tokenizer.encode(part, markers=True)
    return ids


@contextmanager
def dictated(llm: LLM, ids: list[int]) -> Iterator[list[np.ndarray]]:
    """Every answer wants to be these tokens and then to end. Gives the rows of logits that were made so."""
    step, rows_made, best = llm._decoder.step, [], [np.empty(0, np.int64)]

    def favour(chunks, **options):
        rows = step(chunks, **options).copy()
        at = 0
        for chunk in chunks:
            (one,) = [one for one in llm._engine.scheduler.running if one.cache is chunk.cache]
            count = {"none": 0, "last": 1, "all": len(chunk.ids)}[chunk.outputs]
            for end in range(chunk.cache.length - count + 1, chunk.cache.length + 1):
                place = end - len(one.prompt_ids)
                if place >= 0:
                    rows[at, ids[place] if place < len(ids) else END] = rows[at].max() + 5
                    rows_made.append(rows[at].copy())
                at += 1
        best[0] = rows.argmax(axis=1)
        return rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm._decoder, "step", favour)
        patch.setattr(llm._decoder, "likeliest", lambda: best[0])
        yield rows_made


def both_ways(llm: LLM, params: SamplingParams, messages=HELLO, **options):
    """The whole answer, which the stream's pieces must add up to, and the stream's chunks."""
    whole = llm.chat(messages, params, **options)
    stream = llm.stream_chat(messages, params, **options)
    chunks = list(stream)
    streamed = stream.completion
    assert "".join(chunk.text for chunk in chunks) == streamed.text == whole.text
    assert "".join(chunk.thinking for chunk in chunks) == streamed.thinking == whole.thinking
    assert streamed.token_ids == whole.token_ids
    assert streamed.finish_reason == whole.finish_reason
    assert streamed.logprobs == whole.logprobs
    assert [choice for chunk in chunks for choice in chunk.logprobs] == (streamed.logprobs or [])
    assert stream.prompt_tokens == streamed.timings.prompt_tokens
    arguments: dict[int, str] = {}
    for delta in (delta for chunk in chunks for delta in chunk.tool_calls):
        arguments[delta.index] = arguments.get(delta.index, "") + delta.arguments
    assert list(arguments) == list(range(len(whole.tool_calls)))
    assert list(arguments.values()) == [call.arguments for call in whole.tool_calls]
    assert [call.name for call in streamed.tool_calls] == [call.name for call in whole.tool_calls]
    assert all("<|im_end|>" not in (chunk.text, chunk.thinking) for chunk in chunks)
    return whole, chunks


# ------------------------------------------------------------------------------------------ thinking


@pytest.mark.parametrize(
    ("template", "thinking", "said", "expected"),
    [
        (SWITCH, False, "Hello", ("", "Hello")),
        (SWITCH, None, "Hello", ("", "Hello")),
        (SWITCH, True, "<think>\nhm\n</think>\n\nHello", ("hm", "Hello")),
        (OPENED, None, "hm\n</think>\n\nHello", ("hm", "Hello")),
        (OPENED, False, "hm</think>Hello", ("hm", "Hello")),  # this template does not heed the switch
        (OPENED, None, "hm", ("hm", "")),
        (SWITCH, None, "<think>hm", ("hm", "")),
        (SWITCH, None, "a <think>b</think> c", ("b", "a  c")),
        (SWITCH, None, "<think>hm</think>a<think>b</think> <tool_call>c", ("hm", "a<think>b</think> <tool_call>c")),
        (SWITCH, False, "a<think>b", ("", "a<think>b")),
    ],
)
def test_thinking_is_told_apart_by_what_the_prompt_and_the_model_say(llms, template, thinking, said, expected):
    llm = llms(template)
    with dictated(llm, ids_of(llm, said)):
        whole, _ = both_ways(llm, SAID, thinking=thinking)
    assert (whole.thinking, whole.text, whole.finish_reason) == (*expected, "stop")


def test_a_stream_may_set_the_variables_of_its_template_and_no_others(llms):
    llm = llms()
    for value in (False, True):
        stream = llm.stream_chat(HELLO, SAID, template_variables={"enable_thinking": value, "unread": [1, None]})
        assert stream.prompt_tokens == llm.stream_chat(HELLO, SAID, thinking=value).prompt_tokens
        stream.close()
    for name in ("messages", "tools", "bos_token", "add_generation_prompt", "chat_template", "no name"):
        with pytest.raises(ParameterError, match=f"^template_variables: '{name}'"):
            llm.stream_chat(HELLO, SAID, template_variables={name: "x"})


def test_thinking_that_is_cut_off_is_no_answer(llms):
    llm = llms()
    with dictated(llm, ids_of(llm, "<think>\nabcdefgh")):
        whole, _ = both_ways(llm, replace(SAID, max_tokens=5))
    assert (whole.thinking, whole.text, whole.finish_reason) == ("abc", "", "length")


def test_stop_strings_end_the_answer_and_not_the_thinking(llms):
    llm = llms()
    with dictated(llm, ids_of(llm, "<think>1=1</think>ok=no")):
        whole, _ = both_ways(llm, replace(SAID, stop=["="]))
    assert (whole.thinking, whole.text, whole.finish_reason) == ("1=1", "ok", "stop")


@pytest.mark.parametrize("speculation", [None, "prompt"])
@pytest.mark.parametrize(
    ("template", "thinking", "said", "thought"),
    [
        (SWITCH, None, "<think>hm</think>\n\nno JSON", "hm"),
        (OPENED, None, "hm</think>no JSON", "hm"),
        (SWITCH, False, "no JSON", ""),
    ],
)
def test_what_a_schema_holds_is_the_content(llms, template, thinking, said, thought, speculation):
    llm = llms(template, speculation=speculation)
    with dictated(llm, ids_of(llm, said)):
        whole, _ = both_ways(llm, replace(SAID, json_schema={"enum": ["yes", [1, 2]]}), thinking=thinking)
    assert whole.thinking == thought
    assert json.loads(whole.text) in ("yes", [1, 2])
    assert whole.finish_reason == "stop"


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "f"}}])
@pytest.mark.parametrize("tool_markers", [True, False])
def test_a_call_that_must_be_made_comes_after_the_thinking(llms, tool_markers, choice):
    llm = llms(tool_markers=tool_markers)
    said = '<think>hm</think>\n\n<tool_call>\n{"name": "f", "arguments": {"k":1}}\n</tool_call>'
    for ids in (ids_of(llm, said), ids_of(llm, "<think>hm</think>No!")):
        with dictated(llm, ids):
            whole, _ = both_ways(llm, replace(SAID, max_tokens=300), tools=[TOOL], tool_choice=choice)
        assert (whole.thinking, whole.text) == ("hm", "")
        assert whole.tool_calls[0].name == "f"
        assert json.loads(whole.tool_calls[0].arguments) == {"k": 1}
        if choice != "required" or "No!" not in llm.tokenizer.decode(ids):
            assert (len(whole.tool_calls), whole.finish_reason) == (1, "tool_calls")


# ------------------------------------------------------------------------------------------ tool calls


EVERY_WAY = pytest.mark.parametrize(
    ("tool_markers", "speculation"), [(True, None), (False, None), (True, "prompt"), (False, "prompt")]
)


@EVERY_WAY
@pytest.mark.parametrize(
    ("said", "text", "calls"),
    [
        (CALL, "", [ARGUMENTS]),
        (f"<think>hm</think>\n\nI look.\n{CALL}", "I look.\n", [ARGUMENTS]),
        (f"{CALL}\n{CALL}\n", "", [ARGUMENTS, ARGUMENTS]),
        ('<tool_call>{"name":"f","arguments":"{\\"a\\":1}"}</tool_call>', "", ['{"a":1}']),
        ('<tool_call>{"arguments":{"a":1},"name":"f"}</tool_call>', "", ['{"a":1}']),
        ('<tool_call>{"name":"f","parameters":{"a":1}', "", ['{"a":1}']),
        (
            f'<tool_call>{{"name":"f","arguments":{{"a":NaN}}}}</tool_call>{CALL}',
            '<tool_call>{"name":"f","arguments":{"a":NaN}}</tool_call>',
            [ARGUMENTS],
        ),
        (
            "<think>hm</think>"
            '<tool_call>{"name":"f","arguments":{"a":"</tool_call><tool_call><think></think>"}}</tool_call>',
            "",
            ['{"a":"</tool_call><tool_call><think></think>"}'],
        ),
    ],
)
def test_calls_are_taken_out_of_the_answer(llms, said, text, calls, tool_markers, speculation):
    llm = llms(tool_markers=tool_markers, speculation=speculation)
    with dictated(llm, ids_of(llm, said)):
        whole, chunks = both_ways(llm, replace(SAID, max_tokens=400), tools=[TOOL])
    assert whole.text == text
    assert [(call.name, call.arguments) for call in whole.tool_calls] == [("f", arguments) for arguments in calls]
    assert whole.finish_reason == "tool_calls"
    deltas = [delta for chunk in chunks for delta in chunk.tool_calls]
    assert [delta.arguments for delta in deltas] == calls  # each call comes whole
    assert [delta.index for delta in deltas] == list(range(len(calls)))
    assert len({delta.id for delta in deltas} - {None}) == len(calls)


@EVERY_WAY
def test_without_parallel_calls_the_answer_ends_after_its_first(llms, tool_markers, speculation):
    llm = llms(tool_markers=tool_markers, speculation=speculation)
    both = "\n".join(json.dumps({"name": "f", "arguments": {"a": n}}) for n in range(2))
    for said, most in [(f"{CALL}\n{CALL}", len(ids_of(llm, CALL))), (f"<tool_call>{both}</tool_call> more", 200)]:
        with dictated(llm, ids_of(llm, said)):
            whole, chunks = both_ways(llm, replace(SAID, max_tokens=400), tools=[TOOL], parallel_tool_calls=False)
        assert (len(whole.tool_calls), whole.text, whole.finish_reason) == (1, "", "tool_calls")
        assert len([call for chunk in chunks for call in chunk.tool_calls]) == 1
        assert len(whole.token_ids) <= most


def test_a_strict_call_keeps_to_its_schema_whatever_the_model_wants(llms):
    llm = llms()
    strict = {"type": "function", "function": TOOL["function"] | {"strict": True}}
    with dictated(llm, ids_of(llm, f"I call.\n{CALL}")):
        whole, _ = both_ways(llm, replace(SAID, max_tokens=400), tools=[strict], parallel_tool_calls=False)
    assert (whole.text, whole.finish_reason) == ("I call.\n", "tool_calls")
    assert [json.loads(call.arguments) for call in whole.tool_calls] == [{"k": 1}]


@EVERY_WAY
def test_finish_reason_says_what_came(llms, tool_markers, speculation):
    """Also of an answer that is cut off in a call, and of one cut off after it."""
    llm = llms(tool_markers=tool_markers, speculation=speculation)
    tail = f"{CALL}\nand so on"
    cut = len(ids_of(llm, tail)) - 3
    for said, most, reason in [
        ("no call", 99, "stop"),
        (CALL, 400, "tool_calls"),
        (CALL, 30, "length"),
        (CALL.removesuffix("}\n</tool_call>"), len(ids_of(llm, CALL.removesuffix("}\n</tool_call>"))), "length"),
        (CALL, 3, "length"),
        (tail, cut, "length"),
    ]:
        with dictated(llm, ids_of(llm, said)):
            whole, _ = both_ways(llm, replace(SAID, max_tokens=most), tools=[TOOL])
        assert whole.finish_reason == reason
    assert (len(whole.tool_calls), whole.text) == (1, "\nand so")


@EVERY_WAY
@pytest.mark.parametrize("said", [CALL, "I would write <tool_call> and then"])
def test_nothing_is_a_call_where_none_may_come(llms, said, tool_markers, speculation):
    llm = llms(tool_markers=tool_markers, speculation=speculation)
    with dictated(llm, ids_of(llm, said)):
        for options in ({}, {"tools": []}, {"tools": [TOOL], "tool_choice": "none"}, {"tool_choice": "none"}):
            whole, _ = both_ways(llm, SAID, **options)
            assert (whole.text, whole.tool_calls, whole.finish_reason) == (said, (), "stop")


# ------------------------------------------------------------------------------------------ ends


@pytest.mark.parametrize("speculation", [None, "prompt"])
@pytest.mark.parametrize(
    ("said", "stop", "text"),
    [
        (["ABC", "DEF", "G", "HI", "J", "K"], ["DEFGHIJ"], "ABC"),
        (["a br", "own", " fox"], ["own fox"], "a br"),
        (["a", "...x"], [".."], "a"),
        (["a", "...x", "b"], ["x", "no"], "a..."),
        (["ABC", "DEF", "G"], ["DEFX"], "ABCDEFG"),
        (["ABC", "DEF"], ["DEFX"], "ABCDEF"),
    ],
)
def test_stop_strings_over_several_tokens_and_inside_of_one(llms, said, stop, text, speculation):
    llm = llms(speculation=speculation)
    with dictated(llm, ids_of(llm, *said)):
        whole, _ = both_ways(llm, replace(SAID, stop=stop))
    assert (whole.text, whole.finish_reason) == (text, "stop")
    assert whole.stop_string == (stop[0] if "".join(said).startswith(text + stop[0]) else None)


def test_nothing_waits_that_is_no_beginning_of_a_stop_string(llms):
    llm = llms()
    with dictated(llm, ids_of(llm, "Hello, you")):
        _, chunks = both_ways(llm, replace(SAID, stop=["x" * 50, "you there"]))
    assert [chunk.text for chunk in chunks] == [*"Hello, ", "you"]


def test_ignored_ends_are_counted_and_not_shown(llms):
    llm = llms()
    with dictated(llm, ids_of(llm, "ab")):
        whole, _ = both_ways(llm, replace(SAID, ignore_eos=True, max_tokens=5))
    assert (whole.token_ids[2:], whole.text, whole.finish_reason) == ([END] * 3, "ab", "length")


@pytest.mark.parametrize("field", [{"stop_token_ids": [10**6]}, {"logit_bias": {CONFIG.vocab_size: 1}}])
def test_ids_beyond_the_vocabulary_are_refused(llms, field):
    llm = llms()
    for call in (llm.generate, llm.stream, lambda _, p: llm.chat(HELLO, p), lambda _, p: llm.stream_chat(HELLO, p)):
        with pytest.raises(ParameterError, match=rf"^{next(iter(field))}: "):
            call("Hello", SamplingParams(**field))


# ------------------------------------------------------------------------------------------ log-probabilities


@pytest.mark.parametrize("speculation", [None, "prompt"])
@pytest.mark.parametrize(
    ("said", "fields", "tools"),
    [
        ("<think>hm</think>Hello. Bye", {"stop": [". "]}, None),
        (f"<think>hm</think>{CALL}", {}, [TOOL]),
        ("<think>hmmmmmm", {"thinking_budget": 3, "max_tokens": 20}, None),
        ("<think>hm</think>no JSON", {"json_schema": {"enum": ["yes", "no"]}}, None),
        ("Hello", {"logit_bias": {NAMES.index("l"): -100}, "max_tokens": 8}, None),
    ],
    ids=["stop", "tools", "budget", "schema", "ban"],
)
def test_there_is_a_log_probability_for_every_token(llms, said, fields, tools, speculation):
    """Those of the logits as the model made them, whatever forbids a token; finite, so that JSON can hold them."""
    llm = llms(speculation=speculation)
    params = replace(SAID, logprobs=True, top_logprobs=20, **{"max_tokens": 300, **fields})
    with dictated(llm, ids_of(llm, said)) as rows:
        plain = llm.chat(HELLO, replace(params, logprobs=False, top_logprobs=0), tools=tools)
        rows.clear()
        whole, _ = both_ways(llm, params, tools=tools)
    assert whole.token_ids == plain.token_ids
    assert [choice.token for choice in whole.logprobs] == whole.token_ids
    assert all(len(choice.top) == 20 for choice in whole.logprobs)
    json.dumps([choice._asdict() for choice in whole.logprobs], allow_nan=False)
    if speculation is None:  # guesses that were wrong have rows, too
        for choice, row in zip(whole.logprobs, rows, strict=False):
            e = row.astype(np.float64) - row.max()
            logprobs = e - np.log(np.exp(e).sum())
            assert choice.logprob == pytest.approx(logprobs[choice.token], abs=1e-9)
            assert [value for _, value in choice.top] == pytest.approx(np.sort(logprobs)[::-1][:20], abs=1e-9)


# ------------------------------------------------------------------------------------------ what was said before


@pytest.mark.parametrize("length", [31, 32, 33, 64, 65])
def test_the_same_prompt_again_gives_the_same_answer(llms, length):
    llm = llms()
    ids = [1 + length, *[i % 90 + 1 for i in range(length - 1)]]
    params = SamplingParams(temperature=1, seed=length, max_tokens=12)
    cold = llm.generate(ids, params)
    assert cold.timings.reused_tokens == 0
    again, stream = llm.generate(ids, params), llm.stream(ids, params)
    assert "".join(chunk.text for chunk in stream) == again.text == cold.text
    assert again.token_ids == stream.completion.token_ids == cold.token_ids
    assert again.timings.reused_tokens == stream.completion.timings.reused_tokens == (length - 1) // 32 * 32


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        (["x" * 70], 70),  # its tokens are those that the next prompt has
        (["x" * 40, "DEF", "x" * 40], 40),  # the same text, encoded, is other tokens
        (["<think>" + "x" * 40 + "</think>" + "y" * 40], 0),  # the template leaves the thinking out
    ],
)
def test_a_conversation_goes_on_from_the_tokens_that_are_the_same(llms, said, kept):
    llm = llms()
    first = [{"role": "user", "content": f"{len(said)} and {kept}"}]
    with dictated(llm, ids_of(llm, *said)):
        answer = llm.chat(first, SAID)
    reply = {"role": "assistant", "content": f"<think>{answer.thinking}</think>{answer.text}"}
    messages = [*first, reply, {"role": "user", "content": "And?"}]
    params = SamplingParams(temperature=1, seed=3, max_tokens=20)
    second, _ = llm.chat(messages, params), None
    same = answer.timings.prompt_tokens + kept
    assert second.timings.reused_tokens == same // 32 * 32
    with opened(Path(llm.name), context=1000) as cold:
        whole, _ = both_ways(cold, params, messages)
    assert second.token_ids == whole.token_ids
