"""Counter-based noise in registers: Threefry-2x32 with 13 rounds, one call for two neighbouring tokens.

Salmon, Moraes, Dror, Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3"; 13 rounds are the smallest number that
passes BigCrush (table 2). It needs 32-bit additions, rotations and exclusive-ors only, all of which run at full rate on
AMD and NVIDIA; Philox needs high multiplications, which run at a quarter of it.

    key = the row's 64-bit key         counter 0 = stream (6 bits) | token >> 1 (26 bits)
    word = token & 1                   counter 1 = a position, or a verification number (22 bits) | slot (10 bits)
"""

import triton
import triton.language as tl

STREAM_SHIFT = tl.constexpr(26)


@triton.jit
def _four_rounds(x0, x1, R0: tl.constexpr, R1: tl.constexpr, R2: tl.constexpr, R3: tl.constexpr):
    x0 = x0 + x1
    x1 = ((x1 << R0) | (x1 >> (32 - R0))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << R1) | (x1 >> (32 - R1))) ^ x0
    x0 = x0 + x1
    x1 = ((x1 << R2) | (x1 >> (32 - R2))) ^ x0
    x0 = x0 + x1
    return x0, ((x1 << R3) | (x1 >> (32 - R3))) ^ x0


@triton.jit
def threefry(k0, k1, c0, c1):
    """Two 32-bit words for each (key, counter); all uint32, shapes broadcast."""
    k2 = k0 ^ k1 ^ 0x1BD11BDA
    x0, x1 = _four_rounds(c0 + k0, c1 + k1, 13, 15, 26, 6)
    x0, x1 = _four_rounds(x0 + k1, x1 + (k2 + 1), 17, 29, 16, 24)
    x0, x1 = _four_rounds(x0 + k2, x1 + (k0 + 2), 13, 15, 26, 6)
    x0, x1 = x0 + k0, x1 + (k1 + 3)
    x0 = x0 + x1
    return x0, ((x1 << 17) | (x1 >> 15)) ^ x0


@triton.jit
def uniform_from_word(word):
    """An fp32 uniform in the open interval (0, 1) with a resolution of 2^-31 near 0."""
    u = (word & 0x7FFFFFFF).to(tl.int32).to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10
    return tl.minimum(u, 0.9999999403953552)


@triton.jit
def gumbel_from_word(word):
    """An fp32 standard Gumbel value, -log(-log(1 - u)); the winning tail sits at u -> 0, where fp32 has resolution.

    c, the rounding error of w = 1 - u, is exact in fp32. Adding it to the logarithm keeps the tail's relative
    precision: log(w + c) = log(w) + c (1 + O(1 - w)), and c = 0 where w <= 1/2. Binary logarithms, because they are
    the hardware's: natural ones cost 11 instructions more a token on gfx942.
    """
    u = uniform_from_word(word)
    w = 1.0 - u
    c = (1.0 - w) - u
    return tl.fma(tl.log2(-(tl.log2(w) + c * 1.4426950408889634)), -0.6931471805599453, 0.36651292058166435)


@triton.jit
def row_key(keys_ptr, batch_row):
    """The two key words of a row of `keys` [B, 2] int32."""
    base = keys_ptr + batch_row * 2
    return tl.load(base).to(tl.uint32, bitcast=True), tl.load(base + 1).to(tl.uint32, bitcast=True)


@triton.jit
def gumbel_pairs(k0, k1, stream, counter, first_pair, PAIRS: tl.constexpr):
    """Gumbel values of the tokens 2 j and 2 j + 1 for the PAIRS pairs j from `first_pair`; two [PAIRS] tensors."""
    pairs = (first_pair + tl.arange(0, PAIRS)).to(tl.uint32)
    word0, word1 = threefry(k0, k1, pairs | (stream.to(tl.uint32) << STREAM_SHIFT), counter.to(tl.uint32))
    return gumbel_from_word(word0), gumbel_from_word(word1)


@triton.jit
def uniform_pair(k0, k1, stream, counter):
    """Two uniforms of one counter, for a draw that needs no token id."""
    word0, word1 = threefry(k0, k1, stream.to(tl.uint32) << STREAM_SHIFT, counter.to(tl.uint32))
    return uniform_from_word(word0), uniform_from_word(word1)
