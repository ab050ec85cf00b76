"""`processed_sample` draws what noise over the rows that transformers' warpers leave would draw."""

import math
from functools import partial

import pytest
import torch
from kernel_cases import DEVICE, VOCAB_SIZES, config_for, counted, interpreted, noise_arguments, pairwise, quietly
from kernel_cases import random_logits as normal_logits
from laws import chi_square_p_value
from transformers.generation import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

pytest.importorskip("triton")

from hf_specdec import _kernels as kernels
from hf_specdec._kernels import Config, processed_sample, reference

pytestmark = quietly

DTYPES = (torch.float32, torch.bfloat16)
SURELY_WRONG = 1e-6
FILTERS = (
    {"top_k": 50},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 64, "top_p": 0.95, "min_p": 0.02},
    {"top_k": 1},
    {"top_p": 0.0},
    {"top_k": 10**6, "top_p": 1.0, "min_p": 0.0},
    {},
)


def roundings(filters: dict) -> list[dict]:
    """The filters, a little wider and a little narrower: what a rounding error may make of them."""
    moved = [{**filters}, {**filters}, {**filters}]
    for name in filters.keys() & {"top_p", "min_p"}:
        for sign, changed in zip((-1.0, 1.0), moved[1:], strict=True):
            changed[name] = min(1.0, max(0.0, filters[name] + sign * 2e-6))
    return moved


def check(logits: torch.Tensor, config: Config | None = None, **options) -> None:
    """The kernel's tokens are the reference's, but where rounding decides over a token at a filter's border."""
    found = processed_sample(logits, config=config or config_for(logits.shape[-1]), **options)
    right = torch.zeros_like(found.token, dtype=torch.bool)
    for same_options in roundings(options):
        expected = reference.processed_sample(logits, **same_options)
        assert torch.equal(found.status, expected.status)
        loss = expected.losses.gather(-1, found.token.clamp_min(0)[..., None])[..., 0]
        right |= (found.token == expected.token) | (loss <= 2e-5)
    assert bool(right.all())


@pytest.mark.parametrize(("vocab_size", "filters", "dtype"), pairwise(VOCAB_SIZES, range(len(FILTERS)), DTYPES))
def test_the_kernel_gives_what_the_reference_gives(vocab_size, filters, dtype):
    spread = 0.5 if filters % 2 else 3.0
    logits = normal_logits(1, 2, vocab_size, dtype=dtype, seed=vocab_size + filters, spread=spread)
    check(logits, inv_temperature=1.0 / 0.7, **FILTERS[filters], **noise_arguments(1))


@pytest.mark.grid
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_the_kernel_gives_what_the_reference_gives_for_every_filter(vocab_size, filters):
    for dtype in DTYPES:
        for spread in (0.5, 3.0):
            logits = normal_logits(2, 3, vocab_size, dtype=dtype, seed=vocab_size, spread=spread)
            check(logits, inv_temperature=1.0 / 0.7, **filters, **noise_arguments(2))


def kept_by_transformers(scores: torch.Tensor, top_k=None, top_p=None, min_p=None) -> torch.Tensor:
    """[n, V] scores after transformers' own warpers, in generate's order, with a sort that is stable."""
    warpers = [TemperatureLogitsWarper(0.5)]
    warpers += [TopKLogitsWarper(top_k)] if top_k is not None else []
    warpers += [TopPLogitsWarper(top_p)] if top_p is not None else []
    warpers += [MinPLogitsWarper(min_p)] if min_p is not None else []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "sort", partial(torch.sort, stable=True))
        for warper in warpers:
            scores = warper(torch.zeros(len(scores), 1, dtype=torch.long), scores)
    return scores


@pytest.mark.parametrize("filters", FILTERS[:-2], ids=str)
@pytest.mark.parametrize("ties", ["none", "some", "many"])
def test_the_token_is_one_that_transformers_keeps_and_the_best_of_these(filters, ties):
    scores = normal_logits(4, 1, 400, dtype=torch.float32, spread=1.5).cpu()
    if ties != "none":
        scores = scores.bfloat16().float() if ties == "some" else (2.0 * scores).round() / 2.0
    scores[:, :, 100:150] = -math.inf
    kept = kept_by_transformers(scores[:, 0], **filters)
    noise = noise_arguments(4)
    perturbed = kept.double() + reference.gumbel(noise["keys"], noise["counters"][:, None], 0, 400)[:, 0].cpu()
    found = processed_sample(
        scores.to(DEVICE), inv_temperature=2.0, config=Config(128, 1), **filters, **noise_arguments(4)
    )
    wider, narrower = (reference.processed_scores(2.0 * scores.double(), **f)[:, 0] for f in roundings(filters)[1:])
    clear = (wider == narrower).all(dim=-1)
    assert int(clear.sum()) >= 3
    assert torch.equal(found.token[clear, 0].cpu(), perturbed.argmax(dim=-1)[clear])


