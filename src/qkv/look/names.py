"""Points of a model by the names that TransformerLens gives them, such as `blocks.3.attn.hook_z`.

hook_rot_q [T, H, d], hook_rot_k [T, H_kv, d]    queries and keys as attention gets them, normed and rotated
hook_v [T, H_kv, d]                              values
hook_pattern [H, T, T]                           attention's weights: row i is what position i takes from each
hook_z [T, H, d]                                 the heads' outputs
hook_result [T, H, hidden]                       what each head adds to the residual stream
hook_resid_pre, hook_resid_post [T, hidden]      the stream before and after a layer
hook_resid_mid [T, hidden]                       between attention and MLP; edits only
"""

from __future__ import annotations

import re
from typing import Any

from qkv.checks import shown, whole
from qkv.errors import ParameterError

ATTENTION = ("hook_rot_q", "hook_rot_k", "hook_v", "hook_pattern", "hook_z", "hook_result")
STREAM = ("hook_resid_pre", "hook_resid_post")
EDITABLE = ("hook_z", "hook_resid_pre", "hook_resid_mid", "hook_resid_post")

_NAME = re.compile(r"blocks\.([0-9]{1,6})\.(attn\.)?(hook_\w+)")


def parse(name: Any, layers: int, known: tuple[str, ...]) -> tuple[int, str]:
    """The layer and the last part of a name, of a model with so many layers. Raises ParameterError if none is meant."""
    found = _NAME.fullmatch(name) if isinstance(name, str) else None
    if found is None or found[3] not in known or bool(found[2]) != (found[3] in ATTENTION):
        examples = ", ".join(f"blocks.0.{'attn.' * (hook in ATTENTION)}{hook}" for hook in known)
        raise ParameterError(f"point: there is no {shown(name)} here; with the layer's number there are {examples}")
    if int(found[1]) >= layers:
        raise ParameterError(f"point: {name} is of layer {int(found[1])}, and the model's are 0 to {layers - 1}")
    return int(found[1]), found[3]


def numbers(field: str, given: Any, count: int) -> tuple[int, ...]:
    """Layers or heads that somebody chose, one or several; None is all `count`. Raises ParameterError."""
    if given is None:
        return tuple(range(count))
    try:
        several = iter(given)
    except TypeError:
        several = iter([given])
    chosen = tuple(dict.fromkeys(in_range(field, number, count) for number in several))
    if not chosen:
        raise ParameterError(f"{field} is empty: name at least one, or leave it out for all")
    return chosen


def in_range(field: str, number: Any, count: int) -> int:
    """A whole number from 0 to count - 1, or from -count on, which counts from the end. Raises ParameterError."""
    return whole(field, number, -count, count - 1) % count
