"""`residual` against its fp64 reference and the package's rule `rejection`, for every law."""

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

from hf_specdec import _kernels as kernels  # noqa: E402
from hf_specdec._kernels import Config, _draws, _law, _one_hot, _residual, residual  # noqa: E402
from hf_specdec.verification import (  # noqa: E402
    BONUS,
    DRAFT,
    RESIDUAL,
    TARGET,
    Draft,
    Noise,
    RoundNoise,
    Sampled,
    verify,
)
from hf_specdec.verification.noise import ACCEPT, SLOT_BITS  # noqa: E402

pytestmark = quietly

DTYPES = (torch.float32, torch.bfloat16)
SURELY_WRONG = 1e-6


@pytest.mark.parametrize(
    ("vocab_size", "batch_size", "num_drafted", "law", "dtype"),
    pairwise(VOCAB_SIZES[:6], (1, 2), DRAFT_LENGTHS, LAWS, DTYPES),
)
def test_the_kernel_gives_what_the_reference_gives(vocab_size, batch_size, num_drafted, law, dtype):
    num_drafted = min(num_drafted, 4) if vocab_size > 8192 else num_drafted
    case = random_draft(law, batch_size, num_drafted, vocab_size, dtype=dtype, seed=num_drafted + 20)
    check_against_reference("residual", *case, inv_temperature=1.25)


@pytest.mark.grid
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("num_drafted", DRAFT_LENGTHS)
def test_the_kernel_gives_what_the_reference_gives_at_every_size(vocab_size, batch_size, num_drafted):
    for i, law in enumerate(laws_at(vocab_size, batch_size, num_drafted)):
        dtype = DTYPES[(i + batch_size) % 2]
        case = random_draft(law, batch_size, num_drafted, vocab_size, dtype=dtype, seed=num_drafted)
        check_against_reference("residual", *case)


# The package's rule


@pytest.mark.parametrize("law", LAWS)
def test_verdicts_are_those_of_the_rule(law):
    # In fp64 the rule draws with the same noise; the reference says which rows are decided by more than rounding.
    for num_drafted, vocab_size in ((1, 9), (4, 60)):
        draft, scores, noise = random_draft(law, 4, num_drafted, vocab_size, seed=vocab_size, filtered=0.3)
        assert check_against_reference("residual", draft, scores, noise, config=Config(32, 1)) >= 3
        found, expected = rule_by("residual")(draft, scores, noise), verify(draft, scores.double(), "rejection", noise)
        for b in range(4):
            assert same_row(found, expected, b, b)


@pytest.mark.parametrize("law", ["some one-hot", "candidates"])
def test_rows_that_are_no_law_are_marked_where_the_rule_marks_them(law):
    # vllm-project/vllm#53029: NaN became a token; vllm-project/vllm-ascend#14042: it became nothing, for ever.
    draft, scores, noise = broken_draft(law)
    expected = verify(draft, scores.double(), "rejection", noise)
    found = residual(scores, draft.tokens, draft.lengths, law_of(draft, 40), config=Config(64, 1), **noise_of(noise))
    for b in range(20):
        assert same_row(found, expected, b, b), b
    assert 3 <= int((found.num_accepted == -1).sum()) < 20


@interpreted
def test_a_rows_verdict_does_not_depend_on_the_batch_around_it():
    # Ranks of tensor parallelism must agree (vllm-project/vllm#17498, ROCm/aiter#2035).
    draft, scores, noise = random_draft("some one-hot", 3, 3, 90, seed=4)
    law, arguments = law_of(draft, 90), noise_of(noise)
    together = residual(scores, draft.tokens, draft.lengths, law, config=Config(64, 1), **arguments)
    for b in range(3):
        own = {name: tensor[b : b + 1] for name, tensor in arguments.items()}
        alone = residual(scores[b : b + 1], *row_of(draft, law, b), config=Config(64, 1), **own)
        assert same_row(together, alone, b)


# The law


