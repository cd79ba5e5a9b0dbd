"""Child processes: what the parent logs while it waits."""

from __future__ import annotations

import logging
import time

from planner.virtual_gpu import forked_process


def test_a_user_who_waits_sees_what_runs_and_for_how_long(monkeypatch, caplog):
    monkeypatch.setattr(forked_process, "NOTICE_SECONDS", 0.05)
    with caplog.at_level(logging.INFO):
        assert forked_process.run_in_child(lambda: time.sleep(0.2) or 3, task="reading batches") == 3
    assert "reading batches: 0 s so far" in caplog.text
