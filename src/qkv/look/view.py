"""A look as HTML for a notebook: every head a cell, coloured by how spread its weights are, lettered by its kind."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qkv.look.look import Look

LETTERS = {"first": "F", "previous": "P", "itself": "S", "induction": "I", "": "·"}
LEGEND = "F first token · P previous token · S itself · I induction; dark: the head's weight is on few tokens"
_SPELLED = {" ": "␣", "\n": "↵", "\t": "⇥", "\r": "␍"}


def label(token: str) -> str:
    """A token's text, so that spaces and line ends can be seen."""
    return "".join(_SPELLED.get(char, char if char.isprintable() else f"\\x{ord(char):02x}") for char in token) or "∅"


def overview(look: Look) -> str:
    """A table of layers × heads."""
    statistics = look.statistics
    head = "".join(f"<th>{h}</th>" for h in look.heads)
    rows = [f"<tr><th>layer</th>{head}</tr>"]
    for i, (layer, kinds) in enumerate(zip(look.layers, statistics.kinds(), strict=True)):
        cells = "".join(
            f'<td title="layer {layer}, head {h}: {_numbers(look, i, j)}" style="background:{_grey(share)};'
            f'color:{"#fff" if share < 0.5 else "#000"};text-align:center">{LETTERS[kind]}</td>'
            for j, (h, kind, share) in enumerate(zip(look.heads, kinds, statistics.share[i], strict=True))
        )
        rows.append(f"<tr><th>{layer}</th>{cells}</tr>")
    return f"<table>{''.join(rows)}</table><p>{LEGEND}</p>"


def _grey(share: float) -> str:
    level = round(255 * min(1.0, max(0.0, share)))
    return f"rgb({level},{level},{level})"


def _numbers(look: Look, i: int, j: int) -> str:
    s = look.statistics
    return (
        f"entropy {s.entropy[i, j]:.2f}, first {s.first[i, j]:.2f}, previous {s.previous[i, j]:.2f}, "
        f"itself {s.itself[i, j]:.2f}, induction {s.induction[i, j]:.2f}"
    )
