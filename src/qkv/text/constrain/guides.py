"""What restricts an answer while it is made: a budget for its thinking, a grammar for its content.

The grammar is bound to the content: it begins after the closing marker of the thinking. Where the prompt leaves open
whether the model thinks (Qwen3's template does, and the model writes `<think>` itself), it may open its thinking in
place of the answer's first token. One line break between the thinking and the answer belongs to neither.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from qkv.errors import ParameterError
from qkv.text.answer.thinking import ThinkingSplit
from qkv.text.answer.tools import CLOSE, OPEN
from qkv.text.constrain.masks import Mask, mask_of
from qkv.text.constrain.schema import choices_grammar, lark_grammar, regex_grammar, schema_grammar
from qkv.text.constrain.toolchoice import ToolChoice, Tools, chosen_tools, strict_tools, tools_grammar
from qkv.text.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from qkv.text.constrain.grammar import Grammar, GrammarVocabulary

_GRAMMARS: dict[str, Callable[[Any], str]] = {
    "json_schema": schema_grammar,
    "regex": regex_grammar,
    "grammar": lark_grammar,
    "choices": choices_grammar,
}


class Restrictions(Protocol):
    """The fields of a request that restrict its answer; at most one of the last four is not None."""

    @property
    def thinking_budget(self) -> int | None: ...
    @property
    def json_schema(self) -> Mapping[str, Any] | bool | str | None: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def grammar(self) -> str | None: ...
    @property
    def choices(self) -> Sequence[str] | None: ...


class Guides:
    """Makes the guides of one model's answers; safe to use from several threads.

    vocab_size: rows of the model's matrix. end_ids: the tokens that end an answer. The first grammar takes as long as
    it takes llguidance to learn the vocabulary, about 0.7 s for Qwen3's.
    """

    def __init__(self, tokenizer: Tokenizer, *, vocab_size: int, end_ids: Collection[int]) -> None:
        self._tokenizer, self._vocab_size, self._end_ids = tokenizer, vocab_size, frozenset(end_ids)
        self._vocabulary: GrammarVocabulary | None = None
        self._making = threading.Lock()
        self._newlines = [id for id in map(self._single, ("\n", "\n\n")) if id is not None]

    def plan(
        self,
        split: ThinkingSplit,
        restrictions: Restrictions,
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice = None,
        one_call: bool = False,
    ) -> Callable[[], AnswerGuide] | None:
        """What makes a guide for each of a request's answers; None if nothing restricts them.

        `split` is in the state that the prompt leaves it in; it is copied. Raises ParameterError, naming the field,
        for a grammar that is invalid, unsupported or too costly, and for a budget where there is no thinking.
        """
        budget = restrictions.thinking_budget
        if budget is not None and split.close_id is None:
            raise ParameterError("thinking_budget: there is no thinking here to limit; leave it out")
        grammar = self._grammar(restrictions, tools, tool_choice, one_call)
        calls = self._calls(tools, tool_choice) if grammar is None else None
        if grammar is None and calls is None and budget is None:
            return None
        split = copy.copy(split)
        masks = _Masks(self._vocab_size, self._tokenizer.vocab_size, split, self._end_ids, self._newlines)
        start = (lambda: None) if grammar is None else grammar.start
        return lambda: AnswerGuide(copy.copy(split), budget, start(), masks, calls)

    def prepare(self) -> None:
        """Learn the vocabulary now, and not with the first grammar."""
        self._known_vocabulary()

    def _grammar(
        self,
        wanted: Restrictions,
        tools: Sequence[Mapping[str, Any]] | None,
        tool_choice: str | Mapping[str, Any] | None,
        one_call: bool,
    ) -> Grammar | None:
        given = {name: getattr(wanted, name) for name in _GRAMMARS}
        asked = [(name, _GRAMMARS[name](value)) for name, value in given.items() if value is not None]
        calls = chosen_tools(tools, tool_choice)
        if calls and asked:
            raise ParameterError(f"tool_choice: a call cannot be forced together with {asked[0][0]}")
        fields: dict[int, str] = {}
        if calls:
            once = one_call or not isinstance(tool_choice, str)
            source, fields = tools_grammar(calls, self._tokenizer, once=once)
            asked.append(("tools", source))
        if not asked:
            return None
        if not any(id < self._vocab_size for id in self._end_ids):
            raise ParameterError(f"{asked[0][0]}: this model has no token to end an answer with")
        return self._known_vocabulary().prepare(*asked[0], fields)

    def _calls(self, tools: Tools | None, tool_choice: ToolChoice) -> Calls | None:
        """What a call keeps to once the model has begun one; None for anything."""
        functions = strict_tools(tools, tool_choice, self._tokenizer)
        if not functions:
            return None
        source, fields = tools_grammar(functions, self._tokenizer, once=True, opened=True)
        opening, closing = (self._tokenizer.marker_ids[marker] for marker in (OPEN, CLOSE))
        return Calls(opening, closing, self._known_vocabulary().prepare("tools", source, fields))

    def _known_vocabulary(self) -> GrammarVocabulary:
        from qkv.text.constrain.grammar import GrammarVocabulary  # llguidance is loaded when the first grammar comes

        with self._making:
            if self._vocabulary is None:
                markers = (self._tokenizer.id("<think>"), self._tokenizer.id("</think>"))
                self._vocabulary = GrammarVocabulary(
                    self._tokenizer,
                    vocab_size=self._vocab_size,
                    end_ids=self._end_ids,
                    hidden=[id for id in markers if id is not None],
                )
            return self._vocabulary

    def _single(self, text: str) -> int | None:
        """The id of a text that is one token."""
        ids = self._tokenizer.encode(text, inner=True)
        return ids[0] if len(ids) == 1 and self._tokenizer.token_bytes(ids[0]) == text.encode() else None


class _Masks:
    """The masks that an answer's guide needs beside its grammar's."""

    def __init__(
        self, rows: int, known: int, split: ThinkingSplit, end_ids: Collection[int], newlines: Collection[int]
    ) -> None:
        self.closing = mask_of([] if split.close_id is None else [split.close_id], rows)
        self.opening = mask_of([] if split.open_id is None else [split.open_id], rows)
        self.newlines = mask_of(newlines, rows)
        self.newline_ids = frozenset(newlines)
        self.unended = mask_of(range(known), rows) & ~mask_of(end_ids, rows)
        """Every token but those that end the answer."""


class Calls(NamedTuple):
    """The tokens that begin and end a call, and the grammar of what is between, the last token included."""

    opening: int
    closing: int
    grammar: Grammar


class AnswerGuide:
    """Says what may come next in one answer (`qkv.engine.request.Guide`)."""

    def __init__(
        self,
        split: ThinkingSplit,
        budget: int | None,
        follower: Grammar | None,
        masks: _Masks,
        calls: Calls | None = None,
    ) -> None:
        self._split, self._budget, self._follower, self._masks = split, budget, follower, masks
        self._calls = calls
        self._thought = 0
        self._may_open = split.kind == "content" and not split.after_thinking
        self._may_break = False

    def allowed(self) -> Mask | None:
        """What may come next, None for anything. Valid until the next call."""
        if self._split.kind == "thinking":
            if self._budget is not None and self._thought >= self._budget:
                return self._masks.closing
            return None if self._follower is None else self._masks.unended
        if self._follower is None:
            return None
        mask = self._follower.allowed()
        if self._may_open:
            mask |= self._masks.opening
        if self._may_break:
            mask |= self._masks.newlines
        return mask

    def push(self, token: int) -> None:
        """This token was chosen."""
        event = self._split.push(token)
        if event is None:
            self._may_open, self._may_break = False, self._split.kind == "content"
            return
        kind, id = event
        if kind == "thinking":
            self._thought += 1
            return
        separator = self._may_break and id in self._masks.newline_ids
        self._may_open = self._may_break = False
        if self._follower is not None and not separator:
            self._follower.push(id)
        if self._calls is not None and id in self._calls[:2]:
            inside = self._follower is None and id == self._calls.opening
            self._follower = self._calls.grammar.start() if inside else None
