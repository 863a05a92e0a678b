"""The time until which a request must be answered."""

import asyncio


def shorten_deadline(deadline: asyncio.Timeout, seconds: float) -> None:
    """Move a deadline to so many seconds from now, unless it is earlier already.

    seconds: the time from now in seconds; may be infinite.
    """
    current_deadline, now = deadline.when(), asyncio.get_running_loop().time()
    if current_deadline is None or now + seconds < current_deadline:
        deadline.reschedule(now + seconds)
