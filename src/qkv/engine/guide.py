"""What a request may bring along: someone who says which tokens may come, and someone who takes them.

Both are called on the engine's thread, once per token and in order. Whatever they raise ends their request alone.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from qkv.engine.sampling import Choice


class Guide(Protocol):
    """Restricts one answer: a grammar, a thinking budget."""

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
