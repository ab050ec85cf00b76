"""The random numbers of a call: counter-based, keyed, in two regimes that never mix.

* The target stream is keyed by (seed, row, absolute position without padding, token id). Plain decoding, `match` and
  `coupled` read it, and `coupled` drafts read the same values. It is a fixed function, so re-reading it is harmless:
  a token drafted again after a rejection meets the same noise, as it must for the text not to depend on the drafter.
* The draft, accept, residual and bonus streams of `rejection` and `block` are keyed by (seed, row, verification
  number, slot). Keyed by position they would be biased: a token drafted again after a rejection would reuse noise that
  the rejection has already looked at.

Generator: Threefry-2x32 with 13 rounds, the smallest number that passes BigCrush (Salmon, Moraes, Dror, Shaw 2011,
"Parallel random numbers: as easy as 1, 2, 3", table 2). It needs 32-bit additions, rotations and exclusive-ors only,
which run at full rate on GPUs, and one call serves two token ids.

    key = the row's 64-bit key         counter 0 = stream (6 bits) | token id >> 1 (26 bits)
    word = token id & 1                counter 1 = position, or verification number (22 bits) | slot (10 bits)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

TARGET, DRAFT, ACCEPT, RESIDUAL, BONUS = range(5)
STREAM_SHIFT = 26
SLOT_BITS = 10

_ROUNDS = 13
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
_PARITY = 0x1BD11BDA
_ROW_KEY_TAG = -1  # counter 1 of a row key: no position and no verification reaches it
_LARGEST_BELOW_ONE = 1.0 - 2.0**-24


def _int32(value: int) -> int:
    """The 32-bit two's complement reading of an unsigned word."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def threefry(key: tuple, counter: tuple, rounds: int = _ROUNDS) -> tuple[torch.Tensor, torch.Tensor]:
    """Two 32-bit words for each (key, counter); all four arguments are int32 tensors that broadcast."""
    k0, k1 = key
    keys = (k0, k1, k0 ^ k1 ^ _PARITY)
    x0, x1 = torch.broadcast_tensors(counter[0] + k0, counter[1] + k1)
    x0, x1 = x0.clone(), x1.clone()
    for i in range(rounds):
        rotation = _ROTATIONS[i % 8]
        x0 += x1
        high = x1 << rotation
        x1 >>= 32 - rotation
        x1 &= (1 << rotation) - 1  # int32 shifts right arithmetically
        x1 |= high
        x1 ^= x0
        if i % 4 == 3:
            injection = i // 4 + 1
            x0 += keys[injection % 3]
            x1 += keys[(injection + 1) % 3] + injection
    return x0, x1


def uniform_from_words(words: torch.Tensor) -> torch.Tensor:
    """fp32 uniforms in the open interval (0, 1) with a resolution of 2^-31 near 0."""
    return ((words & 0x7FFFFFFF).float() * 2.0**-31 + 2.0**-32).clamp_max_(_LARGEST_BELOW_ONE)


def gumbel_from_words(words: torch.Tensor) -> torch.Tensor:
    """fp32 standard Gumbel values, -2.8 .. 22.2.

    Written as -log(-log1p(-u)): the winning tail then sits at u -> 0, where fp32 has resolution. In the usual form
    -log(-log(u)) it sits at u -> 1 and tokens below 1e-7 are mis-sampled.
    """
    return uniform_from_words(words).neg_().log1p_().neg_().log_().neg_()