def test_emitted_text_has_the_targets_law_and_drafts_are_accepted_at_their_rate():
    # Drafts, coins and residuals come from one seed (vllm-project/vllm#47386: a residual drawn with the draft's noise).
    target = constant_language(0.6, 0.3, 0.1, dtype=torch.float32)
    drafter = constant_language(0.2, 0.3, 0.5, dtype=torch.float32)
    accepted = []

    def rule(draft: Draft, scores: torch.Tensor, noise: RoundNoise):
        verdict = rule_by("residual")(draft, scores, noise)
        accepted.extend((verdict.num_accepted >= 1).tolist())
        return verdict

    texts = emitted_texts(target, chain_drafter(drafter, 2), rule, Noise.from_seed(5, 40, DEVICE), 2)
    numbers = 3 * texts[:, 0] + texts[:, 1]
    assert chi_square_p_value(numbers, text_probabilities(target, 2)) > SURELY_WRONG
    assert chi_square_p_value(numbers, text_probabilities(drafter, 2)) < SURELY_WRONG
    rate = 0.2 + 0.3 + 0.1  # sum min(p, q); vllm-project/vllm-ascend#13730 accepted everything
    assert abs(sum(accepted) / len(accepted) - rate) < 4.0 * math.sqrt(rate * (1.0 - rate) / len(accepted))


def test_streams_are_the_packages_and_no_drafts():
    assert tuple(_law.STREAMS.values()) == (ACCEPT, RESIDUAL, BONUS)
    assert len({TARGET, DRAFT, *_law.STREAMS.values()}) == 5
    assert SLOT_BITS == 10


@triton.jit
def weights_kernel(log_p_ptr, t_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, _draws.residual_weight(tl.load(log_p_ptr + at), tl.load(t_ptr + at)))


def test_residual_weights_hold_where_q_is_close_to_p():
    # vllm-project/vllm#46665: log(1 - q / p) lost small and large ratios.
    distances = torch.cat([torch.logspace(-7, -0.01, 500), torch.tensor([0.49, 0.5, 0.51])]).double()
    t = torch.cat([distances.neg().log1p(), torch.logspace(-12, -1, 500).double().log(), -distances])
    t = torch.cat([t, torch.tensor([0.0, 1e-7, 3.0, -math.inf, math.nan])])
    t = torch.nn.functional.pad(t, (0, 2048 - len(t)), value=-1.0).float().to(DEVICE)
    log_p = torch.linspace(-30.0, 0.0, 2048, device=DEVICE)
    out = torch.empty_like(t)
    weights_kernel[(1,)](torch.zeros_like(t), t, out, 2048)
    exact = -torch.expm1(t.double())
    positive = t < 0.0
    assert int(positive.sum()) == 2044
    assert out[~positive].isneginf().all()
    assert ((out.double().exp() - exact)[positive].abs() <= 1e-6 * exact[positive]).all()
    weights_kernel[(1,)](log_p, t, out, 2048)
    assert torch.allclose(out[positive].double(), (log_p + exact.log())[positive], rtol=1e-6, atol=1e-6)
    log_p[5] = -math.inf
    weights_kernel[(1,)](log_p, t, out, 2048)
    assert out[5] == -math.inf


@pytest.mark.parametrize("law", ["full", "full with lse", "reduced", "candidates"])
def test_a_drafter_that_is_the_target_is_always_accepted(law):
    # vllm-project/vllm#52833: a drafter of which nothing was accepted.
    draft, _, noise = random_draft(law, 6, 4, 200, seed=2)
    q, ids = draft.law.logits, draft.law.target_ids()
    scores = torch.full((6, 5, 200), -math.inf, device=DEVICE)
    scores[:, :-1] = q if ids is None else scores[:, :-1].scatter(-1, ids, q)
    scores[:, -1] = 0.0
    past = torch.arange(5, device=DEVICE) > draft.lengths[:, None]
    scores = torch.where(torch.arange(5, device=DEVICE)[:, None] == draft.lengths[:, None, None], 0.0, scores)
    scores = scores.masked_fill(past[..., None], math.nan)
    found = residual(scores, draft.tokens, draft.lengths, law_of(draft, 200), config=Config(128, 1), **noise_of(noise))
    assert torch.equal(found.num_accepted, draft.lengths)


@triton.jit
def coins_of_zero(keys_ptr, counters_ptr, batch_row, SLOTS: tl.constexpr):
    return tl.zeros([SLOTS], tl.float32)


@triton.jit
def coins_of_one(keys_ptr, counters_ptr, batch_row, SLOTS: tl.constexpr):
    return tl.full([SLOTS], 1.0, tl.float32)


