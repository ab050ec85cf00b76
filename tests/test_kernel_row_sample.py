"""`row_sample` against its fp64 reference, its law, and the bugs that others have shipped."""

import math

import pytest
import torch
from kernel_cases import (
    BATCH_SIZES,
    DEVICE,
    DRAFT_LENGTHS,
    VOCAB_SIZES,
    config_for,
    counted,
    interpreted,
    noise_arguments,
    pairwise,
    quietly,
    random_logits,
)
from laws import chi_square_p_value

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from hf_specdec import _kernels as kernels  # noqa: E402
from hf_specdec._kernels import Config, _row_sample, reference, row_sample  # noqa: E402
from hf_specdec.verification import BONUS, DRAFT, RESIDUAL, TARGET, Noise  # noqa: E402


@triton.jit
def invert_kernel(mass_ptr, uniform, out_ptr, SIZE: tl.constexpr):
    tl.store(out_ptr, _row_sample.invert(tl.load(mass_ptr + tl.arange(0, SIZE)), uniform, SIZE))


pytestmark = quietly

DTYPES = (torch.float32, torch.bfloat16)
SURELY_WRONG = 1e-6
INVERSE_TEMPERATURE = 1.0 / 0.7


def check(logits: torch.Tensor, method: str, **options) -> None:
    """The kernel's tokens, log-sum-exps and statuses are the reference's up to fp32 rounding."""
    batch_size, num_rows, vocab_size = logits.shape
    config = options.pop("config", None) or config_for(vocab_size)
    config = config or kernels.choose("row_sample", batch_size * num_rows, vocab_size, logits.device)
    if method == "inverse_cdf":  # the interpreter's numpy adds a block's masses one by one: 7e-5 off at 65536 of them
        config = config._replace(block=min(config.block, 8192))
    found = row_sample(logits, method, with_lse=True, config=config, **options)
    for b in range(len(logits)):  # row by row: fp64 noise of a batch takes gigabytes
        own = {name: value[b : b + 1] if isinstance(value, torch.Tensor) else value for name, value in options.items()}
        row, token = logits[b : b + 1], found.token[b]
        expected = reference.row_sample(row, method, block=config.block, **own)
        assert torch.equal(found.status[b], expected.status[0])
        assert torch.equal(token < 0, expected.token[0] < 0)
        assert torch.allclose(found.lse[b].double(), expected.lse[0], rtol=1e-6, atol=2e-6, equal_nan=True)
        # Another token than the reference's is right only where it is as good up to rounding.
        drawn = token >= 0
        loss = expected.losses[0].gather(-1, token.clamp_min(0)[:, None])[:, 0][drawn]
        assert bool((loss <= 2e-5).all())
        assert float((token == expected.token[0]).double().mean()) >= 0.8  # where two are as good


@pytest.mark.parametrize(
    ("vocab_size", "batch_size", "num_drafted", "method", "dtype"),
    pairwise(VOCAB_SIZES, BATCH_SIZES[:2], DRAFT_LENGTHS, kernels.METHODS, DTYPES),
)
def test_the_kernel_gives_what_the_reference_gives(vocab_size, batch_size, num_drafted, method, dtype):
    logits = random_logits(batch_size, num_drafted + 1, vocab_size, dtype=dtype, seed=vocab_size + num_drafted)
    check(logits, method, inv_temperature=INVERSE_TEMPERATURE, **noise_arguments(batch_size))


@pytest.mark.grid
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("batch_size", BATCH_SIZES)
@pytest.mark.parametrize("num_drafted", DRAFT_LENGTHS)
def test_the_kernel_gives_what_the_reference_gives_at_every_size(vocab_size, batch_size, num_drafted):
    for method, dtype in zip(kernels.METHODS, (*DTYPES, DTYPES[0]), strict=True):
        logits = random_logits(batch_size, num_drafted + 1, vocab_size, dtype=dtype, seed=vocab_size + num_drafted)
        check(logits, method, inv_temperature=INVERSE_TEMPERATURE, **noise_arguments(batch_size))


@pytest.mark.parametrize("method", kernels.METHODS)
def test_slots_name_the_positions_of_a_trees_nodes(method):
    logits = random_logits(2, 4, 300, dtype=torch.float32)
    slots = torch.tensor([[0, 1, 1, 2], [0, 1, 2, 2]], dtype=torch.int32, device=DEVICE)
    check(logits, method, slots=slots, stream=RESIDUAL, **noise_arguments(2))