@dataclass(frozen=True)
class Noise:
    """The noise of one generate call.

    Args:
        keys: [B, 2] int32, one 64-bit key a row.
    """

    keys: torch.Tensor

    @staticmethod
    def from_seed(seed: int | Sequence[int], batch_size: int, device: torch.device) -> Noise:
        """Row 0 takes the seed itself and row r a hash of (seed, r); a list gives one seed a row."""
        if isinstance(seed, int):
            words = torch.tensor([[_int32(seed), _int32(seed >> 32)]], dtype=torch.int32)
            rows = torch.arange(batch_size, dtype=torch.int32)
            tag = torch.full_like(rows, _ROW_KEY_TAG)
            keys = torch.stack(threefry((words[:, 0], words[:, 1]), (rows, tag)), dim=1)
            keys[:1] = words
        else:
            if len(seed) != batch_size:
                raise ValueError(
                    f"`seed` lists {len(seed)} seeds for {batch_size} rows; give one seed a row, or one integer."
                )
            keys = torch.tensor([[_int32(s), _int32(s >> 32)] for s in seed], dtype=torch.int32)
        return Noise(keys.to(device))

    def gumbel(self, stream: int | torch.Tensor, counters: torch.Tensor, vocab_size: int) -> torch.Tensor:
        """[B, m, V] Gumbel values for every token id.

        Args:
            stream: one stream, or [B, m] streams.
            counters: [B, m] int32 counter words (a position, or a packed verification number and slot).
        """
        pairs = torch.arange((vocab_size + 1) // 2, dtype=torch.int32, device=counters.device)
        first = self._stream_word(stream, counters)[..., None] | pairs
        words = threefry((self.keys[:, 0, None, None], self.keys[:, 1, None, None]), (first, counters[..., None]))
        return gumbel_from_words(torch.stack(words, dim=-1).flatten(-2)[..., :vocab_size])

    def gumbel_at(self, stream: int | torch.Tensor, counters: torch.Tensor, where: tuple) -> torch.Tensor:
        """The entries of `gumbel` at the index tensors (row, slot, token), each [N]; the same values, bit for bit."""
        row, slot, token = where
        token = token.to(torch.int32)
        first = self._stream_word(stream, counters)[row, slot] | (token >> 1)
        words = threefry((self.keys[row, 0], self.keys[row, 1]), (first, counters[row, slot]))
        return gumbel_from_words(torch.where(token & 1 == 0, words[0], words[1]))

    def uniform(self, stream: int, counters: torch.Tensor) -> torch.Tensor:
        """[B, m] uniforms in (0, 1)."""
        first = self._stream_word(stream, counters)
        words = threefry((self.keys[:, 0, None], self.keys[:, 1, None]), (first, counters))
        return uniform_from_words(words[0])

    @staticmethod
    def _stream_word(stream: int | torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
        if isinstance(stream, int):
            return torch.full_like(counters, stream << STREAM_SHIFT)
        return (stream.to(torch.int32) << STREAM_SHIFT).expand_as(counters)


@dataclass(frozen=True)
class RoundNoise:
    """The noise of one round (a draft and its verification).

    Args:
        noise: the call's noise.
        positions: [B] the absolute position, without padding, of the first token that the round emits.
        verification: the number of the round, from 0.
    """

    noise: Noise
    positions: torch.Tensor
    verification: int

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        """[B, m] one draw from softmax(scores) for each entry, by the Gumbel-max trick; the lowest id wins ties.

        Args:
            stream: TARGET, DRAFT, RESIDUAL or BONUS; [B, m] where entries differ.
            scores: [B, m, V] log-weights; -inf is never drawn.
            slots: the slot of the first entry, or [m] or [B, m] slots.
        """
        counters = self._counters(stream, slots, scores)
        if scores.device.type == "cpu" and scores.shape[-1] > 1024:
            # Filters such as top-k leave few tokens alive; the others need no noise. (On a GPU counting them would
            # stop the host.)
            alive = scores > -torch.inf
            if int(alive.count_nonzero()) * 8 < scores.numel() and not bool(scores.isnan().any()):
                where = alive.nonzero(as_tuple=True)
                values = scores[where] + self.noise.gumbel_at(stream, counters, where)
                perturbed = values.new_full(scores.shape, -torch.inf)
                perturbed[where] = values
                return perturbed.argmax(dim=-1)
        return (scores + self.noise.gumbel(stream, counters, scores.shape[-1])).argmax(dim=-1)

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        """[B, n] coins that come up True with probability min(1, p / q).

        Strictly u q < p: never divides, and p = 0 is never accepted (with `<=` a zero coin would accept it).
        """
        counters = self._counters(ACCEPT, 0, p)
        return self.noise.uniform(ACCEPT, counters) * q < p

    def _counters(self, stream: int | torch.Tensor, slots: int | torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        if isinstance(slots, int):
            slots = torch.arange(slots, slots + like.shape[1], device=like.device)
        slots = slots.to(torch.int32).expand(like.shape[:2])
        if isinstance(stream, int) and stream == TARGET:
            return self.positions.to(torch.int32)[:, None] + slots
        return slots | (self.verification << SLOT_BITS)
