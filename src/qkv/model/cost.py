"""What a step costs, counted from the shape of the model alone: operations, bytes read, positions held.

Two counts of the operations, one multiply-add being 2 FLOP:

* textbook: every product of `reference.py`, which computes the full square of scores and the logits of every token;
* executed: what the compiled step does. It skips the future (but computes whole blocks of 32 keys, and an unused
  query head beside an odd number of them), and the logits of each sequence's last token only.

Attention, projections aside, is 2·H·T²·d for the scores and as much for the values, 4·H·T²·d per layer in all, and
4·H·T·d for one new token that sees T positions. Beside the products only the norms are counted, 4 FLOP a number;
softmax, RoPE and SiLU are below a hundredth of the products around them.

Bytes are those that must come from memory: each weight once per step of at most `STEP_TOKENS` tokens, and each
sequence's cache once per step. Decoding is one token a step: how fast memory delivers its bytes is the limit of its
speed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod

from qkv.checks import whole
from qkv.kernels.sizes import BLOCK, ROWS, STEP_TOKENS, half_block_bytes, packed_bytes
from qkv.model.config import ModelConfig

Weights = str | Mapping[str, str]

TABLE = "model.embed_tokens.weight"
NORM_FLOP = 4  # a number: squared, added up, times 1/rms, times its weight
MOST = 10**9  # positions or sequences; far beyond any machine, and no product of them overflows a float


def cache_bytes_per_position(config: ModelConfig, cache: str) -> float:
    """Bytes of the keys and values of one position in all layers, for a cache of kind "f16", "int8" or "f32"."""
    per_head = 2 * half_block_bytes(cache, config.head_dim) / BLOCK
    return per_head * config.num_key_value_heads * config.num_hidden_layers


def decode_bytes(config: ModelConfig, cache: str, weight_bytes: int, first: int, steps: int) -> float:
    """Bytes read by `steps` decode steps of one sequence, the first of them at position `first` (0-based).

    A step at position p reads all `weight_bytes` and the keys and values of p + 1 positions.
    """
    positions = steps * (first + 1) + steps * (steps - 1) / 2
    return steps * weight_bytes + positions * cache_bytes_per_position(config, cache)


@dataclass(frozen=True)
class Limits:
    """What a machine can do at most."""

    bytes_per_second: float  # read from memory
    flop_per_second: float  # in float32
    flop_per_second_int8: float  # products of 8-bit numbers, which are what int8 and int4 weights become


@dataclass(frozen=True)
class Part:
    """One part of the model in one phase, over all layers and sequences."""

    name: str
    parameters: int
    textbook: int  # FLOP
    executed: int  # FLOP
    weight_bytes: int
    cache_bytes: int
    int8: bool = False  # whether its products are of 8-bit numbers

    @property
    def bytes(self) -> int:
        """What is read from memory."""
        return self.weight_bytes + self.cache_bytes

    @property
    def intensity(self) -> float:
        """Executed FLOP per byte read."""
        return self.executed / self.bytes

    def seconds(self, limits: Limits) -> tuple[float, float]:
        """The least time for its bytes, and that for its operations; the part takes the longer of them."""
        rate = limits.flop_per_second_int8 if self.int8 else limits.flop_per_second
        return self.bytes / limits.bytes_per_second, self.executed / rate


def total(parts: Iterable[Part]) -> Part:
    """The sum of all parts, but not of their times: parts come one after the other, each with its own limit."""
    parts = list(parts)
    fields = ("parameters", "textbook", "executed", "weight_bytes", "cache_bytes")
    return Part("total", *(sum(getattr(part, field) for part in parts) for field in fields))


def prefill_cost(
    config: ModelConfig, tokens: int, batch: int = 1, *, weights: Weights = "int8", cache: str = "f16"
) -> list[Part]:
    """The cost of `batch` prompts of `tokens` tokens each, nothing cached before, up to their first new token.

    weights: a format of `kernels.sizes.FORMATS` for all matrices, or each matrix's format by its Hugging Face name.
    cache: a kind of `kernels.sizes.CACHE_KINDS`. Raises ParameterError.
    """
    whole("context", tokens, 1, MOST)
    whole("batch", batch, 1, MOST)
    rows = batch * tokens
    passes = -(-rows // STEP_TOKENS)
    full, rest = divmod(tokens, STEP_TOKENS)
    amounts = _Amounts(
        rows=rows,
        passes=passes,
        outputs=batch,
        square=batch * tokens * tokens,
        scores=batch * _scores_before(tokens),
        values=batch * _values_before(tokens),
        # A step reads all positions up to its last: 512, 1024, … and, for a shorter last step, all of them.
        cached=batch * (STEP_TOKENS * full * (full + 1) // 2 + (tokens if rest else 0)),
    )
    return _parts(config, amounts, weights, cache)


def decode_cost(
    config: ModelConfig, context: int, batch: int = 1, *, weights: Weights = "int8", cache: str = "f16"
) -> list[Part]:
    """The cost of one new token for each of `batch` sequences, each token the `context`-th of its sequence.

    Arguments and errors as for `prefill_cost`.
    """
    whole("context", context, 1, MOST)
    whole("batch", batch, 1, MOST)
    passes = -(-batch // STEP_TOKENS)
    amounts = _Amounts(
        rows=batch,
        passes=passes,
        outputs=batch,
        square=batch * context,
        scores=batch * (_scores_before(context) - _scores_before(context - 1)),
        values=batch * context,
        cached=batch * context,
    )
    return _parts(config, amounts, weights, cache)


@dataclass(frozen=True)
class _Amounts:
    """How much of everything a phase computes."""

    rows: int  # tokens
    passes: int  # steps, each of which reads all weights
    outputs: int  # tokens whose logits are computed; in the textbook those of all
    square: int  # (query, key) pairs of the textbook, for one head
    scores: int  # pairs whose score is computed
    values: int  # pairs whose value is added
    cached: int  # positions read from the cache


def _parts(config: ModelConfig, amounts: _Amounts, weights: Weights, cache: str) -> list[Part]:
    layers, hidden, vocab = config.num_hidden_layers, config.hidden_size, config.vocab_size
    shapes = config.parameter_shapes()
    heads, kv_heads, d = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q_size, kv_size = heads * d, kv_heads * d
    head = TABLE if config.tie_word_embeddings else "lm_head.weight"
    computed_heads = kv_heads * (-(-config.heads_per_kv_head // 2) * 2)  # the kernels take query heads two by two
    half_cache = round(amounts.cached * cache_bytes_per_position(config, cache) / 2)

    def format_of(matrix: str) -> str:
        return weights if isinstance(weights, str) else weights[matrix]

    def matrices(name: str, *kinds: str, biases: int = 0) -> Part:
        """The matrices of these kinds in every layer."""
        every = [f"model.layers.{layer}.{kind}.weight" for layer in range(layers) for kind in kinds]
        size = sum(prod(shapes[matrix]) for matrix in every)
        packed = sum(packed_bytes(format_of(matrix), *shapes[matrix]) for matrix in every) + 4 * layers * biases
        flop, int8 = 2 * amounts.rows * size, all(format_of(matrix).startswith("int") for matrix in every)
        return Part(name, size + layers * biases, flop, flop, amounts.passes * packed, 0, int8)

    def attention(name: str, pairs: int) -> Part:
        flop = 2 * layers * d
        return Part(name, 0, flop * heads * amounts.square, flop * computed_heads * pairs, 0, half_cache)

    in_layers = layers * (2 * hidden + (q_size + kv_size if config.qk_norm else 0))
    norm_numbers = layers * (2 * hidden + (d + d if config.qk_norm else 0))
    biases = q_size + 2 * kv_size if config.qkv_bias else 0
    table = vocab * hidden
    return [
        Part("embedding", table, 0, 0, amounts.rows * packed_bytes(format_of(TABLE), ROWS, hidden) // ROWS, 0),
        Part(
            "norms",
            norm_numbers + hidden,
            NORM_FLOP * amounts.rows * (in_layers + hidden),
            NORM_FLOP * (amounts.rows * in_layers + amounts.outputs * hidden),
            4 * amounts.passes * (norm_numbers + hidden),
            0,
        ),
        matrices("q, k, v", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", biases=biases),
        attention("scores", amounts.scores),
        attention("values", amounts.values),
        matrices("o_proj", "self_attn.o_proj"),
        matrices("MLP", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
        Part(
            "head",
            0 if config.tie_word_embeddings else table,
            2 * amounts.rows * table,
            2 * amounts.outputs * table,
            min(amounts.outputs, amounts.passes) * packed_bytes(format_of(head), vocab, hidden),
            0,
            format_of(head).startswith("int"),
        ),
    ]


def _scores_before(position: int) -> int:
    """Scores that one head computes for positions 0 … position - 1: whole blocks, up to the one with the query."""
    blocks, rest = divmod(position, BLOCK)
    return BLOCK * BLOCK * blocks * (blocks + 1) // 2 + rest * BLOCK * (blocks + 1)


def _values_before(position: int) -> int:
    """Values that one head adds up for positions 0 … position - 1: p + 1 of them at position p."""
    return position * (position + 1) // 2