def test_of_equal_values_top_p_keeps_the_higher_indices():
    # Ten equal tokens of which 0.25 keeps three: the last ones, as torch's sort lists them.
    logits = torch.zeros(40, 1, 10, device=DEVICE)
    kept = kept_by_transformers(logits[:1, 0].cpu(), top_p=0.25)[0].isfinite()
    assert kept.nonzero().flatten().tolist() == [7, 8, 9]
    found = processed_sample(logits, top_p=0.25, config=Config(8, 1), **noise_arguments(40))
    assert set(found.token.flatten().tolist()) == {7, 8, 9}


def test_top_k_keeps_every_tie_of_the_kth_value():
    logits = torch.tensor([2.0, 1.0, 1.0, -0.0, 0.0, 1.0, 0.5], device=DEVICE).expand(24, 1, -1)
    for top_k, kept in ((1, {0}), (2, {0, 1, 2, 5}), (6, {0, 1, 2, 3, 4, 5, 6})):
        found = processed_sample(logits, top_k=top_k, config=Config(4, 1), **noise_arguments(24))
        tokens = set(found.token.flatten().tolist())
        assert tokens == kept if len(kept) < 7 else tokens <= kept


def test_draws_follow_the_filtered_law():
    logits = torch.tensor([1.0, -0.5, 0.3, 0.9, 2.0, -3.0, 1.2, 0.1], device=DEVICE)
    filters = {"top_k": 6, "top_p": 0.8}
    law = reference.processed_scores(logits.double(), **filters).softmax(dim=-1).cpu()
    assert 2 < int((law > 0).sum()) < 6
    found = processed_sample(logits.expand(6, 25, -1), config=Config(8, 1), **filters, **noise_arguments(6, seed=5))
    tokens = found.token.flatten().cpu()
    assert chi_square_p_value(tokens, law) > SURELY_WRONG
    assert chi_square_p_value(tokens, (0.3 * logits).softmax(dim=-1).cpu()) < SURELY_WRONG


@pytest.mark.parametrize("filters", FILTERS[:5], ids=str)
def test_broken_rows_get_a_status_and_rows_with_few_tokens_a_token(filters):
    logits = torch.full((5, 1, 40), -math.inf)
    logits[0, 0, 9], logits[1, 0, 9], logits[3, 0, 33] = math.nan, math.inf, -7.0
    logits[4, 0, [0, 39]] = torch.tensor([1.0, 1.5])
    found = processed_sample(logits.to(DEVICE), config=Config(8, 1), **filters, **noise_arguments(5))
    assert found.status.flatten().tolist() == [
        kernels.HAS_NAN,
        kernels.INFINITE,
        kernels.NOTHING,
        kernels.OK,
        kernels.OK,
    ]
    assert found.token.flatten().tolist()[:4] == [-1, -1, -1, 33]
    assert int(found.token[4]) in (0, 39)


def test_strides_slots_and_offsets_are_honoured():
    padded = normal_logits(5, 4, 701, dtype=torch.bfloat16)
    slots = torch.tensor([[0, 1], [0, 2], [5, 5]], dtype=torch.int32, device=DEVICE)
    check(padded[1:4, ::2, 3:640], Config(128, 1), top_k=9, top_p=0.9, slots=slots, stream=1, **noise_arguments(3))


@interpreted
@pytest.mark.parametrize(
    ("filters", "sweeps"),
    [({"top_p": 0.9}, 1.5), ({"min_p": 0.1}, 1.5), ({"top_k": 50}, 4.0), (FILTERS[4], 5.0)],
    ids=str,
)
def test_launches_are_two_and_a_peaked_row_is_not_read_often(filters, sweeps):
    # What language models give: most of the mass on few tokens. The reads after the first sweep meet the cache.
    order = torch.randperm(151936, generator=torch.Generator().manual_seed(0))
    logits = (-1.3 * (order + 1.0).log()).expand(1, 1, -1).bfloat16()
    config = kernels.choose("row_sample", 1, 151936, DEVICE)
    with counted() as counts:
        processed_sample(logits, config=config, **filters, **noise_arguments(1))
    assert counts.launches == 2
    assert counts.read + counts.written <= sweeps * logits.numel() * 2


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"top_k": 0}, "`top_k` is 0"),
        ({"top_p": 1.5}, "`top_p` is 1.5"),
        ({"min_p": -0.1}, "`min_p` is -0.1"),
        ({"keys": None}, "`keys` is None"),
    ],
)
def test_what_is_no_filter_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        processed_sample(torch.zeros(2, 3, 5, device=DEVICE), **{**noise_arguments(2), **changed})
