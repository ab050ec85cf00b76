"""Targets that keep their own cache (recurrent layers, positions or masks of their own) write plain generate's text."""

import pytest
import torch
from eagle3_formats import random_head, write_head
from scripted import RowScript
from test_greedy import coin, plain, speculative
from tiny import perturbed, prompts, tiny_target
from tiny_hybrids import CONFIGS, tiny_own
from transformers.cache_utils import DynamicCache, DynamicLayer

from hf_specdec import AutoDrafter
from hf_specdec.decoding import rollback as rollbacks
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.integration import own_probe
from hf_specdec.integration.own_probe import rollback_of

CASES = [(name, rollback) for rollback, names in CONFIGS.items() for name in names]
BATCHES = {"one row": [17], "ragged batch": [17, 6]}
OPTIONS = {"max_new_tokens": 24, "eos_token_id": None}
pytestmark = pytest.mark.filterwarnings("ignore:.*generates without drafts")


def drafters(model, texts):
    if len(texts) == 1:
        yield "lookup", AutoDrafter.for_target(model, "lookup", min_ngram=1)
    yield "all right", RowScript(texts, num_draft_tokens=5).bind(model)
    yield "all wrong", RowScript(texts, right=lambda row, round: 0, num_draft_tokens=5).bind(model)
    yield "some right", RowScript(texts, right=coin, num_draft_tokens=5).bind(model)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize(("name", "rollback"), CASES)
def test_text_is_that_of_plain_generate(name, rollback, batch):
    model, inputs = tiny_own(name), prompts(BATCHES[batch])
    expected = plain(model, inputs, **OPTIONS)
    assert len(set(expected[0, 17:].tolist())) > 2, "a text that repeats itself tests little"
    for kind, drafter in drafters(model, expected[:, 17:].tolist()):
        found = speculative(model, inputs, drafter, **OPTIONS)
        assert torch.equal(found, expected), kind
        stats = drafter.last_stats
        assert (stats.cache, stats.rollback) == ("own", rollback)
        assert [row.num_emitted for row in stats.rows] == [24] * len(expected)
        if rollback == "stepwise":
            assert stats.num_drafted == 0
        elif kind == "all right":
            assert stats.num_verifications == 5 * len(expected)  # the prefill, 3 whole drafts and a shorter one


@pytest.mark.parametrize("name", ["qwen3_next", "bart"])
def test_drafts_of_a_model_and_none_at_all(name):
    model, inputs = tiny_own(name), prompts([17, 6])
    expected = plain(model, inputs, **OPTIONS)
    small = DraftModelDrafter(tiny_target("llama"), num_draft_tokens=3).bind(model)
    for drafter in (small, AutoDrafter.for_target(model, "none")):
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)


def test_an_eagle3_head_drafts_for_a_hybrid_target(tmp_path):
    model, inputs = tiny_own("qwen3_next"), prompts([17, 6])
    expected = plain(model, inputs, **OPTIONS)
    for aux_layers in [(0, 2, 3), (1, 2, 4)]:  # the last one before the final norm
        head = random_head(target_layers=4, aux_layers=aux_layers)
        drafter = AutoDrafter.from_pretrained(write_head(tmp_path / str(aux_layers), head), target=model)
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
        assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2", "falcon_h1", "lfm2", "bart"])
def test_hidden_states_that_a_drafter_asks_for_are_those_of_its_rows(name):
    model, inputs = tiny_own(name), prompts([10])
    expected = plain(model, inputs, **OPTIONS)
    drafter = RowScript(expected[:, 10:].tolist(), right=coin, hidden_states=(0, 2), num_draft_tokens=3)
    speculative(model, inputs, drafter.bind(model), **OPTIONS)
    with torch.no_grad():
        whole = model(expected, output_hidden_states=True, use_cache=False).hidden_states
    assert len(drafter.seen) > 5
    for signals, first, columns in drafter.seen:
        for layer in (0, 2):
            found = signals.hidden_states[layer][:, :columns]
            torch.testing.assert_close(found, whole[layer][:, first : first + columns], atol=1e-4, rtol=1e-3)


# Forgetting


