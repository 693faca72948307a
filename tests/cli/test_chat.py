"""`qkv chat`: a conversation with a scripted model, piped in or typed on a pseudo-terminal."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from screen import Screen, pipe_in
from scripted_llm import ScriptedLLM, install

from qkv.cli.main import execute
from qkv.engine.params import SamplingParams
from qkv.errors import ContextLengthError

SCRIPTED = Path(__file__).with_name("scripted_llm.py")


def test_lines_are_turns_and_history_carries_the_thinking(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = install(monkeypatch, ScriptedLLM([("", "hm"), ("One", "")], [("Two", "")], [("Three", "")]))
    pipe_in(monkeypatch, "\ufeffa\r\n\n//b\nc é".encode())
    assert execute(["chat", "-q", "--system", "Brief", "--seed", "1", "--think", "-m", "x", "--context", "9"]) == 0
    assert capsys.readouterr() == ("One\nTwo\nThree\n", "")
    assert (llm.opened["model"], llm.opened["context"]) == ("x", 9)
    system = {"role": "system", "content": "Brief"}
    first = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "One", "reasoning_content": "hm"},
    ]
    second = [{"role": "user", "content": "/b"}, {"role": "assistant", "content": "Two"}]
    third = {"role": "user", "content": "c é"}
    assert [call["messages"] for call in llm.calls] == [
        [system, first[0]],
        [system, *first, second[0]],
        [system, *first, *second, third],
    ]
    assert {call["thinking"] for call in llm.calls} == {True}
    assert {call["params"] for call in llm.calls} == {SamplingParams(seed=1, end_repetition=True)}


def test_every_option_arrives(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = install(monkeypatch, ScriptedLLM([("A", "")]))
    pipe_in(monkeypatch, b"hi\n")
    line = (
        "chat -q -m other --max-tokens 3 --temp 0 --top-k 5 --top-p 0.5 --min-p 0.1 --seed 2 --repetition-penalty 1.1 "
        "--presence-penalty 1 --thinking-budget 9 --context 64 --weights int4 --cache int8 --cache-size 1GiB "
        "--speculation --threads 1"
    )
    assert execute(line.split()) == 0
    assert llm.opened == {
        "model": "other",
        "context": 64,
        "weights": "int4",
        "cache": "int8",
        "cache_bytes": 2**30,
        "speculation": "prompt",
        "threads": 1,
    }
    assert llm.calls[0]["params"] == SamplingParams(
        max_tokens=3,
        temperature=0,
        top_k=5,
        top_p=0.5,
        min_p=0.1,
        seed=2,
        repetition_penalty=1.1,
        presence_penalty=1,
        thinking_budget=9,
        end_repetition=True,
    )


def test_commands(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    llm = install(monkeypatch, ScriptedLLM([("A", "")]))
    lines = ["/help", "1", "/reset", "/think off", "/system Be  kind", "2", "/think", "/system", "/reset", "3"]
    pipe_in(monkeypatch, "\n".join([*lines, "/exit", "never"]).encode())
    assert execute(["chat", "-q"]) == 0
    out, err = capsys.readouterr()
    assert out == "A\nA\nA\n"
    assert [(call["messages"], call["thinking"]) for call in llm.calls] == [
        ([{"role": "user", "content": "1"}], None),
        ([{"role": "system", "content": "Be  kind"}, {"role": "user", "content": "2"}], False),
        ([{"role": "user", "content": "3"}], None),
    ]
    for command in ("/help", "/reset", "/think", "/system", "/exit", "//TEXT", "Ctrl-C", "Ctrl-D"):
        assert command in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"/nonsense", "qkv: unknown command /nonsense; /help lists the commands"),
        (b"/think maybe", "qkv: /think does not take 'maybe'"),
        (b"/reset now", "qkv: /reset does not take 'now'"),
        (b"ok\n\xff", "qkv: standard input, line 2: not UTF-8 text (byte 1)"),
    ],
)
def test_a_piped_conversation_ends_at_the_first_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], line: bytes, message: str
) -> None:
    llm = install(monkeypatch, ScriptedLLM([("A", "")]))
    pipe_in(monkeypatch, line + b"\nnever asked\n")
    assert execute(["chat", "-q"]) == 2
    err = capsys.readouterr().err
    assert err.startswith(message) and err.count("\n") == 1
    assert all(call["messages"][-1]["content"] == "ok" for call in llm.calls)


def test_a_full_context_says_so_and_points_to_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ScriptedLLM([("A ", ""), ("B", ""), ("C", "")], context=3))
    pipe_in(monkeypatch, b"hi\n")
    assert execute(["chat", "--max-tokens", "2"]) == 0
    assert capsys.readouterr() == (
        "A B\n",
        "1 prompt token in 0.50 s (2 tokens/s), 2 new at 4 tokens/s (8 GB/s)\n"
        "cut off: the context of 3 tokens is full\n"
        "no room is left for another answer: /reset starts a new conversation\n",
    )


def test_a_prompt_that_no_longer_fits_points_to_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ScriptedLLM([ContextLengthError("prompt has 9 tokens")]))
    pipe_in(monkeypatch, b"hi\n")
    assert execute(["chat"]) == 2
    assert capsys.readouterr().err == "qkv: prompt has 9 tokens; /reset starts a new conversation\n"


def test_an_answer_without_text_is_not_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    llm = install(monkeypatch, ScriptedLLM([("", "only thinking")], [("A", "")]))
    pipe_in(monkeypatch, b"1\n2\n")
    assert execute(["chat", "-q"]) == 0
    assert llm.calls[1]["messages"] == [{"role": "user", "content": "2"}]
    assert capsys.readouterr() == ("A\n", "there was no answer; your message is forgotten\n")


def test_control_c_stops_the_answer_and_not_the_program() -> None:
    with Screen(SCRIPTED, "chat") as screen:
        screen.expect(">>> ")
        screen.send("hello\r")
        screen.expect("word5 ")
        screen.send("\x03")
        assert "word399" not in screen.expect("stopped; what was said stays in the conversation")
        screen.expect(">>> ")
        screen.send("/nonsense\r")
        screen.expect("qkv: unknown command /nonsense")
        screen.expect(">>> ")
        screen.send("half a line")
        screen.expect("half a line")
        screen.insist("\x03", "/exit or Ctrl-D leaves")
        screen.send("/exit\r")
        assert screen.end() == 0
        assert "Traceback" not in screen.seen


def test_what_is_typed_while_an_answer_streams_waits_for_the_next_prompt() -> None:
    pytest.importorskip("readline")
    with Screen(SCRIPTED, "chat", "-q", "--max-tokens", "60") as screen:
        screen.expect(">>> ")
        screen.send("hello\r")
        screen.expect("word5 ")
        assert not screen.echoes()
        screen.send("/nonsense")
        answer = screen.expect("word55 ")
        assert "/nonsense" not in answer and "word54 " in answer
        screen.expect(">>> ")
        screen.expect("/nonsense")
        screen.send("\r")
        screen.expect("qkv: unknown command /nonsense")
        screen.expect(">>> ")
        screen.send("\x04")
        assert screen.end() == 0
        assert screen.echoes()


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 0), ("SIGTERM", -15), ("SIGHUP", -1)])
def test_however_an_answer_ends_the_terminal_shows_again_what_is_typed(name: str, code: int) -> None:
    with Screen(SCRIPTED, "chat") as screen:
        assert screen.echoes()
        screen.expect(">>> ")
        screen.send("hello\r")
        screen.expect("word5 ")
        assert not screen.echoes()
        screen.process.send_signal(getattr(signal, name))
        if name == "SIGINT":
            screen.expect("stopped")
            screen.expect(">>> ")
            screen.send("/exit\r")
        assert screen.end() == code
        assert screen.echoes()


def test_a_pasted_text_of_several_lines_is_one_message() -> None:
    pytest.importorskip("readline")
    with Screen(SCRIPTED, "chat") as screen:
        screen.expect(">>> ")
        screen.send("\x1b[200~/think on\n/think off\x1b[201~\r")
        screen.expect("does not take 'on\\n/think off'")
        screen.expect(">>> ")
        screen.send("\x04")
        assert screen.end() == 0
