"""Nothing is lost between the engine's thread and a reader, be it a thread or a coroutine."""

from __future__ import annotations

import asyncio
import threading

import pytest

from qkv.engine.mailbox import Mailbox


def fill(mailbox, count=2000):
    thread = threading.Thread(target=lambda: [mailbox.put(i) for i in range(count)])
    thread.start()
    return thread


def test_a_thread_gets_everything_in_order():
    mailbox = Mailbox()
    thread = fill(mailbox)
    assert [mailbox.get() for _ in range(2000)] == list(range(2000))
    assert mailbox.get_nowait() is None
    thread.join()


def test_a_coroutine_gets_everything_in_order():
    async def read():
        mailbox = Mailbox()
        thread = fill(mailbox)
        items = [await mailbox.aget() for _ in range(2000)]
        thread.join()
        return items

    assert asyncio.run(asyncio.wait_for(read(), 30)) == list(range(2000))


def test_waiting_coroutines_leave_the_loop_to_others():
    async def both():
        mailbox, steps = Mailbox(), []

        async def other():
            for _ in range(5):
                await asyncio.sleep(0)
                steps.append(1)
            mailbox.put("now")

        task = asyncio.create_task(other())
        item = await asyncio.wait_for(mailbox.aget(), 10)
        await task
        return item, len(steps)

    assert asyncio.run(both()) == ("now", 5)


def test_a_reader_that_went_away_harms_nobody():
    """Its task was cancelled and its loop is closed; the writer does not notice."""
    mailbox = Mailbox()

    async def give_up():
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(mailbox.aget(), 0.01)

    asyncio.run(give_up())
    mailbox.put(1)
    mailbox.put(2)
    assert [mailbox.get(), mailbox.get()] == [1, 2]
