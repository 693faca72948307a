"""Steps that Ctrl-C breaks off.

Python raises KeyboardInterrupt in the main thread only, and not before that thread is out of compiled code. So another
thread runs the steps, and the main thread waits where the signal reaches it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

from qkv.runtime.team import team

Result = TypeVar("Result")


def aside(work: Callable[[], Result]) -> Result:
    """`work()`, run by another thread. Its exceptions are raised here.

    Ctrl-C aborts the step that is running, waits for the end of `work`, and is raised.
    """
    with ThreadPoolExecutor(1, thread_name_prefix="qkv-aside") as threads:
        future = threads.submit(work)
        try:
            while not future.done():
                wait([future], timeout=0.1)  # on Windows nothing interrupts a thread that waits without a time limit
            return future.result()
        finally:
            while not future.done():  # Ctrl-C came; the work may just be between two steps
                team().abort()
                wait([future], timeout=0.01)