@interpreted
@pytest.mark.parametrize("law", ["full", "candidates", "one-hot"])
def test_a_token_without_probability_is_never_accepted(monkeypatch, law):
    # sgl-project/sglang#35771: a coin of zero accepted what has no probability.
    monkeypatch.setattr(_one_hot if law == "one-hot" else _residual, "coins", coins_of_zero)
    draft, scores, noise = random_draft(law, 4, 2, 50, seed=6)
    found = residual(scores, draft.tokens, draft.lengths, law_of(draft, 50), config=Config(64, 1), **noise_of(noise))
    assert torch.equal(found.num_accepted, draft.lengths)  # with such coins all others are
    scores[:, 0].scatter_(-1, draft.tokens.clamp_min(0)[:, :1], -math.inf)
    drafted = draft.lengths > 0
    found = residual(scores, draft.tokens, draft.lengths, law_of(draft, 50), config=Config(64, 1), **noise_of(noise))
    assert (found.num_accepted[drafted] == 0).all()
    assert (found.tokens[drafted, 0] != draft.tokens[drafted, 0]).all()


@interpreted
def test_where_no_residual_is_left_the_token_is_drawn_from_p(monkeypatch):
    monkeypatch.setattr(_residual, "coins", coins_of_one)
    draft, scores, noise = random_draft("full", 6, 1, 70, seed=1)
    lengths = torch.ones_like(draft.lengths)
    logits = scores[:, :1].clone()
    tokens = logits.argmax(dim=-1)
    draft = Draft(tokens, lengths, Sampled(logits))
    found = residual(scores, tokens, lengths, law_of(draft, 70), config=Config(128, 1), **noise_of(noise))
    assert found.num_accepted.tolist() == [0] * 6
    assert found.tokens[:, 0].tolist() == noise.choose(RESIDUAL, logits)[:, 0].tolist()


@interpreted
def test_where_a_one_hot_draft_has_all_the_probability_nothing_else_is_drawn(monkeypatch):
    monkeypatch.setattr(_one_hot, "coins", coins_of_one)
    logits = torch.full((3, 2, 70), -math.inf, device=DEVICE)
    logits[:, :, 40] = 1.7
    logits[2, 0, 41] = math.inf
    tokens, ones = torch.full((3, 1), 40, device=DEVICE), torch.ones(3, dtype=torch.long, device=DEVICE)
    noise = noise_of(RoundNoise(Noise.from_seed(1, 3, DEVICE), ones, 0))
    found = residual(logits, tokens, ones, None, inv_temperature=1.0 / 0.7, config=Config(32, 1), **noise)
    assert found.num_accepted.tolist() == [0, 0, -1]
    assert found.tokens.tolist() == [[40, -1], [40, -1], [-1, -1]]


# Strides, tails, padding


@pytest.mark.parametrize("law", ["full with lse", "some one-hot", "reduced", "candidates"])
def test_strides_and_offsets_are_honoured_and_minus_one_is_no_index(law):
    # vllm-project/vllm#42684 took the vocabulary's size for the stride, vllm-project/vllm-ascend#15673 read -1 as an
    # index: in front of each row and of the draft stands what would be accepted.
    draft, scores, noise = random_draft(law, 2, 3, 70, seed=9, dtype=torch.bfloat16)

    def within(tensor: torch.Tensor, filler: float) -> torch.Tensor:
        """The same values in a larger tensor, at an odd offset."""
        larger = tensor.new_full([size + 3 for size in tensor.shape], filler)
        view = larger[tuple(slice(1, size + 1) for size in tensor.shape)]
        return view.copy_(tensor)

    law_, arguments = law_of(draft, 70), noise_of(noise)
    moved = None
    if law_ is not None:
        moved = kernels.DraftLaw(
            within(law_.logits, 1e4),
            law_.positions,
            None if law_.ids is None else within(law_.ids, 0),
            None if law_.one_hot is None else within(law_.one_hot, True),
            None if law_.lse is None else within(law_.lse, -1e4),
        )
    expected = residual(scores, draft.tokens, draft.lengths, law_, config=Config(64, 1), **arguments)
    found = residual(
        within(scores, 1e4), within(draft.tokens, 0), draft.lengths, moved, config=Config(64, 1), **arguments
    )
    for b in range(2):
        assert same_row(found, expected, b, b)


