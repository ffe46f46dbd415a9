"""Property tests here take the same examples in every run, and have no deadline: continuous integration is slow."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("formats", deadline=None, derandomize=True, database=None)
settings.load_profile("formats")
