"""The generator against known answers, its streams apart from each other, and draws that follow softmax(scores)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws import chi_square_p_value
from scipy import stats

from hf_specdec.verification import BONUS, DRAFT, RESIDUAL, TARGET, Noise, RoundNoise
from hf_specdec.verification import noise as noise_module
from hf_specdec.verification.noise import ACCEPT, gumbel_from_words, threefry, uniform_from_words

CPU = torch.device("cpu")
EULER = 0.5772156649015329
SURELY_WRONG = 1e-6
"""A p-value below which independence or a law is rejected; all seeds are fixed."""

words32 = st.integers(0, 2**32 - 1)
seeds = st.integers(-(2**63), 2**64 - 1)


def signed(word: int) -> int:
    return word - 2**32 if word >= 2**31 else word


def word_tensor(*words: int) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor([signed(word)], dtype=torch.int32) for word in words)


def round_noise(seed: int | list[int], positions: list[int], verification: int = 0) -> RoundNoise:
    return RoundNoise(Noise.from_seed(seed, len(positions), CPU), torch.tensor(positions), verification)


# Threefry-2x32


def threefry_in_integers(key: tuple[int, int], counter: tuple[int, int], rounds: int) -> tuple[int, int]:
    """Salmon et al. 2011, section 4.2, in unbounded integers."""
    mask = 0xFFFFFFFF
    keys = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x0, x1 = (counter[0] + keys[0]) & mask, (counter[1] + keys[1]) & mask
    for i in range(rounds):
        x0 = (x0 + x1) & mask
        rotation = (13, 15, 26, 6, 17, 29, 16, 24)[i % 8]
        x1 = ((x1 << rotation | x1 >> 32 - rotation) & mask) ^ x0
        if (i + 1) % 4 == 0:
            s = (i + 1) // 4
            x0, x1 = (x0 + keys[s % 3]) & mask, (x1 + keys[(s + 1) % 3] + s) & mask
    return x0, x1


@pytest.mark.parametrize(
    ("rounds", "key", "counter", "words"),
    [
        (13, (0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        (13, (0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        (13, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xBA3E4725, 0xF27D669E)),
        (20, (0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        (20, (0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0x1CB996FC, 0xBB002BE7)),
        (20, (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers(rounds, key, counter, words):
    found = threefry(word_tensor(*key), word_tensor(*counter), rounds)
    assert [int(word) & 0xFFFFFFFF for word in found] == list(words)
    assert threefry_in_integers(key, counter, rounds) == words


@settings(deadline=None)
@given(st.tuples(words32, words32), st.tuples(words32, words32), st.integers(1, 20))
def test_threefry_equals_its_definition_in_integers(key, counter, rounds):
    found = threefry(word_tensor(*key), word_tensor(*counter), rounds)
    assert tuple(int(word) & 0xFFFFFFFF for word in found) == threefry_in_integers(key, counter, rounds)


def test_the_noise_is_threefry_with_thirteen_rounds_of_the_documented_counters():
    seed, position, verification = 0x123456789ABCDEF0, 77, 5
    key = (seed & 0xFFFFFFFF, seed >> 32)
    noise = round_noise(seed, [position], verification)
    counters = torch.tensor([[position]], dtype=torch.int32)
    for stream in (TARGET, DRAFT, RESIDUAL, BONUS):
        values = noise.noise.gumbel(stream, counters, 6)[0, 0]
        for token in range(6):
            words = threefry_in_integers(key, (stream << 26 | token >> 1, position), 13)
            assert values[token] == gumbel_from_words(torch.tensor([signed(words[token & 1])], dtype=torch.int32))
    slot = torch.tensor([[3]], dtype=torch.int32)
    packed = noise._counters(DRAFT, slot, torch.empty(1, 1))
    assert int(packed) == verification << 10 | 3
    assert int(noise._counters(TARGET, slot, torch.empty(1, 1))) == position + 3


# From words to numbers

AWKWARD_WORDS = [0, 1, 2, 2**23 - 1, 2**24, 2**24 + 1, 2**31 - 65, 2**31 - 64, 2**31 - 1, 2**31, 2**32 - 2, 2**32 - 1]


def test_extreme_words_give_numbers_inside_the_open_interval():
    words = torch.tensor([signed(word) for word in AWKWARD_WORDS], dtype=torch.int32)
    u = uniform_from_words(words)
    assert u.dtype == torch.float32
    assert bool(((u > 0.0) & (u < 1.0)).all())
    g = gumbel_from_words(words)
    assert g.dtype == torch.float32
    assert bool(g.isfinite().all())
    assert g.min() == pytest.approx(-math.log(24 * math.log(2)), abs=1e-5)
    assert g.max() == pytest.approx(32 * math.log(2), abs=1e-5)


@settings(deadline=None)
@given(st.lists(words32, min_size=1, max_size=50))
def test_every_word_gives_a_number_inside_the_open_interval(words):
    words = torch.tensor([signed(word) for word in words], dtype=torch.int32)
    u = uniform_from_words(words)
    assert bool(((u > 0.0) & (u < 1.0)).all())
    assert bool(gumbel_from_words(words).isfinite().all())


def test_the_winning_tail_has_the_resolution_of_its_words():
    # A token of probability 1e-9 wins only through the largest Gumbel values: each must be right by itself.
    words = torch.arange(4096, dtype=torch.int32)
    exact = -torch.log(-torch.log1p(-(words.double() + 0.5) * 2.0**-31))
    assert float((gumbel_from_words(words).double() - exact).abs().max()) < 2e-6
    assert len(gumbel_from_words(words).unique()) == len(words)


def test_values_have_the_uniform_and_the_gumbel_law():
    noise = Noise.from_seed(5, 4, CPU)
    counters = torch.arange(100, dtype=torch.int32).expand(4, 100)
    g = noise.gumbel(TARGET, counters, 500).double().flatten()
    assert float(g.mean()) == pytest.approx(EULER, abs=5.0 * math.pi / math.sqrt(6.0 * len(g)))
    assert float(g.var()) == pytest.approx(math.pi**2 / 6.0, rel=0.02)
    assert stats.kstest(g.numpy(), "gumbel_r").pvalue > SURELY_WRONG
    u = noise.uniform(ACCEPT, torch.arange(50_000, dtype=torch.int32).expand(4, -1)).double().flatten()
    assert stats.kstest(u.numpy(), "uniform").pvalue > SURELY_WRONG
    bins = (u * 256).long()
    assert chi_square_p_value(bins, torch.full((256,), 1 / 256)) > SURELY_WRONG


def independent(a: torch.Tensor, b: torch.Tensor, num_bins: int = 16) -> bool:
    """Whether two Gumbel tensors look independent, by a chi-square of their joint ranks."""
    ranks = [((-(-x.double()).exp()).exp() * num_bins).long().clamp_max(num_bins - 1).flatten() for x in (a, b)]
    cells = num_bins**2
    return chi_square_p_value(ranks[0] * num_bins + ranks[1], torch.full((cells,), 1 / cells)) > SURELY_WRONG


def test_neighbours_in_every_direction_are_independent():
    noise = Noise.from_seed(11, 40, CPU)
    counters = torch.arange(50, dtype=torch.int32).expand(40, 50)
    g = noise.gumbel(TARGET, counters, 60)
    assert independent(g[..., 0::2], g[..., 1::2])  # the two words of one call
    assert independent(g[..., 1:-1:2], g[..., 2::2])  # neighbouring calls
    assert independent(g[:, :-1], g[:, 1:])  # positions
    assert independent(g[:-1], g[1:])  # rows
    assert independent(g[..., 1:], g[..., :-1].roll(1, dims=1))  # a token and position step at once
    for stream in (DRAFT, ACCEPT, RESIDUAL, BONUS):
        assert independent(g, noise.gumbel(stream, counters, 60))
    for other_seed in (10, 12, 11 + 2**32, -11):
        assert independent(g[0], Noise.from_seed(other_seed, 1, CPU).gumbel(TARGET, counters[:1], 60)[0])
    assert not independent(g, g)
    assert not independent(g, g.roll(1, dims=-1).maximum(g))


def test_slots_and_verifications_are_independent():
    slots, verifications = 8, 400
    scores = torch.zeros(20, slots, 4)
    choices = torch.stack(
        [round_noise(3, [0] * 20, number).choose(DRAFT, scores) for number in range(verifications)]
    )  # [verification, row, slot]
    pairs = [
        (choices[1:], choices[:-1]),
        (choices[..., 1:], choices[..., :-1]),
        (choices[:, 1:], choices[:, :-1]),
        (choices[1:, :, :-1], choices[:-1, :, 1:]),
    ]
    for a, b in pairs:
        assert chi_square_p_value((4 * a + b).flatten(), torch.full((16,), 1 / 16)) > SURELY_WRONG


# Keys


def test_row_zero_takes_the_seed_and_the_other_rows_their_own_key():
    keys = Noise.from_seed(42, 5000, CPU).keys
    assert keys[0].tolist() == [42, 0]
    assert len({tuple(key) for key in keys.tolist()}) == 5000
    for row in (1, 4999):
        words = threefry_in_integers((42, 0), (row, 0xFFFFFFFF), 13)
        assert keys[row].tolist() == [signed(word) for word in words]


def test_a_rows_key_does_not_depend_on_the_batch_size():
    assert bool((Noise.from_seed(42, 3, CPU).keys == Noise.from_seed(42, 7, CPU).keys[:3]).all())


@settings(deadline=None)
@given(seeds, seeds)
def test_all_64_bits_of_a_seed_count(a, b):
    keys = Noise.from_seed([a, b], 2, CPU).keys
    same = a % 2**64 == b % 2**64
    assert (keys[0].tolist() == keys[1].tolist()) == same
    assert keys[0].tolist() == Noise.from_seed(a, 1, CPU).keys[0].tolist()
    assert [word % 2**32 for word in keys[0].tolist()] == [a % 2**32, (a >> 32) % 2**32]


def test_a_list_gives_one_seed_a_row():
    listed = round_noise([3, -4, 2**40], [0, 0, 0])
    scores = torch.zeros(3, 1, 100)
    for row, seed in enumerate([3, -4, 2**40]):
        alone = round_noise(seed, [0]).choose(TARGET, scores[:1])
        assert listed.choose(TARGET, scores)[row].tolist() == alone[0].tolist()
    with pytest.raises(ValueError, match="lists 2 seeds for 3 rows"):
        Noise.from_seed([1, 2], 3, CPU)


# Streams


def test_no_two_draws_of_a_call_share_a_counter(monkeypatch):
    seen: list[tuple[str, set[tuple[int, ...]]]] = []

    def recording(key, counter, rounds=13):
        columns = [word.flatten().tolist() for word in torch.broadcast_tensors(*key, *counter)]
        seen.append((label, set(zip(*columns, strict=True))))
        return threefry(key, counter, rounds)

    monkeypatch.setattr(noise_module, "threefry", recording)
    label = "row keys"
    noise = Noise.from_seed(0, 3, CPU)
    scores = torch.zeros(3, 4, 101)
    for verification in range(3):
        this = RoundNoise(noise, torch.tensor([0, 1, 5]) + verification, verification)
        for label, draw in {  # noqa: B007 (read by `recording`)
            f"draft {verification}": lambda this=this: [this.choose(DRAFT, scores[:, :1], slot) for slot in range(4)],
            f"accept {verification}": lambda this=this: this.accepts(scores[..., 0], scores[..., 0]),
            f"residual {verification}": lambda this=this: this.choose(RESIDUAL, scores[:, :1]),
            f"bonus {verification}": lambda this=this: this.choose(BONUS, scores[:, :1]),
            "target": lambda this=this: this.choose(TARGET, scores),
        }.items():
            draw()
    for i, (name, counters) in enumerate(seen):
        for other_name, others in seen[:i]:
            if name != other_name or name != "target":  # the target stream alone is a fixed function of its position
                assert not counters & others, (name, other_name)


def test_the_stream_may_differ_by_row():
    noise = round_noise(1, [0, 0, 0], 4)
    scores = torch.zeros(3, 1, 50)
    streams = torch.tensor([[BONUS], [RESIDUAL], [BONUS]])
    mixed = noise.choose(streams, scores)
    for row, stream in enumerate(streams[:, 0].tolist()):
        assert mixed[row].tolist() == noise.choose(stream, scores)[row].tolist()


def test_the_target_stream_depends_on_the_position_only():
    scores = torch.zeros(1, 4, 1000)
    first = round_noise(9, [10], 0).choose(TARGET, scores)
    assert bool((round_noise(9, [10], 31).choose(TARGET, scores) == first).all())
    for step in range(4):
        alone = round_noise(9, [10 + step], 7 + step).choose(TARGET, scores[:, :1])
        assert alone.tolist() == first[:, step : step + 1].tolist()
    slots = torch.tensor([[2, 0, 3, 2]])
    assert round_noise(9, [10]).choose(TARGET, scores, slots).tolist() == first[:, slots[0]].tolist()


def test_the_other_streams_do_not_depend_on_the_position():
    scores = torch.zeros(1, 4, 1000)
    for stream in (DRAFT, RESIDUAL, BONUS):
        here, there = (round_noise(9, [position], 2).choose(stream, scores) for position in (0, 50))
        assert bool((here == there).all())
    p = torch.full((1, 64), 0.5)
    here, there = (round_noise(9, [position], 2).accepts(p, torch.ones_like(p)) for position in (0, 50))
    assert bool((here == there).all())


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 7, 100, 1001])
def test_noise_of_a_smaller_vocabulary_is_a_prefix(vocab_size):
    noise = Noise.from_seed(2, 2, CPU)
    counters = torch.tensor([[0, 5], [1, 9]], dtype=torch.int32)
    small = noise.gumbel(DRAFT, counters, vocab_size)
    assert small.shape == (2, 2, vocab_size)
    assert bool((small == noise.gumbel(DRAFT, counters, 1500)[..., :vocab_size]).all())


# Draws


def test_noise_at_chosen_tokens_equals_the_whole_rows_bit_for_bit():
    noise = Noise.from_seed(-5, 3, CPU)
    counters = torch.tensor([[0, 1], [7, 2], [3, 4]], dtype=torch.int32)
    whole = noise.gumbel(TARGET, counters, 3001)
    where = torch.ones_like(whole, dtype=torch.bool).nonzero(as_tuple=True)
    assert bool((noise.gumbel_at(TARGET, counters, where) == whole[where]).all())
    streams = torch.tensor([[DRAFT, BONUS]]).expand(3, 2)
    whole = noise.gumbel(streams, counters, 3001)
    assert bool((noise.gumbel_at(streams, counters, where) == whole[where]).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kept", [1, 5, 300])
def test_filtered_and_whole_rows_give_the_same_draws(dtype, kept):
    # Rows with few tokens left take a shorter way; nothing in the draw may show it.
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(8, 40, 3000, generator=generator)
    alive = torch.rand(scores.shape, generator=generator).topk(kept, dim=-1).indices
    scores = torch.full_like(scores, -torch.inf).scatter(-1, alive, scores.gather(-1, alive)).to(dtype)
    noise = round_noise(1, [0] * 8)
    for stream in (TARGET, DRAFT):
        counters = noise._counters(stream, 0, scores)
        whole = (scores + noise.noise.gumbel(stream, counters, 3000)).argmax(dim=-1)
        assert bool((noise.choose(stream, scores) == whole).all())


@pytest.mark.parametrize("stream", [TARGET, DRAFT])
def test_draws_over_five_tokens_follow_softmax(stream):
    scores = torch.tensor([1.0, -0.5, 0.3, -torch.inf, 2.0])
    choices = round_noise(6, [100] * 40, 3).choose(stream, scores.expand(40, 500, 5), 0)
    assert chi_square_p_value(choices.flatten(), scores.softmax(dim=-1)) > SURELY_WRONG
    wrong = scores.clone()
    wrong[0] += 0.1
    assert chi_square_p_value(choices.flatten(), wrong.softmax(dim=-1)) < SURELY_WRONG


@pytest.mark.parametrize("kept", [3000, 60], ids=["whole", "filtered"])
def test_draws_over_three_thousand_tokens_follow_softmax(kept):
    scores = 2.0 * torch.randn(3000, generator=torch.Generator().manual_seed(4))
    scores[scores.argsort()[:-kept]] = -torch.inf
    rounds = [round_noise(7, [50 * number] * 20, number) for number in range(8)]
    choices = torch.cat([noise.choose(TARGET, scores.expand(20, 50, 3000)).flatten() for noise in rounds])
    assert chi_square_p_value(choices, scores.softmax(dim=-1)) > SURELY_WRONG
    assert chi_square_p_value(choices, (0.8 * scores).softmax(dim=-1)) < SURELY_WRONG


@pytest.mark.parametrize("vocab_size", [6, 2000])
def test_the_lowest_id_wins_ties(monkeypatch, vocab_size):
    monkeypatch.setattr(noise_module, "gumbel_from_words", lambda words: torch.zeros(words.shape))
    scores = torch.full((1, 1, vocab_size), -torch.inf)
    scores[..., [2, 3, vocab_size - 1]] = 1.0
    assert int(round_noise(0, [0]).choose(TARGET, scores)) == 2
    assert int(round_noise(0, [0]).choose(TARGET, torch.zeros(1, 1, vocab_size))) == 0


@pytest.mark.parametrize("vocab_size", [5, 3000])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_a_draw_from_a_broken_row_points_at_what_is_broken(vocab_size, broken):
    scores = torch.full((1, 1, vocab_size), -torch.inf)
    scores[..., 1], scores[..., 3] = 0.0, broken
    assert int(round_noise(0, [0]).choose(TARGET, scores)) == 3


def test_coins_come_up_with_the_ratio():
    p, q = torch.tensor([0.05, 0.3, 0.6, 0.2, 0.0, 0.4, 0.0]), torch.tensor([0.5, 0.4, 0.6, 0.1, 0.5, 0.0, 0.0])
    heads = torch.tensor([0.1, 0.75, 1.0, 1.0, 0.0, 1.0, 0.0])
    num_rows = 20_000
    coins = round_noise(8, [0] * num_rows, 2).accepts(p.expand(num_rows, -1), q.expand(num_rows, -1)).double()
    deviation = (heads * (1.0 - heads) / num_rows).sqrt()
    assert bool(((coins.mean(dim=0) - heads).abs() <= 4.5 * deviation).all())


class AcceptsAtEquality(RoundNoise):
    """The coin with `<=`."""

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        return self.noise.uniform(ACCEPT, self._counters(ACCEPT, 0, p)) * q <= p


def test_a_coin_of_zero_never_accepts_a_token_without_weight(monkeypatch):
    p, q = torch.zeros(1, 3), torch.tensor([[0.5, 1.0, 0.0]])
    for u in (0.0, 2.0**-32):
        monkeypatch.setattr(noise_module, "uniform_from_words", lambda words, u=u: torch.full(words.shape, u))
        assert not bool(round_noise(0, [0]).accepts(p, q).any())
        assert bool(round_noise(0, [0]).accepts(q, torch.ones_like(q))[:, :2].all())
    monkeypatch.setattr(noise_module, "uniform_from_words", lambda words: torch.zeros(words.shape))
    loose = AcceptsAtEquality(Noise.from_seed(0, 1, CPU), torch.tensor([0]), 0)
    assert bool(loose.accepts(p, q).any())  # the control: `<=` does accept it


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_probabilities_are_always_accepted(monkeypatch, dtype):
    monkeypatch.setattr(noise_module, "uniform_from_words", lambda words: torch.full(words.shape, 1.0 - 2.0**-24))
    p = torch.rand(4, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert bool(round_noise(0, [0] * 4).accepts(p, p).all())


def test_nothing_is_drawn_for_no_slots():
    noise = round_noise(0, [0, 3])
    assert noise.choose(DRAFT, torch.zeros(2, 0, 7)).shape == (2, 0)
    assert noise.accepts(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)
