"""Progress of a long conversion, on whatever shows it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told how many bytes are to be written (or read), and of each block that is done."""

    def begin(self, what: str, total: int) -> None:
        """Start a piece of work of ``total`` bytes."""

    def advance(self, count: int) -> None:
        """Add to the bytes that are done."""


class Silent:
    """Shows nothing."""

    def begin(self, what: str, total: int) -> None:
        """Do nothing."""

    def advance(self, count: int) -> None:
        """Do nothing."""
