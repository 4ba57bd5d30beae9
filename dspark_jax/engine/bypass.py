"""When the host asks whether drafts pay."""

from collections.abc import Callable


class Bypass:
    """Counts the plain steps to come, so that the device is not asked before every round."""

    def __init__(self):
        self._left = 0

    def begins(self, rounds_to_bypass: Callable[[], int]) -> bool:
        """Is the round that begins now a plain step?

        Args:
          rounds_to_bypass: how many coming rounds should be; waits for the device.

        Returns:
          Whether one of the rounds last told of is left, after asking anew if none was.
        """
        if self._left == 0:
            self._left = rounds_to_bypass()
        plain = self._left > 0
        self._left -= plain
        return plain

    def forget(self) -> None:
        """A request begins or ends: what was told no longer holds."""
        self._left = 0
