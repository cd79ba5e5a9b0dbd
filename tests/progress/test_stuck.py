"""The time limit ends code that does not return, and leaves alone what is rehearsed."""

from __future__ import annotations

import threading

import pytest

from planner.progress import Watch, stuck


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    monkeypatch.setattr(stuck, "_GRACE_SECONDS", 0.02)
    monkeypatch.setattr(stuck, "_SECONDS_BETWEEN_CHECKS", 0.01)


def test_code_that_never_checks_the_limit_is_ended():
    ended = threading.Event()
    with stuck.ended_if_stuck(Watch(seconds=0.01), ended.set):
        assert ended.wait(5)


@pytest.mark.parametrize("seconds", [None, 60.0, 0.01])
def test_other_code_is_not(seconds):
    ended, watch = threading.Event(), Watch(seconds=seconds)
    watch.is_checked = seconds == 0.01
    with stuck.ended_if_stuck(watch, ended.set):
        assert not ended.wait(0.1)
