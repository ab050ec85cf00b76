"""Calls in several threads at once, on one model, are each what they would have been alone."""

from threading import Event, Thread, get_ident

import torch
from eagle3_formats import random_head, write_head
from test_greedy import plain, speculative
from tiny import perturbed, prompts, tiny_target
from torch._dynamo import eval_frame

from hf_specdec import AutoDrafter
from hf_specdec.integration import probe


def test_a_forward_of_another_thread_is_no_part_of_a_prefill(tmp_path, monkeypatch):
    model, inputs, others = tiny_target("llama"), prompts([9, 4]), prompts([6], seed=1)
    head = random_head(aux_layers=(0, 2, 3))  # the last of its states is read by a hook
    drafter = AutoDrafter.from_pretrained(write_head(tmp_path, head), target=model, num_draft_tokens=3)
    expected, prefill, caller, found = plain(model, inputs), model._prefill, get_ident(), []

    def interrupted(*args, **kwargs):
        if get_ident() == caller:
            other = Thread(target=lambda: found.append(plain(model, others)))
            other.start()
            other.join()
        return prefill(*args, **kwargs)

    accepted = []
    for run in (prefill, interrupted):
        monkeypatch.setattr(model, "_prefill", run)
        assert torch.equal(speculative(model, inputs, drafter), expected)
        accepted.append(drafter.last_stats.accepted_per_position)
    monkeypatch.undo()
    assert len(found) == 1 and torch.equal(found[0], plain(model, others))
    assert accepted[0] == accepted[1]


def test_self_checks_of_two_threads_leave_compilation_on(monkeypatch):
    """torch.compile has one stance for all threads; a check turns compilation off while it runs."""
    began, other_is_in = Event(), Event()

    def measure(model):
        if began.is_set():
            other_is_in.set()
            threads[0].join()
        else:
            began.set()
            other_is_in.wait(timeout=0.5)
        return 0.0, 1.0

    monkeypatch.setattr(probe, "measure", measure)
    threads = [Thread(target=probe.check_ragged, args=(perturbed(tiny_target("llama"), 0.0),)) for _ in range(2)]
    threads[0].start()
    began.wait()
    threads[1].start()
    for thread in threads:
        thread.join()
    assert other_is_in.is_set()
    assert eval_frame._stance.stance == "default"
