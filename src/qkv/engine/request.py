"""What the engine knows of a request: the handle its sender holds, and one answer for each of its n answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.engine.mailbox import Mailbox
from qkv.engine.params import SamplingParams
from qkv.engine.repetition import Repetition
from qkv.engine.sampling import Choice, Sampler
from qkv.engine.speculation import Lookup
from qkv.model.feed import Feed, PagedCache

if TYPE_CHECKING:
    from qkv.model.probe import Edits
    from qkv.model.readback import Tapped

FinishReason = Literal["stop", "length", "repetition"]


class Guide(Protocol):
    """Restricts one answer: a grammar, a thinking budget.

    The engine's thread calls it, and a `Sink`, once per token and in order. What they raise ends their request alone.
    """

    def allowed(self) -> NDArray[np.uint32] | None:
        """What may come next: bit t % 32 of word t // 32 is token t; None is anything.

        End tokens are allowed when, and only when, the answer may end.
        """

    def push(self, token: int) -> None:
        """This token was chosen. Those that end the answer are not pushed."""


class Sink(Protocol):
    """Takes the tokens of one answer."""

    def push(self, choice: Choice) -> bool:
        """The next token, never one that ends the answer. True: the text is at its end, none shall follow."""


class Watcher(Protocol):
    """Looks into the layers while they compute one answer. Its prompt is computed whole, and no token is guessed."""

    layers: Sequence[int]

    def take(self, first: int, tapped: Tapped) -> None:
        """What the tokens from position `first` on had. They come again when the answer had to give its cache up."""


@dataclass(eq=False)
class Answer:
    """One answer as it is made. The engine's thread writes it; others read it when its handle has ended.

    Times are readings of `time.perf_counter`, 0 while it has not come to that.
    """

    choice: int
    """Which of its request's answers this is."""
    prompt_ids: list[int]
    params: SamplingParams
    sampler: Sampler
    guide: Guide | None = None
    sink: Sink | None = None
    watcher: Watcher | None = None
    edits: Edits | None = None
    lookup: Lookup | None = None
    repetition: Repetition | None = None
    ending: frozenset[int] = frozenset()
    """The tokens that end it."""
    limit: int = 1
    """The most tokens it may get."""

    token_ids: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    """The tokens with their log-probabilities, if these are asked for."""
    prompt_logprobs: list[float] = field(default_factory=list)
    """Of the prompt's second token, third token, …, if asked for."""
    finish_reason: FinishReason | None = None
    started: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    decode_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    """How many drafts were tried, and how many were right."""
    reused: int = 0
    """How many of the prompt's tokens were found in the cache."""

    ids: list[int] = field(default_factory=list)
    """The whole text: prompt and answer."""
    cache: PagedCache = field(default_factory=PagedCache)
    keys: list[bytes] = field(default_factory=list)
    looked_at: int = 0
    """How many blocks have been offered to the prefix cache."""
    published: list[tuple[int, bytes]] = field(default_factory=list)
    """Those it took, with their keys."""

    def __post_init__(self) -> None:
        self.ids = list(self.prompt_ids)

    @property
    def remaining(self) -> int:
        """How many tokens have to be run before the next can be chosen: 1 while decoding."""
        return len(self.ids) - self.cache.length

    @property
    def reads_its_prompt(self) -> bool:
        """Whether the logits of all the prompt's positions are still wanted: then none can come from the cache."""
        return self.params.prompt_logprobs and self.choice == 0 and not self.token_ids

    @property
    def adopts(self) -> bool:
        """Whether it may go on with blocks that another has computed, without edits and unseen."""
        return self.edits is None and self.watcher is None and not self.reads_its_prompt

    def feed(self, ids: Sequence[int], outputs: Literal["none", "last", "all"]) -> Feed:
        """Its part of a step, which computes these tokens."""
        return Feed(self.cache, ids, outputs, () if self.watcher is None else self.watcher.layers, self.edits)

    def append(self, choice: Choice) -> None:
        """The answer grows by a token."""
        self.ids.append(choice.token)
        self.token_ids.append(choice.token)
        if self.params.logprobs:
            self.choices.append(choice)


class Handle:
    """A request under way, for whoever sent it. When it has ended it is put into its mailbox."""

    def __init__(
        self, answers: Sequence[Answer], mailbox: Mailbox | None, cancel: Callable[[Handle, bool], None]
    ) -> None:
        self.answers = list(answers)
        self.params = self.answers[0].params
        self.prompt_ids = self.answers[0].prompt_ids
        self.submitted = 0.0
        self.cancelled = False
        self.error: BaseException | None = None
        self._mailbox, self._cancel = mailbox, cancel
        self._ended = threading.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing more happens with it."""
        return self._ended.is_set()

    def cancel(self, *, at_once: bool = True) -> None:
        """Stop the work. Its tokens so far are kept, its error is `RequestCancelledError`.

        at_once: also break off a step that serves nobody else now. Not for destructors: it takes a lock.
        """
        if not self.ended:
            self.cancelled = True
            self._cancel(self, at_once)

    def wait(self, timeout: float | None = None) -> list[Answer]:
        """Wait until it has ended. Raises what ended it, or TimeoutError."""
        if not self._ended.wait(timeout):
            raise TimeoutError(f"the request has not ended within {timeout} s")
        if self.error is not None:
            raise self.error
        return self.answers

    def forked(self) -> None:
        """In a forked child: let go of a lock that somebody may have held in the parent."""
        self._ended = threading.Event()

    def end(self, error: BaseException | None = None) -> None:
        """Called by the engine, once."""
        self.error = error
        self._ended.set()
        mailbox, self._mailbox = self._mailbox, None
        if mailbox is not None:
            mailbox.put(self)
