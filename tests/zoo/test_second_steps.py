"""For each model of the table, a second step with copied gradients is recorded like one that computes them."""

from __future__ import annotations

import pytest

from planner.recording.repeats.second_step import _Gradients
from tests.zoo.test_zoo import ENTRIES, begin, work_of

pytestmark = pytest.mark.slow

COMPUTED = {
    "the first forward sets an attribute of a module": (
        "funnel; nllb-moe; switch_transformers; segformer; wav2vec2; llava"
    ),
    "forwards draw random numbers of numpy": "big_bird; wav2vec2 for ctc; hubert; wavlm; unispeech-sat; sew",
    "tensors of the first step are kept": "recurrent_gemma; detr; maskformer",
    "the gradients of a recurrent net share a storage": (
        "lstm; lstm, batch first; lstm, bidirectional; lstm, dropout; lstm, projected; lstm, no bias; gru; rnn; "
        "packed sequence; packed sequence by the batch"
    ),
    "gradients are sparse": "sparse embedding; sparse embedding alone",
    "a hook runs in backward": "full backward hook",
    "the forward reads the number of batches": "batch norm, cumulative",
}
"""Names of the models whose second step computes its gradients, by the reason for it."""


@pytest.mark.parametrize("entry", [pytest.param(each, id=each.name) for each in ENTRIES if each.refused is None])
@pytest.mark.thorough_after(2)
def test_copied_gradients_leave_the_recording_that_computed_ones_leave(entry, monkeypatch, tmp_path):
    repeat, trace = _Gradients.repeat, tmp_path / "copied"

    def repeat_and_leave_a_trace(self):
        trace.touch()  # a file, because the rehearsal runs in another process
        return repeat(self)

    monkeypatch.setattr("planner.rewrite.rehearse.runs_own_code", lambda workload: False)
    work = work_of(entry)
    monkeypatch.setattr(_Gradients, "repeat", repeat_and_leave_a_trace)
    copied = begin(work, steps=2)
    monkeypatch.setattr(_Gradients, "can_be_repeated", lambda self, state: False)
    computed = begin(work, steps=2)
    assert copied.result() == computed.result()
    assert trace.exists() == (entry.name not in computed_names())


def computed_names() -> list[str]:
    return [name for names in COMPUTED.values() for name in names.split("; ")]


def test_the_table_has_the_models_whose_second_step_computes_its_gradients():
    assert set(computed_names()) <= {entry.name for entry in ENTRIES if entry.refused is None}
