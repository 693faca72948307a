"""`qkv run` with a scripted model, in this process."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

import pytest
from screen import Terminal, pipe_in
from scripted_llm import ScriptedLLM, install, timings

from qkv.cli.main import execute
from qkv.cli.options import DEFAULT_MODEL
from qkv.engine.params import SamplingParams
from qkv.errors import ContextLengthError

CACHE = os.environ.get("QKV_CACHE")


@pytest.fixture
def llm(monkeypatch: pytest.MonkeyPatch) -> ScriptedLLM:
    return install(monkeypatch, ScriptedLLM([("", "Sea "), ("", "or air?"), ("Be", ""), ("cause.", "")]))


def test_the_answer_alone_is_on_standard_output(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "Why is the sky blue?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Because.\n"
    assert err == "5 prompt tokens in 0.50 s (10 tokens/s), 4 new at 12 tokens/s (8 GB/s)\n"
    assert llm.opened == {
        "model": DEFAULT_MODEL,
        "context": None,
        "weights": None,
        "cache": "f16",
        "cache_bytes": None,
        "speculation": None,
        "threads": None,
    }
    assert llm.calls == [
        {
            "messages": [{"role": "user", "content": "Why is the sky blue?"}],
            "params": SamplingParams(end_repetition=True),
            "thinking": None,
        }
    ]
    assert llm.closed


def test_verbose_shows_the_load_report(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "-v", "-q", "Why is the sky blue?"]) == 0
    out, err = capsys.readouterr()
    assert out == "Because.\n"
    assert [line.split("  ", 1)[0] for line in err.splitlines()] == [
        "loaded",
        "in the files",
        "in the files",
        "in memory",
        "requantized",
        "note",
    ]
    for words in (
        "/models/scripted in 0.25 s",
        "BF16: 6 kB in 3 tensors",
        "F32: 4 bytes in 1 tensor\n",
        "int8: 3.4 kB in 3 matrices",
        "3 matrices from BF16 to int8",
        "rope_theta is missing; using 10000.0",
    ):
        assert words in err


def test_every_option_arrives(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    line = (
        "run hi -m other --system Be_brief --max-tokens 3 --temp 0 --top-k 5 --top-p 0.5 --min-p 0 --seed 0 "
        "--stop END --stop FIN --ignore-eos --no-think --context 64 --weights int4 --cache int8 --threads 1 -q "
        "--repetition-penalty 1.1 --presence-penalty -0.5 --thinking-budget 0 --cache-size 64MB --speculation"
    )
    assert execute(line.split()) == 0
    assert llm.opened == {
        "model": "other",
        "context": 64,
        "weights": "int4",
        "cache": "int8",
        "cache_bytes": 64_000_000,
        "speculation": "prompt",
        "threads": 1,
    }
    assert llm.calls == [
        {
            "messages": [{"role": "system", "content": "Be_brief"}, {"role": "user", "content": "hi"}],
            "params": SamplingParams(
                max_tokens=3,
                temperature=0,
                top_k=5,
                top_p=0.5,
                min_p=0,
                seed=0,
                stop=("END", "FIN"),
                ignore_eos=True,
                repetition_penalty=1.1,
                presence_penalty=-0.5,
                thinking_budget=0,
            ),
            "thinking": False,
        }
    ]
    assert capsys.readouterr() == ("Be\n", "")


SCHEMA = '{"enum": ["yes", "no"]}'


def test_a_schema_is_given_as_it_is_or_in_a_file(
    llm: ScriptedLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "schema.json"
    file.write_bytes(b"\xef\xbb\xbf" + SCHEMA.encode())
    for given in (SCHEMA, f" {SCHEMA}", str(file), "true"):
        assert execute(["run", "-q", "hi", "--json-schema", given]) == 0
    assert [call["params"].json_schema for call in llm.calls] == [SCHEMA, f" {SCHEMA}", SCHEMA, "true"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file or directory"),
        (b"\xff", "not UTF-8 text (byte 1)"),
        (b" \n", "empty, there is no text in it"),
        (b"{", "is not valid JSON"),
        (b"[1]", "must be a JSON object, true or false"),
    ],
)
def test_a_file_that_is_no_schema_is_named_before_anything_is_loaded(
    llm: ScriptedLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None, message: str
) -> None:
    file = tmp_path / "schema.json"
    if content is not None:
        file.write_bytes(content)
    assert execute(["run", "hi", "--json-schema", str(file)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"qkv: {file}: {message}")
    assert llm.calls == []


def test_the_environment_names_the_model_and_the_option_wins(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("QKV_MODEL", "from-environment")
    assert execute(["run", "hi"]) == 0
    assert llm.opened["model"] == "from-environment"
    assert execute(["run", "hi", "-m", "given"]) == 0
    assert llm.opened["model"] == "given"


@pytest.mark.parametrize(
    ("argument", "piped", "prompt"),
    [
        ("Sum up:", b"a\nb\n", "Sum up:\n\na\nb"),
        (None, b"only piped\r\n", "only piped"),
        (None, b"\xef\xbb\xbfwith a byte order mark\n\n", "with a byte order mark\n"),
        ("only given", b"", "only given"),
        (None, "sch\u00f6n \U0001f40b".encode(), "sch\u00f6n \U0001f40b"),
    ],
)
def test_prompt_from_argument_and_pipe(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, argument: str | None, piped: bytes, prompt: str
) -> None:
    pipe_in(monkeypatch, piped)
    assert execute(["run", *([] if argument is None else [argument])]) == 0
    assert llm.calls[0]["messages"] == [{"role": "user", "content": prompt}]


@pytest.mark.parametrize("verb", ["run", "chat"])
def test_an_answer_that_only_repeats_itself_is_ended_and_said_to_be(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    llm = install(monkeypatch, ScriptedLLM([("12" * 30, "")], end="repetition"))
    pipe_in(monkeypatch, b"hi\n")
    assert execute([verb]) == 0
    out, err = capsys.readouterr()
    assert out == "12" * 30 + "\n"
    assert "ended: the answer only repeated itself" in err.splitlines()[-1]
    assert llm.calls[0]["params"].end_repetition


def test_raw_continues_the_prompt_as_it_is(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "--raw", " The sky is"]) == 0
    assert llm.calls == [{"prompt": " The sky is", "params": SamplingParams(end_repetition=True)}]


def test_json_is_one_object_and_nothing_else(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    assert execute(["run", "--json", "-q", "--seed", "3", "hi"]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    measured = report.pop("timings")
    assert report == {
        "model": "scripted",
        "text": "Because.",
        "thinking": "Sea or air?",
        "token_ids": [0, 1, 2, 3],
        "finish_reason": "stop",
        "seed": 3,
    }
    expected = timings(1, 3)
    assert measured == {name: getattr(expected, name) for name in measured}
    rates = {"prefill_tokens_per_second", "decode_tokens_per_second", "decode_gigabytes_per_second"}
    assert measured.keys() == {*asdict(expected), *rates}
    assert measured["decode_tokens_per_second"] == 12
    assert out.count("\n") == 1
    assert err == ""


def test_a_terminal_gets_dim_thinking_and_visible_control_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ScriptedLLM([("", "\nHm\x1b[2J"), ("", "\n"), ("\n\nA\tb", ""), ("\x9b1m\x07\r\n", "")]))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    assert execute(["run", "-q", "hi"]) == 0
    assert screen.getvalue() == "\x1b[2mHm\\x1b[2J\n\x1b[0m\nA\tb\\x9b1m\\x07\\x0d\n"


def test_a_terminal_without_colour_gets_words_instead(llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    monkeypatch.setenv("NO_COLOR", "1")
    assert execute(["run", "-q", "hi"]) == 0
    assert screen.getvalue() == "[thinking]\nSea or air?\n\n[answer]\nBecause.\n"


def test_colour_is_off_again_when_the_answer_breaks_in_its_thinking(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, ScriptedLLM([("", "Hm"), KeyboardInterrupt()]))
    screen = Terminal()
    monkeypatch.setattr("sys.stdout", screen)
    assert execute(["run", "-q", "hi"]) == 130
    assert screen.getvalue() == "\x1b[2mHm\x1b[0m\n"


def test_a_pipe_gets_the_answer_character_for_character(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ScriptedLLM([("\nA\x1b[31m\n", "")]))
    assert execute(["run", "-q", "hi"]) == 0
    assert capsys.readouterr() == ("\nA\x1b[31m\n", "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run"], "the prompt is empty"),
        (["run", " \n"], "the prompt is empty"),
        (["run", "hi", "--temperature", "-1"], "temperature must be a number"),
        (["run", "hi", "--temperature", "nan"], "temperature must be a number"),
        (["run", "hi", "--top-k", "x"], "'--top-k'"),
        (["run", "hi", "--max-tokens", "0"], "max_tokens must be a whole number"),
        (["run", "hi", "--stop", ""], "stop must be a non-empty string"),
        (["run", "hi", "--raw", "--system", "x"], "--system needs the chat template"),
        (["run", "hi", "--raw", "--no-think"], "--think needs the chat template"),
        (["run", "hi", "--repetition-penalty", "0"], "repetition_penalty must be a number"),
        (["run", "hi", "--presence-penalty", "2.5"], "presence_penalty must be a number"),
        (["run", "hi", "--presence-penalty", "nan"], "presence_penalty must be a number"),
        (["run", "hi", "--thinking-budget", "-1"], "thinking_budget must be a whole number"),
        (["run", "hi", "--json-schema", '{"a"'], "--json-schema: is not valid JSON"),
        (["run", "hi", "--json-schema", '{"const": NaN}'], "--json-schema: is not valid JSON"),
        (["run", "hi", "--json-schema", ""], "--json-schema is empty"),
        (["run", "hi", "--cache-size", "0.5 buckets"], "--cache-size must be a size such as 512MB or 2GiB"),
        (["chat", "--cache-size", "-1"], "--cache-size must be a size such as 512MB or 2GiB"),
        (["chat", "--thinking-budget", "x"], "'--thinking-budget'"),
        (["run", "hi", "--nonsense"], "--nonsense"),
        (["run", "two", "prompts"], "prompts"),
        (["run", "\udcff"], "the prompt is not valid UTF-8 text (at character 1)"),
        (["run", "hi", "--system", "a\udcff"], "the system message is not valid UTF-8 text (at character 2)"),
        (["nonsense"], "nonsense"),
    ],
)
def test_bad_usage_is_one_line_and_exit_code_2(
    llm: ScriptedLLM, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert execute(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("qkv: ") and err.count("\n") == 1
    assert message in err
    assert llm.calls == []


def test_piped_bytes_that_are_not_utf8(
    llm: ScriptedLLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pipe_in(monkeypatch, b"ab\xff")
    assert execute(["run"]) == 2
    assert capsys.readouterr() == ("", "qkv: standard input: not UTF-8 text (byte 3)\n")


def test_an_error_of_the_model_is_one_line_without_control_characters(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, ScriptedLLM([ContextLengthError("prompt has 9\x1b[31m\ntokens")]))
    assert execute(["run", "hi"]) == 2
    assert capsys.readouterr().err == "qkv: prompt has 9\\x1b[31m tokens\n"


@pytest.mark.parametrize("debug", [False, True])
def test_a_defect_is_70_with_a_traceback_only_on_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], debug: bool
) -> None:
    if debug:
        monkeypatch.setenv("QKV_DEBUG", "1")
    install(monkeypatch, ScriptedLLM([KeyError("shape")]))
    assert execute(["run", "hi"]) == 70
    err = capsys.readouterr().err
    if debug:
        assert "Traceback" in err and err.endswith("KeyError: 'shape'\n")
    else:
        expected = "qkv: KeyError: 'shape': this is a defect in qkv; run it again with QKV_DEBUG=1 to see where\n"
        assert err == expected


def test_a_full_disk_is_an_error_not_a_success(llm: ScriptedLLM, capsys: pytest.CaptureFixture[str]) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("needs /dev/full")
    with pytest.MonkeyPatch.context() as patch, full.open("w") as stream:
        patch.setattr("sys.stdout", stream)
        assert execute(["run", "hi"]) == 2
    assert capsys.readouterr().err == "qkv: standard output cannot be written: No space left on device\n"


def test_a_real_model_in_a_loop_is_ended_long_before_its_context_is_full(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Told to say the same for ever, SmolLM2 does; its context has 8,192 positions."""
    if CACHE is None:  # the kernels that other tests have compiled
        monkeypatch.delenv("QKV_CACHE")
    else:
        monkeypatch.setenv("QKV_CACHE", CACHE)
    line = ["run", "--raw", "--temp", "0", "-m", str(smollm2), "--json", "12 12 12 12 12 12 12 12 12 12 12 12"]
    assert execute(line) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["finish_reason"] == "repetition"
    assert len(report["token_ids"]) < 1000
    assert "ended: the answer only repeated itself" in err
