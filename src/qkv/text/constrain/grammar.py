"""Grammars over the tokens of one vocabulary: which token may come next so that the text stays what was asked for.

llguidance follows the grammar byte by byte and finds all tokens that fit (https://github.com/guidance-ai/llguidance).
It is told the bytes of every token as the detokenizer knows them, so the text it follows is the text that comes out,
whatever kind of vocabulary it is. Added tokens are known to it as special ones: no string of a grammar holds one.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, wait
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from qkv.errors import ParameterError, QkvError
from qkv.text.constrain.masks import Mask, ids_of, mask_of
from qkv.text.tokens.tokenizer import Tokenizer

MAX_SECONDS = 10.0
"""How long a grammar may take to prepare. Common ones take a few milliseconds."""
STACK_BYTES = 64 << 20
"""llguidance compiles by recursion, some 10 kB a level, and would end the process where the stack ends."""

_LIMITS = LLParserLimits(max_items_in_row=10_000, verbose_errors=False)
_T = TypeVar("_T")
_one_stack_size = threading.Lock()


class Grammar:
    """A text that follows a grammar. Raises QkvError where it cannot go on; then the answer has to end."""

    def __init__(self, field: str, matcher: LLMatcher, vocabulary: GrammarVocabulary) -> None:
        self._field, self._matcher, self._vocabulary = field, matcher, vocabulary
        self._mask = np.zeros(max(vocabulary.words, len(vocabulary.text)), np.uint32)
        self._at = (self._mask.ctypes.data, 4 * vocabulary.words)
        self._ended = False

    def start(self) -> Grammar:
        """Another text that follows the same grammar, from where this one is."""
        return Grammar(self._field, self._matcher.deep_copy(), self._vocabulary)

    def allowed(self) -> Mask:
        """What may come next; end tokens if, and only if, the text may end here. Valid until the next call."""
        vocabulary = self._vocabulary
        mask = self._mask[: len(vocabulary.text)]
        if self._ended:
            mask[:] = vocabulary.ends
            return mask
        self._matcher.unsafe_compute_mask_ptr(*self._at)
        self._check()
        mask &= vocabulary.text
        if self._matcher.is_accepting():
            mask |= vocabulary.ends
        if not mask.any():
            raise QkvError(f"{self._field}: no token of this model can continue the text as asked for")
        return mask

    def push(self, id: int) -> None:
        """The next token. An end token (pushed where they are ignored) ends the text: nothing else follows."""
        if id in self._vocabulary.end_ids:
            self._ended = True
        elif not self._matcher.consume_token(id):
            self._check()
            raise QkvError(f"{self._field}: token {id} is not allowed here")

    def _check(self) -> None:
        if self._matcher.is_error():
            raise QkvError(f"{self._field}: {_reason(self._matcher.get_error())}")


class GrammarVocabulary:
    """What llguidance needs to know of a tokenizer. Making it takes about 0.7 s for Qwen3's 151,669 tokens.

    vocab_size: rows of the model's matrix; end_ids: the tokens that end an answer; hidden: tokens that no grammar may
    ask for, beside the control tokens.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int], hidden: Collection[int] = ()
    ) -> None:
        self.end_ids = frozenset(end_ids)
        self.ends = mask_of(end_ids, vocab_size)
        never = {*tokenizer.special_ids, *hidden, *end_ids}
        self.text = mask_of((id for id in range(tokenizer.vocab_size) if id not in never), vocab_size)
        wrapped = _Wrapped(tokenizer, min((id for id in end_ids if id < tokenizer.vocab_size), default=None))
        self._tokenizer = LLTokenizer(wrapped)  # type: ignore[arg-type]  # it asks for attributes, not for a class
        self.words = -(-self._tokenizer.vocab_size // 32)
        self._running: Future[Any] = Future()
        self._running.set_result(None)
        self._turn = threading.Lock()

    def prepare(self, field: str, source: str, fields: Mapping[int, str] = MappingProxyType({})) -> Grammar:
        """Compile a grammar. Raises ParameterError, beginning with `field`, for one that is invalid or too costly.

        fields: what to begin with instead where the fault is in one of these lines (the first is 1).
        """
        with self._turn:
            if not wait([self._running], MAX_SECONDS).done:
                raise ParameterError(f"{field}: another grammar is still being prepared; try again later")
            self._running = _started(lambda: self._compiled(field, source, fields))
            if not wait([self._running], MAX_SECONDS).done:
                raise ParameterError(f"{field}: takes more than {MAX_SECONDS:.0f} s to prepare; use a simpler one")
            return self._running.result()

    def _compiled(self, field: str, source: str, fields: Mapping[int, str]) -> Grammar:
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            message = matcher.get_error()
            line = re.match(r"at (\d+)\(", message)
            raise ParameterError(f"{fields.get(int(line[1]), field) if line else field}: {_reason(message)}")
        for warning in matcher.get_grammar_warnings():  # such as a keyword that would be ignored
            raise ParameterError(f"{field}: {_reason(warning)}")
        grammar = Grammar(field, matcher, self)
        try:
            self._try_out(grammar)
        except QkvError as error:
            raise ParameterError(str(error)) from None
        return grammar

    def _try_out(self, grammar: Grammar) -> None:
        """Whether a text can begin, and go on: some grammars turn out to be impossible or too large only there."""
        first = ids_of(grammar.start().allowed() & self.text)
        for id in {*first[:1], *first[-1:]}:
            text = grammar.start()
            text.push(id)
            text.allowed()


class _Wrapped:
    """A tokenizer in the shape that llguidance takes: the bytes of each token.

    It could also be called to encode a text, for forcing tokens; `schema.NO_FORCING` turns that off.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, end_id: int | None) -> None:
        self.bos_token_id = None
        self.eos_token_id = end_id
        self.tokens = [tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.marker_ids.values())


def _started(make: Callable[[], _T]) -> Future[_T]:
    """The future result of `make`, which begins to run on a large stack."""
    future: Future[_T] = Future()

    def run() -> None:
        try:
            future.set_result(make())
        except BaseException as error:
            future.set_exception(error)

    thread = threading.Thread(target=run, name="qkv-grammar", daemon=True)
    with _one_stack_size:
        before = threading.stack_size(STACK_BYTES)  # for all threads that start now; another one is not hurt by it
        try:
            thread.start()
        finally:
            threading.stack_size(before)
    return future


def _reason(message: str) -> str:
    """The point of llguidance's message in one line."""
    if message.startswith("NoExtension"):
        return "nothing satisfies it"
    message = re.sub(r"^at \d+\(\d+\): (failed to compile JSON schema: )?", "", message)
    first, *others = message.splitlines() or [""]
    return " ".join([first, *(line for line in others if line.startswith("error:"))])[:300].strip()