@pytest.mark.parametrize("vocab_size", [8193, 10000])
def test_nothing_past_the_vocabulary_is_ever_chosen(vocab_size):
    # GHSA-8wr5-jm2h-8r4f (vllm-project/vllm#44744): masked positions of the last tile won.
    padded = torch.full((8, 2, vocab_size + 50), 1e4, device=DEVICE)
    padded[..., :vocab_size] = -math.inf
    padded[..., :3] = torch.tensor([0.0, -1.0, -math.inf])
    q = torch.full((8, 1, vocab_size + 50), 1e4, device=DEVICE)
    q[..., :vocab_size] = -math.inf
    q[..., :3] = torch.tensor([-30.0, 0.0, 0.0])
    tokens = torch.tensor([1, 2] * 4, device=DEVICE)[:, None]
    noise = RoundNoise(Noise.from_seed(3, 8, DEVICE), tokens[:, 0], 1)
    law = kernels.DraftLaw(q[..., :vocab_size])
    ones = torch.ones(8, dtype=torch.long, device=DEVICE)
    found = residual(padded[..., :vocab_size], tokens, ones, law, config=Config(2048, 4), **noise_of(noise))
    assert (found.num_accepted[1::2] == 0).all()
    assert (found.tokens[found.num_accepted == 0, 0] == 0).all()


# Cost


@interpreted
@pytest.mark.parametrize("law", ["one-hot", "full", "full with lse", "reduced with lse", "candidates"])
@pytest.mark.parametrize("rejected", [False, True])
def test_the_launches_read_only_the_rows_that_are_needed(law, rejected, vocab_size=65536):
    draft, scores, noise = random_draft(law, 1, 2, vocab_size, dtype=torch.bfloat16, seed=3)
    tokens = draft.tokens.clamp_min(0)
    scores.scatter_(-1, torch.nn.functional.pad(tokens, (0, 1))[..., None], -math.inf if rejected else 1e3)
    law_ = law_of(draft, vocab_size)
    with counted() as counts:
        found = residual(scores, tokens, draft.lengths, law_, **noise_of(noise))
    assert int(found.num_accepted) == (0 if rejected else 2)
    assert counts.launches == (2 if law_ is None else 3)
    p_row = 2 * vocab_size
    q_row = 0 if law_ is None else 2 * law_.logits.shape[-1]
    q_rows = 2 if law_ is not None and (law_.lse is None or law_.ids is not None) else 0
    bound = 3 * p_row + q_rows * q_row  # k + 1 rows of p, and of q without its normaliser
    if rejected and law_ is not None:
        bound += p_row + q_row + (4 * vocab_size if law.startswith("reduced") else 0)
    assert 0.98 * bound <= counts.read + counts.written <= 1.1 * bound


# Refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"logits": torch.zeros(2, 5)}, r"`logits` has shape \(2, 5\)"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, r"`tokens` is torch.int64 \[2, 3\]; give int64 \[2, 2\]"),
        ({"lengths": torch.zeros(2)}, "`lengths` is torch.float32"),
        ({"keys": None}, "`keys` is None"),
        ({"law": kernels.DraftLaw(torch.zeros(2, 3, 5))}, r"`law.logits` has shape \(2, 3, 5\)"),
        ({"law": kernels.DraftLaw(torch.zeros(2, 2, 5).double())}, "`law.logits` must be float32"),
        ({"law": kernels.DraftLaw(torch.zeros(2, 2, 4))}, "4 candidates of 5; say which"),
        (
            {"law": kernels.DraftLaw(torch.zeros(2, 2, 4), torch.zeros(5, dtype=torch.int64))},
            "`law.positions` is torch.int64",
        ),
        ({"law": kernels.DraftLaw(torch.zeros(2, 2, 4), ids=torch.zeros(2, 4).long())}, "`law.ids` is torch.int64"),
        ({"law": kernels.DraftLaw(torch.zeros(2, 2, 5), one_hot=torch.zeros(2, 2))}, "`law.one_hot` is torch.float32"),
        ({"law": kernels.DraftLaw(torch.zeros(2, 2, 5), lse=torch.zeros(2, 3))}, "`law.lse` is torch.float32"),
    ],
)
def test_what_no_kernel_serves_is_refused(changed, message):
    keys, counters = torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    draft = {"tokens": torch.zeros(2, 2, dtype=torch.int64), "lengths": torch.zeros(2, dtype=torch.int64)}
    arguments = {"logits": torch.zeros(2, 3, 5), "law": None, "keys": keys, "counters": counters, **draft, **changed}
    with pytest.raises(ValueError, match=message):
        residual(**arguments)


def test_no_rows_give_no_verdicts():
    nothing = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    keys, counters = nothing[:, :2].int(), nothing[:, 0].int()
    found = residual(torch.zeros(0, 4, 7, device=DEVICE), nothing, nothing[:, 0], None, keys=keys, counters=counters)
    assert found.num_accepted.shape == (0,)
    assert found.tokens.shape == (0, 4)
