"""Many requests at once, and guessed tokens: what they bring.

    python benchmarks/serving.py [MODEL] [--requests 16] [--prompt 512] [--output 128] [--threads 2]
    python benchmarks/serving.py [MODEL] --speculation [--repeats 3]

The first runs `requests` different random prompts one after the other, then all at once, each with an empty prefix
cache, and compares the times; between tokens, and from the request to the first one, at the median and the 95th
percentile. The second asks a model to quote and to summarize a text, and to continue one that has no repeats, with and
without `speculation="prompt"`, by turns; both give the same tokens. MODEL is a file, a folder or a name of a model that
is on this machine (default: smollm2). Each prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from statistics import median
from typing import Any

from qkv import LLM, SamplingParams
from qkv.engine.request import Handle
from qkv.engine.sampling import Choice

TEXT = (
    "The lighthouse at Cape Merrow was built in 1846 by Ada Thornquist, an engineer who had never seen the sea before "
    "she was thirty. Its lamp burned whale oil until 1871, kerosene until 1923 and has been electric since. The tower "
    "is 41 metres high, has 212 steps, and survived the storm of 1904 that destroyed the harbour of Port Merrow. Today "
    "it is a museum: visitors may climb to the lamp from May to September, except on Mondays, and the keeper's house "
    "has a small library with the complete logbooks of 77 years."
)
TASKS = {
    "quoting": [
        {"role": "user", "content": f"Repeat this text word for word, and nothing else:\n\n{TEXT}"},
    ],
    "summarizing": [
        {"role": "user", "content": f"Summarize this text in two sentences, in its own words:\n\n{TEXT}"},
    ],
    "no repeats": [
        {"role": "user", "content": "Make up a strange story. Never use a word twice."},
    ],
}


class Clock:
    """A sink that notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def push(self, choice: Choice) -> bool:
        self.times.append(time.perf_counter())
        return False


def percentile(values: list[float], percent: int) -> float:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)]


def serve(llm: LLM, prompts: list[list[int]], output: int, *, together: bool) -> dict[str, float]:
    """Run the prompts; seconds, and milliseconds to the first and between the other tokens."""
    llm._engine.scheduler = llm._engine._new_scheduler()  # nothing is remembered
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    clocks, handles = [Clock() for _ in prompts], list[Handle]()
    started = time.perf_counter()
    for prompt, clock in zip(prompts, clocks, strict=True):
        handles.append(llm._engine.submit(prompt, params, sinks=[clock]))
        if not together:
            handles[-1].wait()
    for handle in handles:
        handle.wait()
    seconds = time.perf_counter() - started
    first = [clock.times[0] - handle.submitted for clock, handle in zip(clocks, handles, strict=True)]
    between = [b - a for clock in clocks for a, b in zip(clock.times, clock.times[1:], strict=False)]
    return {
        "seconds": seconds,
        "tokens_per_second": len(prompts) * output / seconds,
        **{f"first_ms_p{p}": 1e3 * percentile(first, p) for p in (50, 95)},
        **{f"between_ms_p{p}": 1e3 * percentile(between, p) for p in (50, 95)},
    }


def requests(options: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(0)
    with LLM(options.model, threads=options.threads, context=options.prompt + options.output) as llm:
        prompts = [
            [rng.randrange(llm.config.vocab_size) for _ in range(options.prompt)] for _ in range(options.requests)
        ]
        serve(llm, prompts[:2], 8, together=True)
        rows = {
            name: serve(llm, prompts, options.output, together=name == "at once") for name in ("in turn", "at once")
        }
    columns = list(rows["in turn"])
    print(f"{options.requests} requests of {options.prompt} + {options.output} tokens, {options.model}")
    print(f"{'':10}" + "".join(f"{column:>18}" for column in columns))
    for name, row in rows.items():
        print(f"{name:10}" + "".join(f"{row[column]:18.2f}" for column in columns))
    print(f"at once they take 1/{rows['in turn']['seconds'] / rows['at once']['seconds']:.2f} of the time")
    return {"benchmark": "serving", "model": options.model, "requests": options.requests, **rows}


def speculation(options: argparse.Namespace) -> dict[str, Any]:
    params = SamplingParams(temperature=0, max_tokens=options.output)
    results: dict[str, Any] = {}
    with (
        LLM(options.model, threads=options.threads, context=2048) as plain,
        LLM(options.model, threads=options.threads, context=2048, speculation="prompt") as guessing,
    ):
        print(f"{'':14}{'tokens/s':>10}{'guessing':>10}{'speed-up':>10}{'tokens/step':>13}{'guesses right':>15}")
        for task, messages in TASKS.items():
            rates: dict[LLM, list[float]] = {plain: [], guessing: []}
            for _ in range(options.repeats):
                answers = [llm.chat(messages, params) for llm in (plain, guessing)]
                assert answers[0].token_ids == answers[1].token_ids, "speculation changed the answer"
                for llm, answer in zip((plain, guessing), answers, strict=True):
                    rates[llm].append(answer.timings.decode_tokens_per_second)
            timings = answers[1].timings
            row = {
                "plain": median(rates[plain]),
                "guessing": median(rates[guessing]),
                "tokens_per_step": timings.tokens_per_step,
                "drafted": timings.drafted_tokens,
                "accepted": timings.accepted_tokens,
            }
            row["speed_up"] = row["guessing"] / row["plain"]
            results[task] = row
            print(
                f"{task:14}{row['plain']:10.1f}{row['guessing']:10.1f}{row['speed_up']:10.2f}"
                f"{row['tokens_per_step']:13.2f}{row['accepted']:9} of {row['drafted']}"
            )
    return {"benchmark": "speculation", "model": options.model, **results}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--output", type=int, default=128)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--speculation", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    print(json.dumps(speculation(options) if options.speculation else requests(options)))


if __name__ == "__main__":
    main()