def broken_text(name: str, patch: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    """(text with something broken, plain text)."""
    model, inputs = tiny_own(name), prompts([17])
    expected = plain(model, inputs, **OPTIONS)
    drafter = RowScript(expected[:, 17:].tolist(), right=lambda row, round: 1, num_draft_tokens=4).bind(model)
    assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(*patch)
        return speculative(model, inputs, drafter, **OPTIONS), expected


def nothing(*args, **kwargs):
    pass


@pytest.mark.parametrize("name", CONFIGS["replay"])
def test_a_recurrent_state_that_is_not_put_back_would_change_the_text(name):
    found, expected = broken_text(name, (rollbacks, "_STATES", ()))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5", "falcon_h1"])
def test_an_attention_layer_that_is_not_cut_back_would_change_the_text(name):
    found, expected = broken_text(name, (DynamicLayer, "crop", nothing))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("name", ["bart", "gpt_neo", "lfm2"])
def test_a_cache_that_is_not_cropped_would_change_the_text(name):
    found, expected = broken_text(name, (DynamicCache, "crop", nothing))
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("rollback", ["crop", "replay"])
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_windows_come_back_either_way(name, rollback, monkeypatch):
    """Targets that would take ragged rows, sent this way: their texts run beyond windows of 8."""
    model, inputs = tiny_target(name), prompts([17, 3])
    expected = plain(model, inputs, **OPTIONS)
    monkeypatch.setattr("hf_specdec.integration.paths.why_not_ragged", lambda model: "of this test")
    assert rollback_of(model) == "crop"
    monkeypatch.setattr("hf_specdec.integration.row_by_row.rollback_of", lambda model, encoded: rollback)
    for right in (coin, lambda row, round: 0):
        drafter = RowScript(expected[:, 17:].tolist(), right=right, num_draft_tokens=4).bind(model)
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)
        assert (drafter.last_stats.cache, drafter.last_stats.rollback) == ("own", rollback)


def test_caches_of_a_class_of_their_own_are_copied_as_a_whole():
    model, inputs = tiny_own("qwen3_next"), prompts([17])
    expected = plain(model, inputs, **OPTIONS)
    drafter = RowScript(expected[:, 17:].tolist(), right=coin, num_draft_tokens=4).bind(model)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rollbacks, "_KNOWN_LAYERS", ())
        assert torch.equal(speculative(model, inputs, drafter, **OPTIONS), expected)


@pytest.mark.parametrize("name", ["qwen3_next", "mamba2"])
def test_no_forward_has_more_than_twice_the_draft_and_one_row(name):
    model, inputs, rows = tiny_own(name), prompts([17]), []
    expected = plain(model, inputs, **OPTIONS)
    rollback_of(model)  # whose forwards do not count
    watch = model.get_input_embeddings().register_forward_hook(
        lambda module, args, output: rows.append(output.shape[1])
    )
    try:
        for right in (0, 1, 3):
            drafter = RowScript(expected[:, 17:].tolist(), right=lambda row, round, n=right: n, num_draft_tokens=4)
            rows.clear()
            assert torch.equal(speculative(model, inputs, drafter.bind(model), **OPTIONS), expected)
            assert 5 < max(rows[1:]) <= 2 * 4 + 1  # and some forwards did run accepted tokens again
            assert drafter.last_stats.num_plain_steps > 1
    finally:
        watch.remove()


# The self-check


def test_a_model_is_checked_once(monkeypatch):
    model, measured = perturbed(tiny_own("qwen3_next"), 0.0), []
    measure = own_probe.measure
    monkeypatch.setattr(own_probe, "measure", lambda *args: measured.append(1) or measure(*args))
    assert [rollback_of(model), rollback_of(model)] == ["replay"] * 2 and len(measured) == 1


@pytest.mark.parametrize("name", CONFIGS["stepwise"])
def test_the_self_check_sees_a_state_that_blocks_lose(name, monkeypatch):
    model = perturbed(tiny_own(name), 0.0)
    monkeypatch.setattr(own_probe, "_ONE_AT_A_TIME", ())
    with pytest.warns(UserWarning, match="its logits over several tokens at once differ from its own one-token steps"):
        assert rollback_of(model) == "stepwise"


def test_a_model_that_is_wrong_over_blocks_generates_without_drafts(monkeypatch):
    model, inputs = perturbed(tiny_own("bart"), 0.0), prompts([9])
    expected = plain(model, inputs, **OPTIONS)
    forward = model.forward

    def forgetful(input_ids=None, cache=None, **kwargs):
        """Loses its cache where several tokens come at once."""
        if input_ids.shape[1] > 1 and cache.get_seq_length() > 0:
            cache = DynamicCache()
        return forward(input_ids=input_ids, cache=cache, **kwargs)

    model.forward = forgetful
    drafter = RowScript(expected[:, 9:].tolist()).bind(model)
    with pytest.warns(UserWarning, match="BartForCausalLM generates without drafts, one token a step: its logits over"):
        found = speculative(model, inputs, drafter, **OPTIONS)
    assert torch.equal(found, expected) and drafter.last_stats.rollback == "stepwise"


def test_a_model_in_training_mode_is_refused():
    model = perturbed(tiny_own("qwen3_next"), 0.0).train()
    with pytest.raises(ValueError, match="Qwen3NextForCausalLM is in training mode"):
        speculative(model, prompts([5]), AutoDrafter.for_target(model, "none"))
