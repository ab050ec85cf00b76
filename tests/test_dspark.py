"""DSpark drafts what its formulas say, after every rejection, in every row; the text stays the target's own."""

import itertools

import pytest
import torch
from dspark_formats import GEMMA4, Drafter, random_drafter, write_drafter
from dspark_reference import Reference
from test_greedy import BATCHES, plain, speculative
from test_sampling import VOCAB, chi_square, joint_law, many_texts, sample
from tiny import TARGETS, prompts, tiny_config, tiny_target
from tiny_hybrids import tiny_own
from watched import keep_what_was_drafted, largest_error, rounds_of

from hf_specdec import AutoDrafter
from hf_specdec.drafters.dspark.session import DSparkSession
from hf_specdec.scheduling import Governor


def load(tmp_path, drafter: Drafter, target, format: str = "DeepSpec", **options):
    return AutoDrafter.from_pretrained(write_drafter(tmp_path / format, drafter, format), target=target, **options)


def drafter_for(name: str, **options) -> Drafter:
    return random_drafter(target_layers=tiny_config(name).num_hidden_layers, **options)


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", TARGETS)
def test_drafts_are_those_of_the_formulas_after_every_rejection(tmp_path, name, batch):
    target, one = tiny_target(name), drafter_for(name)
    drafter = load(tmp_path, one, target)
    rounds = rounds_of(drafter, target, prompts(BATCHES[batch]), max_new_tokens=30, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target)) < 1e-5
    assert 0.2 < drafter.last_stats.acceptance_rate < 0.8, "drafts should be accepted in part"


VARIANTS = {
    "gated": dict(kind="gated"),
    "rnn": dict(kind="rnn"),
    "no heads": dict(rank=0, confidence=False),
    "no markov head": dict(rank=0, confidence_reads_markov=False),
    "Gemma 4": GEMMA4,
    "Gemma 4 with values of its own": {**GEMMA4, "values_are_keys": False},
    "Gemma 4, rnn": {**GEMMA4, "kind": "rnn"},
    "reduced vocabulary": dict(draft_vocab_size=41),
    "reduced vocabulary, rnn": dict(draft_vocab_size=41, kind="rnn"),
    "the anchor does not guess": dict(first_slot=1),
    "the anchor does not guess, rnn": dict(first_slot=1, kind="rnn"),
    "one hidden state": dict(aux_layers=(2,)),
    "embedding and last state": dict(aux_layers=(0, 3)),
    "heads that do not divide the width": dict(head_dim=24, num_heads=6),
    "its own embedding": dict(own_embedding=True),
    "windows": dict(windows=(6, None)),
    "causal windows": dict(windows=(6, 6), causal=(True, True)),
    "windows from the anchor": dict(windows=(4, None), from_anchor=True),
    "causal windows from the anchor": dict(windows=(4, 4), causal=(True, True), from_anchor=True),
    "window and full, both causal": dict(windows=(None, 3), causal=(True, True)),
    "a block of two": dict(block_size=2),
    "a long block": dict(block_size=9),
    "linear rope": dict(rope={"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_drafts_by_its_formulas(tmp_path, variant):
    target, one = tiny_target("llama"), random_drafter(seed=3, **VARIANTS[variant])
    format = "speculators" if one.kept is not None or one.first_slot or one.from_anchor else "DeepSpec"
    options = {"own_embedding": True} if variant == "its own embedding" else {}
    drafter = load(tmp_path, one, target, format, **options)
    assert drafter.max_num_draft_tokens == one.num_drafts
    rounds = rounds_of(drafter, target, prompts([11, 6]), max_new_tokens=16, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target)) < 1e-5


@pytest.mark.parametrize("chunk", [1, 5, 64])
def test_a_prompt_in_chunks_gives_the_drafts_of_the_whole_prompt(tmp_path, chunk):
    target, one = tiny_target("llama"), random_drafter(seed=3)
    options = dict(max_new_tokens=16, eos_token_id=None, prefill_chunk_size=chunk)
    rounds = rounds_of(load(tmp_path, one, target), target, prompts([14, 9]), **options)
    assert largest_error(rounds, Reference(one, target)) < 1e-5


def test_rounds_without_a_draft_and_shorter_drafts_are_caught_up(tmp_path, monkeypatch):
    target, one = tiny_target("qwen3"), random_drafter(seed=3, kind="rnn")
    drafter, lengths = load(tmp_path, one, target), itertools.cycle([0, 0, 3, 1, 0, 5])
    monkeypatch.setattr(Governor, "next_length", lambda self: next(lengths))
    rounds = rounds_of(drafter, target, prompts([5, 9, 1]), max_new_tokens=40, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target)) < 1e-5


def test_a_target_that_runs_accepted_tokens_again_drafts_by_the_formulas(tmp_path):
    target, one = tiny_own("qwen3_next"), random_drafter(target_layers=4, seed=3)
    drafter = load(tmp_path, one, target)
    rounds = rounds_of(drafter, target, prompts([9]), max_new_tokens=24, eos_token_id=None)
    assert drafter.last_stats.rollback == "replay"
    assert largest_error(rounds, Reference(one, target)) < 1e-5


MISTAKES = {
    "layer id shifted": {},
    "last state normed": {},
    "context not normed": {},
    "block one position late": {},
    "other causality": {},
    "other window": dict(windows=(6, 6)),
    "other first row": {},
    "no markov bias": {},
    "markov reads the anchor": {},
    "no layer scalar": GEMMA4,
    "values not normed": GEMMA4,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_the_network_would_show(tmp_path, mistake):
    """Negative control of the comparison with the formulas."""
    target, one = tiny_target("llama"), random_drafter(seed=3, **MISTAKES[mistake])
    drafter = load(tmp_path, one, target)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target)) < 1e-5
    assert largest_error(rounds, Reference(one, target, mistake)) > 1e-3


