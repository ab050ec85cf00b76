"""The kernels' noise is the package's: the same words, and numbers within two units in the last place."""

import pytest
import torch
from kernel_cases import DEVICE

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from hf_specdec._kernels import _rng, reference  # noqa: E402
from hf_specdec.verification import BONUS, DRAFT, TARGET, Noise  # noqa: E402
from hf_specdec.verification.noise import gumbel_from_words, threefry, uniform_from_words  # noqa: E402

ULP = 2.0**-23
AWKWARD_WORDS = [0, 1, 2, 2**23 - 1, 2**24, 2**24 + 1, 2**31 - 65, 2**31 - 64, 2**31 - 1, -(2**31), -2, -1]


@triton.jit
def words_kernel(key_ptr, counter_ptr, out_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    k0 = tl.load(key_ptr + 2 * i).to(tl.uint32, bitcast=True)
    k1 = tl.load(key_ptr + 2 * i + 1).to(tl.uint32, bitcast=True)
    c0 = tl.load(counter_ptr + 2 * i).to(tl.uint32, bitcast=True)
    c1 = tl.load(counter_ptr + 2 * i + 1).to(tl.uint32, bitcast=True)
    word0, word1 = _rng.threefry(k0, k1, c0, c1)
    tl.store(out_ptr + 2 * i, word0.to(tl.int32, bitcast=True))
    tl.store(out_ptr + 2 * i + 1, word1.to(tl.int32, bitcast=True))


@triton.jit
def numbers_kernel(words_ptr, uniform_ptr, gumbel_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    word = tl.load(words_ptr + i).to(tl.uint32, bitcast=True)
    tl.store(uniform_ptr + i, _rng.uniform_from_word(word))
    tl.store(gumbel_ptr + i, _rng.gumbel_from_word(word))


@triton.jit
def gumbel_kernel(keys_ptr, out_ptr, stream, counter, first_pair, PAIRS: tl.constexpr):
    k0, k1 = _rng.row_key(keys_ptr, 0)
    even, odd = _rng.gumbel_pairs(k0, k1, stream, counter, first_pair, PAIRS)
    i = tl.arange(0, PAIRS)
    tl.store(out_ptr + 2 * i, even)
    tl.store(out_ptr + 2 * i + 1, odd)


def random_words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
    words.view(-1)[: len(AWKWARD_WORDS)] = torch.tensor(AWKWARD_WORDS, dtype=torch.int32)
    return words.to(DEVICE)


def numbers(words: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uniforms and Gumbel values of a kernel."""
    uniform = torch.empty(words.shape, dtype=torch.float32, device=DEVICE)
    gumbel = torch.empty_like(uniform)
    numbers_kernel[(1,)](words, uniform, gumbel, len(words))
    return uniform, gumbel


def test_the_words_are_the_packages_bit_for_bit():
    keys, counters = random_words(4096, 2, seed=1), random_words(4096, 2, seed=2)
    found = torch.empty_like(keys)
    words_kernel[(1,)](keys, counters, found, 4096)
    assert torch.equal(found, torch.stack(threefry(tuple(keys.T), tuple(counters.T)), dim=1))
    unsigned_keys, unsigned_counters = keys.long() & 0xFFFFFFFF, counters.long() & 0xFFFFFFFF
    by_definition = torch.stack(reference.threefry(tuple(unsigned_keys.T), tuple(unsigned_counters.T)), dim=1)
    assert torch.equal(found.long() & 0xFFFFFFFF, by_definition)


def test_uniforms_are_the_packages_bit_for_bit_and_inside_the_open_interval():
    words = random_words(8192)
    uniform, gumbel = numbers(words)
    assert torch.equal(uniform, uniform_from_words(words))
    assert bool(((uniform > 0.0) & (uniform < 1.0) & gumbel.isfinite()).all())


@pytest.mark.parametrize("what", ["random", "winning tail", "losing tail"])
def test_gumbel_values_are_within_two_units_in_the_last_place(what):
    words = random_words(8192)
    if what == "winning tail":  # u -> 0: each word must stand for its own number
        words = torch.arange(8192, dtype=torch.int32, device=DEVICE)
    elif what == "losing tail":
        words = 2**31 - 1 - torch.arange(8192, dtype=torch.int32, device=DEVICE)
    _, found = numbers(words)
    exact = -torch.log(-torch.log1p(-uniform_from_words(words).double()))
    scale = exact.abs().clamp_min(1.0).log2().floor().exp2()  # a unit of the value's binade, and of 1 around 0
    assert float(((found - exact).abs() / scale).max()) <= 2.0 * ULP
    assert float(((found - gumbel_from_words(words)).abs() / scale).max()) <= 2.0 * ULP
    if what == "winning tail":
        assert len(found.unique()) == len(words)


@pytest.mark.parametrize("stream", [TARGET, DRAFT, BONUS])
@pytest.mark.parametrize("counter", [0, 77, 5 << 10 | 3, -1])
def test_the_noise_of_a_row_is_the_packages(stream, counter):
    noise = Noise.from_seed(0x123456789ABCDEF0, 1, DEVICE)
    expected = noise.gumbel(stream, torch.tensor([[counter]], dtype=torch.int32, device=DEVICE), 4096)[0, 0]
    for first_pair in (0, 1024):
        found = torch.empty(2048, device=DEVICE)
        gumbel_kernel[(1,)](noise.keys, found, stream, counter, first_pair, 1024)
        assert float((found - expected[2 * first_pair :][:2048]).abs().max()) <= 8.0 * ULP * 2.0


def avalanche(change: tuple[int, int]) -> torch.Tensor:
    """[64] how often each output bit flips when one input bit does; `change` names the word of (key, counter)."""
    words = random_words(4, 4096, seed=9)
    flips = []
    for bit in range(32):
        changed = words.clone()
        changed[change[0] * 2 + change[1]] ^= torch.tensor(1 << bit if bit < 31 else -(2**31), dtype=torch.int32)
        before, after = (torch.stack(threefry((w[0], w[1]), (w[2], w[3]))) for w in (words, changed))
        difference = (before ^ after).long() & 0xFFFFFFFF
        flips.append(torch.stack([(difference >> i & 1).double().mean(dim=1) for i in range(32)]))
    return torch.stack(flips)


@pytest.mark.parametrize("change", [(0, 0), (0, 1), (1, 0), (1, 1)], ids=["key 0", "key 1", "token", "position"])
def test_every_input_bit_flips_every_output_bit_half_of_the_time(change):
    # Of 4096 pairs: five standard deviations are 0.04, and 8192 means are looked at.
    assert float((avalanche(change) - 0.5).abs().max()) < 0.045
