"""`block_mass` against its fp64 reference and the package's rule `block`, for every law."""

import math

import pytest
import torch
from kernel_cases import DEVICE, DRAFT_LENGTHS, VOCAB_SIZES, counted, interpreted, pairwise, quietly, triton
from kernel_drafts import (
    LAWS,
    broken_draft,
    check_against_reference,
    law_of,
    laws_at,
    noise_of,
    random_draft,
    row_of,
    rule_by,
    same_row,
)
from laws import chain_drafter, chi_square_p_value, constant_language, emitted_texts, text_probabilities

tl = triton.language

from hf_specdec._kernels import Config, DraftLaw, _block_mass, _one_hot, block_mass, residual  # noqa: E402
from hf_specdec.verification import Draft, Noise, RoundNoise, verify  # noqa: E402

pytestmark = quietly

DTYPES = (torch.float32, torch.bfloat16)
SURELY_WRONG = 1e-6


@pytest.mark.parametrize(
    ("vocab_size", "batch_size", "num_drafted", "law", "dtype"),
    pairwise(VOCAB_SIZES[:6], (1, 2), DRAFT_LENGTHS, LAWS, DTYPES),
)
def test_the_kernel_gives_what_the_reference_gives(vocab_size, batch_size, num_drafted, law, dtype):
    num_drafted = min(num_drafted, 4) if vocab_size > 97 else num_drafted
    case = random_draft(law, batch_size, num_drafted, vocab_size, dtype=dtype, seed=num_drafted + 30)
    check_against_reference("block_mass", *case, inv_temperature=1.25)


@pytest.mark.grid
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("num_drafted", DRAFT_LENGTHS)
def test_the_kernel_gives_what_the_reference_gives_at_every_size(vocab_size, batch_size, num_drafted):
    for i, law in enumerate(laws_at(vocab_size, batch_size, num_drafted)):
        dtype = DTYPES[(i + batch_size) % 2]
        case = random_draft(law, batch_size, num_drafted, vocab_size, dtype=dtype, seed=num_drafted)
        check_against_reference("block_mass", *case)


# The package's rule


@pytest.mark.parametrize("law", LAWS)
def test_verdicts_are_those_of_the_rule(law):
    # In fp64 the rule draws with the same noise; the reference says which rows are decided by more than rounding.
    draft, scores, noise = random_draft(law, 4, 4, 60, seed=60, filtered=0.3)
    assert check_against_reference("block_mass", draft, scores, noise, config=Config(64, 1)) >= 3
    found = rule_by("block_mass")(draft, scores, noise)
    expected = verify(draft, scores.double(), "block", noise)
    for b in range(4):
        assert same_row(found, expected, b, b)


@pytest.mark.parametrize("law", ["some one-hot", "candidates"])
def test_rows_that_are_no_law_end_the_block_and_are_marked_where_the_rule_marks_them(law):
    draft, scores, noise = broken_draft(law)
    expected = verify(draft, scores.double(), "block", noise)
    found = rule_by("block_mass")(draft, scores, noise)
    for b in range(20):
        assert same_row(found, expected, b, b), b
    assert 3 <= int((found.num_accepted == -1).sum()) < 20


def test_a_rows_verdict_does_not_depend_on_the_batch_around_it():
    draft, scores, noise = random_draft("some one-hot", 2, 3, 60, seed=4)
    law, arguments = law_of(draft, 60), noise_of(noise)
    together = block_mass(scores, draft.tokens, draft.lengths, law, config=Config(64, 1), **arguments)
    for b in range(2):
        own = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        alone = block_mass(scores[b : b + 1], *row_of(draft, law, b), config=Config(64, 1), **own)
        assert same_row(together, alone, b)


# The law


def test_emitted_text_has_the_targets_law():
    target = constant_language(0.7, 0.2, 0.1, dtype=torch.float32)
    drafter = constant_language(0.1, 0.2, 0.7, dtype=torch.float32)
    texts = emitted_texts(target, chain_drafter(drafter, 2), rule_by("block_mass"), Noise.from_seed(6, 30, DEVICE), 2)
    numbers = 3 * texts[:, 0] + texts[:, 1]
    assert chi_square_p_value(numbers, text_probabilities(target, 2)) > SURELY_WRONG
    assert chi_square_p_value(numbers, text_probabilities(drafter, 2)) < SURELY_WRONG


@interpreted
def test_a_later_success_rescues_an_earlier_failure():
    # The coins of `rejection` would stop at the first token; pi stays 1 where the second ratio makes up for the first.
    rows = 8
    p = torch.tensor([[0.28, 0.72], [0.9, 0.1], [0.5, 0.5]], device=DEVICE).log().expand(rows, -1, -1)
    law = DraftLaw(torch.full((rows, 2, 2), 0.5, device=DEVICE).log())
    tokens, lengths = torch.zeros(rows, 2, dtype=torch.long, device=DEVICE), torch.tensor([2] * rows, device=DEVICE)
    noise = noise_of(RoundNoise(Noise.from_seed(7, rows, DEVICE), lengths, 0))
    whole = block_mass(p, tokens, lengths, law, config=Config(32, 1), **noise)
    assert whole.num_accepted.tolist() == [2] * rows  # pi_2 = min(1, 0.56 * 1.8) = 1
    assert int(residual(p, tokens, lengths, law, config=Config(32, 1), **noise).num_accepted.sum()) < 2 * rows


@triton.jit
def extended_kernel(log_ratios_ptr, out_ptr, n):
    log_pi = tl.full([], 0.0, tl.float32)
    for i in range(n):
        log_pi = _block_mass.extended(log_pi, tl.load(log_ratios_ptr + i))
        tl.store(out_ptr + i, log_pi)


