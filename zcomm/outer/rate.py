"""What a rank may send on average."""

from __future__ import annotations

import time

from zcomm._units import parse_rate


class RateLimit:
    """Waits so that bytes take as long as they would at a rate, ``"40mbit"``; None: for nothing.

    ``seconds``: what it has waited. Raises ValueError for another text.
    """

    def __init__(self, max_rate: str | None) -> None:
        try:
            self._rate = parse_rate(max_rate) if max_rate is not None else None
        except ValueError as error:
            raise ValueError(f"max_rate: {error}") from None
        self.seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Forget what was sent."""
        self._free_at = 0.0

    def wait(self, num_bytes: int) -> None:
        """Wait until the bytes before these have had their time."""
        if self._rate is None:
            return
        now = time.monotonic()
        if now < self._free_at:
            time.sleep(self._free_at - now)
            self.seconds += self._free_at - now
        self._free_at = max(now, self._free_at) + num_bytes / self._rate
