"""Compiled targets: plain generate's text, from a number of graphs that does not grow with it."""

import pytest
import torch
from tiny import perturbed, prompts, tiny_target
from transformers import CompileConfig

from hf_specdec import AutoDrafter

OPTIONS = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": None}
BATCHES = {"one row": [9], "ragged batch": [9, 4, 6]}
PROMPTS = {"one row": [21], "ragged batch": [12, 21, 5]}


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Graphs:
    """A backend that runs what was traced and counts it."""

    def __init__(self):
        self.count = 0

    def __call__(self, module, example_inputs):
        self.count += 1
        return module.forward


def compiled(graphs, dynamic=True):
    model = perturbed(tiny_target(), 0.0)
    model.forward = torch.compile(model.forward, backend=graphs, dynamic=dynamic)
    return model


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "most"), [("one row", 3), ("ragged batch", 5)])
def test_graphs_are_few_and_do_not_grow_with_the_text(batch, most):
    """One for the prompt, one for a token a row and one for several; in a batch these for rows in step and apart."""
    graphs, counts = Graphs(), []
    model = compiled(graphs)
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1, num_draft_tokens=4)
    for lengths, max_new_tokens in ((BATCHES[batch], 64), (BATCHES[batch], 128), (PROMPTS[batch], 160)):
        inputs, options = prompts(lengths), {**OPTIONS, "max_new_tokens": max_new_tokens}
        found = model.generate(**inputs, **options, assistant_model=drafter)
        assert torch.equal(found, tiny_target().generate(**inputs, **options))
        counts.append(graphs.count)
        assert drafter.last_stats.num_verifications > 20
    assert counts[0] > 1 and counts[1] == counts[2] <= most, counts


def test_the_self_check_compiles_nothing():
    graphs = Graphs()
    model = compiled(graphs)
    drafter = AutoDrafter.for_target(model, "none")
    model.generate(**prompts([9]), **{**OPTIONS, "max_new_tokens": 1}, assistant_model=drafter)
    assert graphs.count == 1  # the prompt's


@pytest.mark.slow
def test_static_shapes_give_the_same_text():
    """Past torch's limit of recompilations the model runs as it is."""
    model, inputs = compiled("eager", dynamic=None), prompts(BATCHES["ragged batch"])
    drafter = AutoDrafter.for_target(model, "lookup", min_ngram=1)
    found = model.generate(**inputs, **OPTIONS, assistant_model=drafter)
    assert torch.equal(found, tiny_target().generate(**inputs, **OPTIONS))


def test_a_compile_config_beside_a_drafter_is_not_silent():
    model = tiny_target()
    drafter = AutoDrafter.for_target(model, "none")
    with pytest.warns(UserWarning, match="`compile_config` has no effect beside a drafter"):
        model.generate(**prompts([9]), max_new_tokens=2, compile_config=CompileConfig(), assistant_model=drafter)