@pytest.mark.parametrize(
    ("log_ratios", "expected"),
    [
        ([-1.0, 0.5, 2.0, -3.0], [-1.0, -0.5, 0.0, -3.0]),
        ([-math.inf, math.inf, 5.0], [-math.inf] * 3),  # p = 0 ends it, whatever q = 0 makes of a later ratio
        ([-100.0, math.inf, -1.0], [-100.0, -12.0, -13.0]),
        ([0.0, math.nan, 1.0], [0.0, math.nan, math.nan]),
    ],
)
def test_the_capped_ratio_survives_zeros_and_keeps_nan(log_ratios, expected):
    ratios = torch.tensor(log_ratios, device=DEVICE)
    out = torch.empty_like(ratios)
    extended_kernel[(1,)](ratios, out, len(log_ratios))
    assert torch.allclose(out, torch.tensor(expected, device=DEVICE), equal_nan=True)


@interpreted
@pytest.mark.parametrize("law", ["full", "one-hot"])
def test_a_length_without_probability_never_passes(monkeypatch, law):
    # sgl-project/sglang#35771: with <= a coin of zero accepts what has no probability.
    @triton.jit
    def zeros(keys_ptr, counters_ptr, batch_row, SLOTS: tl.constexpr):
        return tl.zeros([SLOTS], tl.float32)

    monkeypatch.setattr(_one_hot if law == "one-hot" else _block_mass, "coins", zeros)
    draft, scores, noise = random_draft(law, 4, 2, 50, seed=6)
    arguments = {"config": Config(64, 1), **noise_of(noise)}
    found = block_mass(scores, draft.tokens, draft.lengths, law_of(draft, 50), **arguments)
    assert torch.equal(found.num_accepted, draft.lengths)  # with such coins all others pass
    scores[:, 0].scatter_(-1, draft.tokens.clamp_min(0)[:, :1], -math.inf)
    found = block_mass(scores, draft.tokens, draft.lengths, law_of(draft, 50), **arguments)
    assert (found.num_accepted == 0).all()


def test_nothing_past_the_vocabulary_is_ever_chosen():
    # GHSA-8wr5-jm2h-8r4f (vllm-project/vllm#44744): masked positions of the last tile won.
    padded = torch.full((6, 2, 8193 + 50), 1e4, device=DEVICE)
    padded[..., :8193] = -math.inf
    padded[..., :3] = torch.tensor([0.0, -1.0, -math.inf])
    q = padded[:, :1].clone()
    q[..., :3] = torch.tensor([-30.0, 0.0, 0.0])
    tokens = torch.tensor([1, 2] * 3, device=DEVICE)[:, None]
    noise = RoundNoise(Noise.from_seed(3, 6, DEVICE), tokens[:, 0], 1)
    ones = torch.ones(6, dtype=torch.long, device=DEVICE)
    law = DraftLaw(q[..., :8193])
    found = block_mass(padded[..., :8193], tokens, ones, law, config=Config(4096, 4), **noise_of(noise))
    assert (found.num_accepted[1::2] == 0).all()
    assert (found.tokens[found.num_accepted == 0, 0] == 0).all()


@pytest.mark.parametrize("law", ["full with lse", "reduced", "candidates with lse, some one-hot"])
def test_strides_and_offsets_are_honoured_and_minus_one_is_no_index(law):
    draft, scores, noise = random_draft(law, 2, 3, 60, seed=9, dtype=torch.bfloat16)
    wider = scores.new_full((4, 6, 80), 1e4)
    wider[1:3, 1:5, 7:67] = scores
    around = draft.tokens.new_zeros(2, 9)
    around[:, 4:7] = draft.tokens
    moved = Draft(around[:, 4:7], draft.lengths, draft.law)
    found = rule_by("block_mass")(moved, wider[1:3, 1:5, 7:67], noise)
    expected = rule_by("block_mass")(draft, scores, noise)
    for b in range(2):
        assert same_row(found, expected, b, b)


# Cost


@interpreted
@pytest.mark.parametrize("law", ["full", "full with lse", "candidates"])
def test_three_launches_read_the_rows_twice_and_the_bonus_row_once(law, vocab_size=65536):
    draft, scores, noise = random_draft(law, 1, 2, vocab_size, dtype=torch.bfloat16, seed=3)
    law_ = law_of(draft, vocab_size)
    with counted() as counts:
        block_mass(scores, draft.tokens, draft.lengths, law_, **noise_of(noise))
    assert counts.launches == 3
    p_row, q_row = 2 * vocab_size, 2 * law_.logits.shape[-1]
    bound = 5 * p_row + (4 if law_.lse is None else 2) * q_row  # 3 k + 1 rows, 4 k + 1 without q's normaliser
    assert 0.98 * bound <= counts.read + counts.written <= 1.1 * bound


@interpreted
@pytest.mark.parametrize("num_drafted", [1, 4])
def test_a_one_hot_draft_costs_two_launches_that_read_every_row_once(num_drafted, vocab_size=65536):
    draft, scores, noise = random_draft("one-hot", 1, num_drafted, vocab_size, dtype=torch.bfloat16, seed=3)
    with counted() as counts:
        block_mass(scores, draft.tokens, draft.lengths, None, **noise_of(noise))
    assert counts.launches == 2
    bound = 2 * scores.numel()  # k + 1 rows
    assert 0.98 * bound <= counts.read + counts.written <= 1.1 * bound


def test_no_rows_give_no_verdicts():
    nothing = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    keys, counters = nothing[:, :2].int(), nothing[:, 0].int()
    found = block_mass(torch.zeros(0, 4, 7, device=DEVICE), nothing, nothing[:, 0], None, keys=keys, counters=counters)
    assert found.num_accepted.shape == (0,)
    assert found.tokens.shape == (0, 4)
