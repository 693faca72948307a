"""The loop that turns a prompt into more tokens. Ids only: the engine never sees text.

One request at a time: run the prompt, then sample, append, run the new token, until an end token, the limit asked
for, or the end of the context.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.engine.params import MAX_SEED, SamplingParams
from qkv.engine.sampling import sample
from qkv.errors import ContextLengthError, ParameterError, QkvError

FinishReason = Literal["stop", "length"]


class Model(Protocol):
    """What the engine asks of a decoder: to run the next tokens of a sequence and say what may come after them."""

    def new_cache(self) -> Any: ...
    def next_logits(self, ids: Sequence[int], cache: Any) -> NDArray[np.float32]: ...
    def release(self, cache: Any) -> None: ...


@dataclass
class Generation:
    """One request as it runs: iterate `Engine.generate` and read the rest here, during or after."""

    prompt_ids: list[int]
    params: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    first_token_seconds: float = 0.0  # the prompt's step and the first choice
    decode_seconds: float = 0.0  # all later steps
    decode_steps: int = 0

    def record_step(self, seconds: float) -> None:
        """Count the time of one step; the first is the prompt's."""
        if self.first_token_seconds == 0:
            self.first_token_seconds = seconds
        else:
            self.decode_seconds += seconds
            self.decode_steps += 1


class Engine:
    """Runs requests on a model of `vocab_size` tokens with room for `context` positions."""

    def __init__(self, model: Model, *, vocab_size: int, context: int, end_ids: Sequence[int]) -> None:
        self.model, self.vocab_size, self.context = model, vocab_size, context
        self.end_ids = frozenset(end_ids)

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Check a request and give it a seed. Raises `ParameterError` or `ContextLengthError` before anything runs."""
        if not prompt_ids:
            raise ParameterError("prompt is empty: there is nothing to continue; give at least one token")
        for token in prompt_ids:
            if isinstance(token, bool) or not isinstance(token, (int, np.integer)) or not 0 <= token < self.vocab_size:
                raise ParameterError(f"prompt: {token!r} is not a token id; ids go from 0 to {self.vocab_size - 1}")
        if len(prompt_ids) >= self.context:
            raise ContextLengthError(
                f"prompt has {len(prompt_ids)} tokens and the context holds {self.context}: "
                "no room for an answer; shorten the prompt"
            )
        if params.seed is None:
            params = replace(params, seed=secrets.randbelow(MAX_SEED))
        return Generation([int(token) for token in prompt_ids], params)

    def generate(self, request: Generation) -> Iterator[int]:
        """Yield each new token as soon as it is known. End tokens are not yielded; closing the iterator cancels."""
        room = self.context - len(request.prompt_ids)
        limit = min(room, request.params.max_tokens or room)
        cache = self.model.new_cache()
        try:
            new_ids: Sequence[int] = request.prompt_ids
            while request.finish_reason is None:
                started = time.perf_counter()
                logits = self._step(new_ids, cache)
                token = sample(logits, request.params, position=len(request.prompt_ids) + len(request.token_ids))
                request.record_step(time.perf_counter() - started)
                if token in self.end_ids and not request.params.ignore_eos:
                    request.finish_reason = "stop"
                    return
                request.token_ids.append(token)
                if len(request.token_ids) == limit:
                    request.finish_reason = "length"
                new_ids = [token]
                yield token
        finally:
            self.model.release(cache)

    def _step(self, ids: Sequence[int], cache: Any) -> NDArray[np.float32]:
        """Run the new tokens; the logits of the last one."""
        logits = self.model.next_logits(ids, cache)
        if not np.isfinite(logits.sum()):  # one that is not finite makes the sum so; half the time of asking each
            raise QkvError("the model computed a value that is not a number: its weights are damaged")
        return logits