def test_tokens_are_those_of_the_packages_noise():
    logits = random_logits(3, 5, 8193, dtype=torch.float32)
    noise = Noise.from_seed(7, 3, DEVICE)
    counters = torch.tensor([0, 9, 400], dtype=torch.int32, device=DEVICE)
    for stream in (TARGET, DRAFT, BONUS):
        by_slot = counters[:, None] + torch.arange(5, dtype=torch.int32, device=DEVICE)
        perturbed = logits + noise.gumbel(stream, by_slot, 8193)
        top = perturbed.topk(2, dim=-1)
        clear = top.values[..., 0] - top.values[..., 1] > 2e-5
        found = row_sample(logits, "gumbel", keys=noise.keys, counters=counters, stream=stream)
        assert bool(clear.float().mean() > 0.9)
        assert torch.equal(found.token[clear], top.indices[..., 0][clear])


# The law


@interpreted
def test_the_inverse_cdf_has_exactly_the_softmaxs_law(monkeypatch):
    # Uniforms on a grid of midpoints, and probabilities that are multiples of its step: the counts are exact.
    steps = 16

    @triton.jit
    def uniforms_of_the_grid(k0, k1, stream, counter):
        return ((counter // 16).to(tl.float32) + 0.5) / 16, ((counter % 16).to(tl.float32) + 0.5) / 16

    monkeypatch.setattr(_row_sample, "uniform_pair", uniforms_of_the_grid)
    blocks = [[3 / 16, 0.0, 8 / 16, 5 / 16], [0.0, 0.0, 0.0, 0.0], [1 / 16, 15 / 16, 0.0]]
    masses = [12 / 16, 0.0, 4 / 16]
    law = torch.tensor([mass * p for mass, block in zip(masses, blocks, strict=True) for p in block], device=DEVICE)
    rows = steps * steps
    counters = torch.arange(rows, dtype=torch.int32, device=DEVICE)
    keys = torch.zeros(rows, 2, dtype=torch.int32, device=DEVICE)
    logits = law.log().expand(rows, 1, len(law))
    found = row_sample(logits, "inverse_cdf", keys=keys, counters=counters, config=Config(4, 1))
    assert found.token.flatten().bincount(minlength=len(law)).tolist() == (law * rows).round().int().tolist()


def draws(logits: torch.Tensor, method: str, rows: int, slots: int) -> torch.Tensor:
    """[rows * slots] independent draws from softmax(logits)."""
    noise = noise_arguments(rows, seed=3)
    return row_sample(logits.expand(rows, slots, -1), method, config=Config(16, 1), **noise).token.flatten()


@pytest.mark.parametrize("method", ["gumbel", "inverse_cdf"])
def test_draws_follow_softmax(method):
    logits = torch.tensor([1.0, -0.5, 0.3, -math.inf, 2.0], device=DEVICE)
    tokens = draws(logits, method, 8, 40).cpu()
    assert chi_square_p_value(tokens, logits.softmax(dim=-1).cpu()) > SURELY_WRONG
    assert chi_square_p_value(tokens, (0.3 * logits).softmax(dim=-1).cpu()) < SURELY_WRONG


@pytest.mark.slow
@pytest.mark.parametrize("method", ["gumbel", "inverse_cdf"])
def test_draws_over_sixty_tokens_in_four_blocks_follow_softmax(method):
    logits = random_logits(60, dtype=torch.float32, spread=1.5)
    tokens = draws(logits, method, 40, 100).cpu()
    assert chi_square_p_value(tokens, logits.softmax(dim=-1).cpu()) > SURELY_WRONG
    assert chi_square_p_value(tokens, (0.8 * logits).softmax(dim=-1).cpu()) < SURELY_WRONG


@pytest.mark.parametrize("method", ["gumbel", "inverse_cdf"])
def test_two_seeds_differ_and_one_seed_does_not(method):
    # SGLang verified greedily on ROCm whatever the temperature (sgl-project/sglang#37134).
    logits = random_logits(1, 30, 500, dtype=torch.float32, spread=1.0)
    first, again, other = (
        row_sample(logits, method, **noise_arguments(1, seed), config=Config(512, 4)).token for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert int((first != other).sum()) > 20


def test_a_rows_token_does_not_depend_on_the_batch_around_it():
    # Ranks of tensor parallelism must agree (vllm-project/vllm#17498, ROCm/aiter#2035).
    logits, noise = random_logits(4, 3, 900, dtype=torch.float32), noise_arguments(4)
    for method in kernels.METHODS:
        together = row_sample(logits, method, **noise).token
        for b in range(4):
            alone = row_sample(logits[b : b + 1], method, **{n: t[b : b + 1] for n, t in noise.items()})
            assert torch.equal(alone.token[0], together[b])


# Broken rows, ties, tails


@pytest.mark.parametrize("method", kernels.METHODS)
@pytest.mark.parametrize("where", [0, 7, 8, 15, 16, 18])
def test_a_broken_row_gets_a_status_and_no_token(method, where):
    # vllm-project/vllm#53029: NaN logits gave the silent token BLOCK - 1. Blocks of 8 over 19 tokens.
    logits = torch.zeros(6, 1, 19)
    logits[0], logits[1, 0, where], logits[2] = math.nan, math.nan, -math.inf
    logits[3, 0, where], logits[4] = math.inf, -math.inf
    logits[4, 0, where] = -5.0
    found = row_sample(logits.to(DEVICE), method, with_lse=True, config=Config(8, 1), **noise_arguments(6))
    infinite = kernels.OK if method == "greedy" else kernels.INFINITE
    expected = [kernels.HAS_NAN, kernels.HAS_NAN, kernels.NOTHING, infinite, kernels.OK, kernels.OK]
    assert found.status.flatten().tolist() == expected
    tokens = found.token.flatten().tolist()
    assert [token for token, status in zip(tokens, expected, strict=True) if status != kernels.OK] == [-1] * sum(
        status != kernels.OK for status in expected
    )
    assert tokens[4] == where
    assert tokens[3] == (where if method == "greedy" else -1)
    assert found.lse.flatten()[:2].isnan().all()
    assert found.lse.flatten()[2:].tolist() == pytest.approx([-math.inf, math.inf, -5.0, math.log(19.0)])


@pytest.mark.parametrize("vocab_size", [8193, 10000])
@pytest.mark.parametrize("method", kernels.METHODS)
def test_nothing_past_the_vocabulary_is_ever_chosen(method, vocab_size):
    # GHSA-8wr5-jm2h-8r4f (vllm-project/vllm#44744): masked positions of the last tile won. The mass is in tile 0, and
    # what lies behind the row in memory is larger than everything in it.
    padded = torch.full((20, 2, vocab_size + 50), 1e4, device=DEVICE)
    padded[..., :vocab_size] = -math.inf
    padded[..., :3] = torch.tensor([0.0, -200.0, -math.inf])
    found = row_sample(padded[..., :vocab_size], method, config=Config(2048, 4), **noise_arguments(20))
    assert bool((found.token == 0).all())


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("method", kernels.METHODS)
def test_strides_and_offsets_are_honoured(method, dtype):
    # vllm-project/vllm#42684: a kernel took the vocabulary's size for the stride.
    padded = random_logits(5, 4, 701, dtype=dtype)
    view = padded[1:4, ::2, 3:640]
    check(view, method, config=Config(128, 1), **noise_arguments(3))
    whole = row_sample(view.contiguous(), method, config=Config(128, 1), **noise_arguments(3))
    assert torch.equal(row_sample(view, method, config=Config(128, 1), **noise_arguments(3)).token, whole.token)


def test_the_lowest_token_wins_ties():
    logits = random_logits(2, 3, 500, dtype=torch.bfloat16, spread=0.05).round(decimals=1)  # ties everywhere
    assert torch.equal(row_sample(logits, "greedy", config=Config(64, 1)).token, logits.float().argmax(dim=-1))
    for tied in ([3, 70, 200], [64, 65], [66, 65, 499], [0, 499], range(500)):
        row = torch.full((1, 1, 500), -math.inf, device=DEVICE)
        row[..., list(tied)] = math.inf if len(tied) == 2 else 1.0
        assert int(row_sample(row, "greedy", config=Config(64, 1)).token) == min(tied)


@interpreted
def test_the_lowest_token_wins_ties_of_noise(monkeypatch):
    @triton.jit
    def no_noise(k0, k1, stream, counter, first_pair, PAIRS: tl.constexpr):
        return tl.zeros([PAIRS], tl.float32), tl.zeros([PAIRS], tl.float32)

    monkeypatch.setattr(_row_sample, "gumbel_pairs", no_noise)
    for tied in ([3, 70, 200], [64, 65], [66, 65, 499], range(500)):
        row = torch.full((1, 1, 500), -math.inf)
        row[..., list(tied)] = 1.0
        assert int(row_sample(row, "gumbel", config=Config(64, 1), **noise_arguments(1)).token) == min(tied)


@pytest.mark.parametrize("uniform", [0.0, 2.0**-32, 0.5, 1.0 - 2.0**-24, 1.0])
def test_a_token_without_probability_is_never_drawn(uniform):
    # sgl-project/sglang#35771: a coin of zero accepted what has no probability; here both ends of the interval.
    out = torch.empty(1, dtype=torch.int32, device=DEVICE)
    for positive in ([5], [1, 6], [3, 4]):
        mass = torch.zeros(8, device=DEVICE)
        mass[positive] = 0.1
        invert_kernel[(1,)](mass, uniform, out, 8)
        assert int(out) in positive


@pytest.mark.parametrize(("size", "error"), [(8192, 2e-6), (131072, 5e-5)])
def test_running_sums_hold_over_many_elements(size, error):
    # ROCm/aiter#2035: a wrong block prefix sum. (numpy, which interprets, sums one by one and loses more than a GPU.)
    mass = random_logits(size, dtype=torch.float32).abs()
    exact = mass.double().cumsum(dim=0)
    out = torch.empty(1, dtype=torch.int32, device=DEVICE)
    for uniform in (0.001, 0.37, 0.5, 0.9999):
        invert_kernel[(1,)](mass, uniform, out, size)
        before, after = (float(exact[int(out) - i] / exact[-1]) for i in (1, 0))
        assert before - error <= uniform <= after + error


# Cost


@interpreted
@pytest.mark.parametrize("method", kernels.METHODS)
@pytest.mark.parametrize("vocab_size", [32000, 151936])
@pytest.mark.parametrize("with_lse", [False, True])
def test_bytes_are_within_a_tenth_of_the_logits_and_launches_are_two(method, vocab_size, with_lse):
    logits = random_logits(1, 2, vocab_size, dtype=torch.bfloat16)
    config = kernels.choose("row_sample", 2, vocab_size, DEVICE)
    with counted() as counts:
        row_sample(logits, method, with_lse=with_lse, config=config, **noise_arguments(1))
    assert counts.launches == 2
    again = 2 * 2 * config.block if method == "inverse_cdf" else 0  # the drawn block is read twice
    assert logits.numel() * 2 <= counts.read + counts.written <= 1.1 * (logits.numel() * 2 + again)


# Refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "beam"}, "`method` is 'beam'"),
        ({"logits": torch.zeros(2, 5)}, r"`logits` has shape \(2, 5\)"),
        ({"logits": torch.zeros(2, 3, 5, dtype=torch.float64)}, "float64; give float32"),
        ({"logits": torch.zeros(2, 5, 3).mT}, "stride 3 along the vocabulary"),
        ({"inv_temperature": 0.0}, "`inv_temperature` is 0.0"),
        ({"inv_temperature": math.nan}, "`inv_temperature` is nan"),
        ({"keys": None}, "`keys` is None"),
        ({"keys": torch.zeros(3, 2, dtype=torch.int32)}, r"`keys` is torch.int32 \[3, 2\]; give int32 \[2, 2\]"),
        ({"counters": torch.zeros(2)}, r"`counters` is torch.float32 \[2\]"),
        ({"slots": torch.zeros(2, 4, dtype=torch.int32)}, r"give int32 \[2, 3\]"),
        ({"stream": 64}, "`stream` is 64"),
    ],
)
def test_what_no_kernel_serves_is_refused(changed, message):
    arguments = {"logits": torch.zeros(2, 3, 5), "method": "gumbel", **noise_arguments(2), **changed}
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        row_sample(**arguments)


def test_no_rows_give_no_tokens():
    for shape in ((0, 3, 7), (2, 0, 7)):
        found = row_sample(torch.zeros(shape, device=DEVICE), "greedy", with_lse=True)
        assert found.token.shape == found.lse.shape == found.status.shape == shape[:2]