def test_context_of_rejected_tokens_would_show(tmp_path, monkeypatch):
    """Negative control: what the drafter has made of a rejected token is kept."""
    target, one = tiny_target("llama"), random_drafter(seed=3)
    drafter = load(tmp_path, one, target)
    keep_what_was_drafted(monkeypatch, DSparkSession)
    rounds = rounds_of(drafter, target, prompts([11]), max_new_tokens=24, eos_token_id=None)
    assert largest_error(rounds, Reference(one, target)) > 1e-3


# The text


@pytest.mark.parametrize("num_drafters", [60, pytest.param(200, marks=pytest.mark.slow)])
def test_greedy_text_is_the_targets_for_many_random_drafters(tmp_path, num_drafters):
    kinds = ({}, dict(kind="gated"), dict(kind="rnn"), dict(rank=0, confidence=False), dict(first_slot=1), GEMMA4)
    num_drafted = 0
    for seed in range(num_drafters):
        name, kind = TARGETS[seed % len(TARGETS)], kinds[seed // len(TARGETS) % len(kinds)]
        target = tiny_target(name, seed=seed // len(TARGETS))
        one = drafter_for(name, seed=seed, block_size=2 + seed % 6, **kind)
        drafter = load(tmp_path / str(seed), one, target, "speculators" if one.first_slot else "DeepSpec")
        inputs = prompts([5 + seed % 9] if seed % 2 else [9, 2, 6], seed=seed)
        rounds_of(drafter, target, inputs, max_new_tokens=8)
        num_drafted += drafter.last_stats.num_drafted
    assert num_drafted > num_drafters


@pytest.mark.parametrize("lengths", [[12], [12, 5, 9, 3]], ids=["one row", "batch"])
def test_one_seed_gives_one_text_with_and_without_the_drafter(tmp_path, lengths):
    target, inputs = tiny_target("llama"), prompts(lengths)
    for options in ({"top_k": 0}, {"top_p": 0.8, "temperature": 0.7}, {"repetition_penalty": 1.3}):
        expected = sample(target, inputs, AutoDrafter.for_target(target, "none", seed=11), **options)
        for k, rule, schedule in ((1, "auto", None), (5, "auto", None), (3, "match", None), (5, "auto", 0.4)):
            chosen = dict(seed=11, num_draft_tokens=k, rule=rule, schedule=schedule)
            drafter = load(tmp_path, random_drafter(), target, **chosen)
            assert torch.equal(sample(target, inputs, drafter, **options), expected), (options, chosen)
            assert drafter.last_stats.num_drafted > 0


@pytest.mark.parametrize("kind", ["vanilla", "rnn"])
@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
def test_sampled_text_has_the_targets_law_with_a_reduced_vocabulary(tmp_path, rule, kind):
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    one = random_drafter(vocab_size=VOCAB, draft_vocab_size=3, kind=kind)
    torch.manual_seed(22)
    drafter = load(tmp_path, one, target, "speculators", rule=rule, num_draft_tokens=2)
    assert chi_square(many_texts(drafter, target), law) > 1e-3
    assert 0.05 < drafter.last_stats.acceptance_rate < 0.95


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_law_without_the_markov_bias_gives_another_text(tmp_path, rule):
    """Negative control: the tokens are drawn with the bias and declared as if they had been drawn without."""
    target, inputs = tiny_target("llama", vocab_size=VOCAB), prompts([4], vocab_size=VOCAB)
    law = joint_law(target, inputs)
    torch.manual_seed(20)
    drafter = load(tmp_path, random_drafter(vocab_size=VOCAB), target, rule=rule, num_draft_tokens=2)

    class Misdeclaring(DSparkSession):
        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            draft.law.logits.copy_(draft.law.logits.roll(1, dims=-1))
            return draft

    drafter.start = lambda request: Misdeclaring(drafter, request)
    assert chi_square(many_texts(drafter, target), law) < 1e-6


def test_what_is_drafted_by_a_part_of_the_block_is_the_start_of_the_whole_block(tmp_path):
    target, one = tiny_target("llama"), random_drafter(seed=3)
    firsts = []
    for k in (2, 5):
        drafter = load(tmp_path, one, target, num_draft_tokens=k)
        rounds = rounds_of(drafter, target, prompts([11]), alter=False, max_new_tokens=8, eos_token_id=None)
        firsts.append(rounds[0][3][0, :2].tolist())
    assert firsts[0] == firsts[1]


def test_a_drafter_beside_the_targets_weights_is_found(tmp_path):
    target = tiny_target("llama")
    target.save_pretrained(tmp_path)
    write_drafter(tmp_path / "dspark", random_drafter())
    loaded = type(target).from_pretrained(tmp_path)
    drafter = AutoDrafter.for_target(loaded, "dspark", num_draft_tokens=2)
    inputs = prompts([9])
    assert torch.equal(speculative(loaded, inputs, drafter), plain(loaded, inputs))
    assert drafter.method == "dspark" and drafter.last_stats.num_drafted > 0


def test_what_a_session_promises_holds_through_many_random_calls(tmp_path, monkeypatch):
    """Soak: lengths, laws, confidences and tokens of every draft, over rules, schedules, batches and early ends."""
    kinds = ({}, dict(kind="gated"), dict(kind="rnn"), dict(first_slot=1), dict(draft_vocab_size=41), GEMMA4)
    propose, drafts = DSparkSession.propose, []

    def watched(self, budget, verification):
        draft = propose(self, budget, verification)
        assert draft.lengths.tolist() == list(budget) and draft.num_slots == max(budget)
        within = torch.arange(draft.num_slots) < draft.lengths[:, None]
        assert bool(((draft.tokens >= 0) == within).all()) and int(draft.tokens.max()) < self.request.vocab_size
        if self.request.config.draft_sampling == "sample":
            chosen = draft.law.logits.gather(-1, draft.tokens.clamp_min(0)[..., None])[..., 0]
            assert draft.law.logits.dtype == torch.float32 and bool(chosen.isfinite()[within].all())
        if self.request.config.schedule is not None:
            assert draft.confidence.shape == draft.tokens.shape
            assert bool(((draft.confidence >= 0) & (draft.confidence <= 1)).all())
        assert self.cache.view <= self.cache.capacity and max(self.features.taken) < max(self.rows.widths)
        drafts.append(draft)
        return draft

    monkeypatch.setattr(DSparkSession, "propose", watched)
    for seed in range(36):
        target, kind = tiny_target(TARGETS[seed % len(TARGETS)]), kinds[seed // 2 % len(kinds)]
        one = drafter_for(TARGETS[seed % len(TARGETS)], seed=seed, block_size=2 + seed % 5, **kind)
        schedule = (None, "confidence", "lagged", 0.3, 0.0)[seed % 5]
        options = dict(rule=("coupled", "rejection", "block", "match")[seed % 4], schedule=schedule, seed=seed)
        format = "speculators" if one.first_slot or one.kept is not None else "DeepSpec"
        drafter = load(tmp_path / str(seed), one, target, format, **options)
        inputs = prompts([7] if seed % 3 else [9, 2, 6], seed=seed)
        found = sample(target, inputs, drafter, max_new_tokens=12, eos_token_id=[3, 5, 8, 13, 21, 34, 55])
        stats = drafter.last_stats
        assert stats.num_accepted <= stats.num_drafted and found.shape[1] <= inputs["input_ids"].shape[1] + 12
        assert stats.num_emitted <= stats.num_accepted + stats.num_verifications
    assert len(drafts) > 100
