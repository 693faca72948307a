"""`qkv chat`: a conversation, line by line."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from qkv.cli import options, terminal
from qkv.cli.answer import AnswerPrinter, context_is_full, print_speed
from qkv.errors import ContextLengthError, QkvError

if TYPE_CHECKING:
    from qkv.engine.params import SamplingParams
    from qkv.llm import LLM

PROMPT = ">>> "
HELP = """\
/help            this list
/reset           forget the conversation; the system message stays
/think on|off    think before answering, or not; /think alone: as the model does
/system TEXT     set the system message; /system alone removes it
/exit            leave (so does Ctrl-D)
//TEXT           send a message that begins with a slash
Ctrl-C stops an answer. What was said so far stays in the conversation; if that
is nothing, your message is forgotten too."""


@options.grouped
def chat(
    model: options.ModelOptions,
    sampling: options.SamplingOptions,
    system: options.System = None,
    think: options.Think = None,
) -> None:
    """Talk with a model. /help inside lists the commands.

    \b
    qkv chat
    qkv chat -m smollm2 --system "Answer in one sentence."
    qkv chat --thinking-budget 256 --presence-penalty 1
    qkv chat -m smollm2 < questions.txt

    Each line is a message. Lines can be piped in; standard output then gets an answer for each, and the first error
    ends it.
    """
    params = sampling.params(end_repetition=True)
    options.check_text("the system message", system)
    with model.open() as llm:
        Chat(llm, params, Conversation(system, think), quiet=model.quiet).loop()


@dataclass
class Conversation:
    """What has been said, and how the next answer is to be given."""

    system: str | None = None
    think: bool | None = None  # None: as the model does
    turns: list[dict[str, Any]] = field(default_factory=list)  # user and assistant in turn

    def messages(self, question: str) -> list[dict[str, Any]]:
        """Everything the model is shown when `question` is asked."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns, {"role": "user", "content": question}]

    def add(self, question: str, answer: str, thinking: str) -> None:
        """Keep a question and its answer; templates decide how much of the thinking later turns see."""
        reply = {"role": "assistant", "content": answer}
        if thinking:
            reply["reasoning_content"] = thinking
        self.turns += [{"role": "user", "content": question}, reply]


class Chat:
    """The loop around a conversation: reads lines, obeys commands, prints answers."""

    def __init__(self, llm: LLM, params: SamplingParams, conversation: Conversation, *, quiet: bool) -> None:
        self.llm, self.params, self.conversation, self.quiet = llm, params, conversation, quiet
        self.interactive = terminal.is_terminal(sys.stdin)

    def loop(self) -> None:
        """Until the end of the lines, or /exit."""
        if self.interactive:
            _edit_lines()
            terminal.note(f"{terminal.visible(self.llm.name)}: /help lists the commands, Ctrl-D leaves")
        for line in _typed_lines() if self.interactive else _piped_lines():
            if line.strip() in ("/exit", "/quit"):
                return
            try:
                self._take(line)
            except QkvError as error:
                if not self.interactive:
                    raise
                terminal.print_error(str(error))

    def _take(self, line: str) -> None:
        options.check_text("the message", line)
        if line.startswith("/") and not line.startswith("//"):
            self._command(line)
        elif line.strip():
            self._ask(line.removeprefix("/"))

    def _command(self, line: str) -> None:
        name, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if name == "/help" and not rest:
            terminal.note(HELP)
        elif name == "/reset" and not rest:
            self.conversation.turns.clear()
            terminal.note("the conversation is forgotten")
        elif name == "/think" and rest in ("", "on", "off"):
            if rest == "on" and not self.llm.can_think:
                raise QkvError(f"{self.llm.name} cannot think: its vocabulary has no thinking markers")
            self.conversation.think = {"": None, "on": True, "off": False}[rest]
            terminal.note(f"thinking is {rest or 'as the model does'}")
        elif name == "/system":
            self.conversation.system = rest or None
            terminal.note("the system message is set" if rest else "there is no system message now")
        elif name in ("/help", "/reset", "/think", "/exit"):
            raise QkvError(f"{name} does not take {rest!r}; /help lists the commands")
        else:
            raise QkvError(f"unknown command {name}; /help lists the commands, and //… sends a slash")

    def _ask(self, question: str) -> None:
        """Print the answer and keep both."""
        printer, stream = AnswerPrinter(), None
        try:
            messages = self.conversation.messages(question)
            stream = self.llm.stream_chat(messages, self.params, thinking=self.conversation.think)
            with terminal.typing_unseen():
                printer.print(stream)
        except KeyboardInterrupt:
            if not self.interactive:
                raise
            kept = "what was said stays in the conversation" if printer.text else "your message is forgotten"
            terminal.note(f"stopped; {kept}")
        except ContextLengthError as error:
            raise ContextLengthError(f"{error}; /reset starts a new conversation") from None
        else:
            self._report(stream.completion)
        finally:
            if stream is not None:
                stream.close()
        if printer.text:
            self.conversation.add(question, printer.text, printer.thinking)

    def _report(self, completion: Any) -> None:
        if not self.quiet:
            print_speed(completion, self.llm.context)
        if context_is_full(completion, self.llm.context):
            terminal.note("no room is left for another answer: /reset starts a new conversation")
        elif not completion.text:
            terminal.note("there was no answer; your message is forgotten")


def _edit_lines() -> None:
    """Arrow keys and history, where Python has readline; a pasted text of several lines is one message."""
    try:
        import readline
    except ImportError:  # Windows: its console edits lines itself
        return
    readline.parse_and_bind("set enable-bracketed-paste on")


def _typed_lines() -> Iterator[str]:
    """Lines from a person. Ctrl-C drops the line being typed."""
    on_screen = terminal.is_terminal(sys.stdout)
    while True:
        try:
            if not on_screen:  # standard output has only answers
                sys.stderr.write(PROMPT)
                sys.stderr.flush()
            yield input(PROMPT if on_screen else "")
        except KeyboardInterrupt:
            terminal.note("\n/exit or Ctrl-D leaves")
        except EOFError:
            terminal.note("")
            return
        except UnicodeDecodeError:
            terminal.print_error("that was not UTF-8 text")


def _piped_lines() -> Iterator[str]:
    if sys.stdin is None:
        return
    for number, line in enumerate(sys.stdin.buffer, 1):
        yield options.utf8(line, f"standard input, line {number}").removesuffix("\n").removesuffix("\r")
