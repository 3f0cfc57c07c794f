"""Fixtures of the tests of durable actors."""

from __future__ import annotations

import logging

import pytest


@pytest.fixture
def only_what_callers_see(caplog: pytest.LogCaptureFixture) -> None:
    """Leave the log out of tests that make shards fail."""
    caplog.set_level(logging.CRITICAL, "levada")
