"""`walk` against its fp64 reference and the package's rule `match`, chains and trees."""

import math

import pytest
import torch
from kernel_cases import (
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
from laws import chi_square_p_value, constant_language, emitted_texts, greedy_drafter, text_probabilities

pytest.importorskip("triton")

from hf_specdec import _kernels as kernels
from hf_specdec._kernels import Config, _walk, reference, row_sample, walk
from hf_specdec.verification import TARGET, Draft, Noise, OneHot, RoundNoise, Verdict, verify

pytestmark = quietly

METHODS = ("greedy", "gumbel")
DTYPES = (torch.float32, torch.bfloat16)
ROUNDING = 2e-5
SURELY_WRONG = 1e-6


def depths_of(parents: torch.Tensor) -> torch.Tensor:
    """[B, n + 1] int32 depths of a tree's rows."""
    depths = torch.zeros(parents.shape[0], parents.shape[1] + 1, dtype=torch.int32)
    for b, row in enumerate(parents.tolist()):
        for i, parent in enumerate(row):
            depths[b, i + 1] = depths[b, parent + 1] + 1
    return depths.to(DEVICE)


def draft_for(logits, method, tree, noise, seed=0):
    """Tokens, ragged lengths and parents of which the target agrees with many."""
    batch_size, m, vocab_size = logits.shape
    n, generator = m - 1, torch.Generator().manual_seed(seed)
    parents = torch.arange(-1, n - 1).expand(batch_size, n)
    if tree:
        below = torch.rand(batch_size, n, generator=generator) * (torch.arange(n) + 1)
        parents = torch.maximum(below.long(), torch.arange(n) - 2) - 1
    parents = parents.to(DEVICE)
    slots = depths_of(parents) if tree else None
    choices = logits.float().argmax(dim=-1)
    if method == "gumbel":
        choices = row_sample(logits, method, **noise, slots=slots, config=config_for(vocab_size)).token
    lengths = torch.randint(n + 1, (batch_size,), generator=generator).clamp_min(n - 1).to(DEVICE)
    tokens = torch.randint(vocab_size, (batch_size, n), generator=generator).to(DEVICE)
    likely = choices.clamp_min(0).gather(1, (parents + 1).clamp_min(0))
    right = torch.rand(batch_size, n, generator=generator).to(DEVICE) < 0.8
    for i in range(n):  # siblings are distinct: only the first child may be the target's choice
        first = ~((parents[:, :i] == parents[:, i : i + 1]) & (tokens[:, :i] == likely[:, i : i + 1])).any(dim=1)
        tokens[:, i] = torch.where(right[:, i] & first, likely[:, i], tokens[:, i])
    tokens = tokens.masked_fill(torch.arange(n, device=DEVICE) >= lengths[:, None], -1)
    return tokens, lengths, parents if tree else None, slots


def same(found, expected, rows) -> bool:
    pairs = [(found.num_accepted, expected.num_accepted), (found.tokens, expected.tokens)]
    pairs += [] if expected.path is None else [(found.path, expected.path)]
    return all(bool(torch.equal(a[rows], b[rows])) for a, b in pairs)


def check(logits: torch.Tensor, method: str, tree: bool, config: Config | None = None, **options) -> None:
    """The kernel's verdict is the reference's wherever the reference's margin exceeds rounding."""
    noise = noise_arguments(len(logits))
    tokens, lengths, parents, slots = draft_for(logits, method, tree, noise)
    config = config or config_for(logits.shape[-1])
    found = walk(logits, method, tokens, lengths, parents, slots=slots, config=config, **noise, **options)
    for b in range(len(logits)):
        here = slice(b, b + 1)
        own = {name: tensor[here] for name, tensor in noise.items()}
        expected = reference.walk(
            logits[here], method, tokens[here], lengths[here], None if parents is None else parents[here],
            slots=None if slots is None else slots[here], **own, **options,
        )  # fmt: skip
        mine = kernels.Verified(*(None if tensor is None else tensor[here] for tensor in found))
        assert float(expected.margin[0]) <= ROUNDING or same(mine, expected, slice(None))


@pytest.mark.parametrize(
    ("vocab_size", "batch_size", "num_drafted", "method", "tree", "dtype"),
    pairwise(VOCAB_SIZES[:6], (1, 2), DRAFT_LENGTHS, METHODS, (False, True), DTYPES),
)
def test_the_kernel_gives_what_the_reference_gives(vocab_size, batch_size, num_drafted, method, tree, dtype):
    num_drafted = min(num_drafted, 4) if vocab_size > 100_000 else num_drafted
    check(random_logits(batch_size, num_drafted + 1, vocab_size, dtype=dtype, seed=num_drafted), method, tree)


@pytest.mark.grid
@pytest.mark.parametrize("vocab_size", VOCAB_SIZES)
@pytest.mark.parametrize("batch_size", [1, 2, 8])
@pytest.mark.parametrize("num_drafted", DRAFT_LENGTHS)
def test_the_kernel_gives_what_the_reference_gives_at_every_size(vocab_size, batch_size, num_drafted):
    # The rows of a chain and of a tree are read alike: each has one method here, and the other at the next size.
    odd = (VOCAB_SIZES.index(vocab_size) + batch_size + DRAFT_LENGTHS.index(num_drafted)) % 2
    for tree in (False, True):
        method, dtype = METHODS[(tree + odd) % 2], DTYPES[(tree + num_drafted) % 2]
        check(random_logits(batch_size, num_drafted + 1, vocab_size, dtype=dtype, seed=num_drafted), method, tree)


# The package's rule


def by_kernel(draft: Draft, scores: torch.Tensor, noise: RoundNoise | None) -> Verdict:
    """`verify(..., "match", ...)` by the kernel."""
    slots = None if draft.parents is None else depths_of(draft.parents.expand_as(draft.tokens))
    drawn = {}
    if noise is not None:
        drawn = {"keys": noise.noise.keys, "counters": noise.positions.int(), "stream": TARGET}
    method = "greedy" if noise is None else "gumbel"
    scores, config = scores.float().to(DEVICE), Config(128, 1)
    found = walk(scores, method, draft.tokens, draft.lengths, draft.parents, slots=slots, config=config, **drawn)
    return Verdict(*found)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("num_drafted", [0, 4])
def test_verdicts_are_those_of_the_rule(method, tree, num_drafted):
    batch_size = 8
    logits = random_logits(batch_size, num_drafted + 1, 150, dtype=torch.float32, seed=num_drafted)
    arguments = noise_arguments(batch_size)
    tokens, lengths, parents, _slots = draft_for(logits, method, tree, arguments)
    noise = None if method == "greedy" else RoundNoise(Noise(arguments["keys"]), arguments["counters"].long(), 3)
    draft = Draft(tokens, lengths, OneHot(), parents)
    logits[3, 0], logits[4, 0] = math.nan, -math.inf  # broken where every walk begins
    logits[5, 1:].masked_fill_(torch.arange(150, device=DEVICE) == 7, math.nan)
    logits[6, 0, 149] = math.inf
    expected, found = verify(draft, logits, "match", noise), by_kernel(draft, logits, noise)
    assert same(found, expected, slice(None))
    assert (found.path is None) == (parents is None)
    broken = [3, 4] + ([] if method == "greedy" else [6])
    assert [b for b in broken if int(found.num_accepted[b]) != -1] == []


@pytest.mark.parametrize("method", METHODS)
def test_a_static_tree_serves_every_row(method):
    logits, arguments = random_logits(4, 6, 90, dtype=torch.float32), noise_arguments(4)
    parents = torch.tensor([-1, -1, 0, 0, 3], device=DEVICE)
    every = parents.expand(4, -1)
    slots = depths_of(every)
    choices = row_sample(logits, method, slots=slots, **arguments).token
    tokens = torch.full((4, 5), 89, device=DEVICE)
    tokens[:, 1] = choices[:, 0]
    tokens[1, 0], tokens[1, 3], tokens[1, 4] = choices[1, 0], choices[1, 1], choices[1, 4]
    tokens[1, 1] = 88
    lengths = torch.tensor([5, 5, 5, 1], device=DEVICE)
    found = walk(logits, method, tokens, lengths, parents, slots=slots, **arguments)
    assert found.path.tolist()[:2] == [[1, -1, -1, -1, -1], [0, 3, 4, -1, -1]]
    assert found.path[3].tolist() == [-1] * 5  # node 1 lies past the row's length
    assert found.tokens[1].tolist() == [*choices[1, [0, 1, 4, 5]].tolist(), -1, -1]
    again = walk(logits, method, tokens, lengths, every.contiguous(), slots=slots, **arguments)
    assert same(again, found, slice(None))


# The law


def test_emitted_text_has_the_targets_law():
    # Texts of two tokens, verified in rounds with drafts that are the target's most probable tokens.
    target = constant_language(0.5, 0.3, 0.2, dtype=torch.float32)
    texts = emitted_texts(target, greedy_drafter(target, 2), by_kernel, Noise.from_seed(5, 60, DEVICE), 2)
    numbers = 3 * texts[:, 0] + texts[:, 1]
    assert chi_square_p_value(numbers, text_probabilities(target, 2)) > SURELY_WRONG
    other = constant_language(0.2, 0.1, 0.7)
    assert chi_square_p_value(numbers, text_probabilities(other, 2)) < SURELY_WRONG


# Ragged drafts, strides, ties


@interpreted
@pytest.mark.parametrize("tree", [False, True])
def test_padding_is_never_read_as_an_index_and_nothing_beside_the_draft_is_read(tree):
    # vllm-project/vllm-ascend#15673: padded ids of -1 were used as an index. Around the draft lies what would agree.
    logits = random_logits(3, 5, 60, dtype=torch.float32)
    choices = logits.argmax(dim=-1)
    around = choices.new_full((3, 12), 0)
    around[:] = choices[:, :1]
    tokens = around[:, 4:8]
    tokens.copy_(torch.tensor([-1, -1, -1, -1]))
    around_parents = torch.full((3, 12), -1)
    around_parents[:, 4:8] = torch.arange(-1, 3)
    parents = around_parents[:, 4:8] if tree else None
    lengths = torch.tensor([0, 2, 4])
    tokens[1, :2], tokens[2] = choices[1, :2], choices[2, :4]
    found = walk(logits, "greedy", tokens, lengths, parents, config=Config(32, 1))
    assert found.num_accepted.tolist() == [0, 2, 4]
    emitted = [[*choices[b, : k + 1].tolist(), *[-1] * (4 - k)] for b, k in enumerate((0, 2, 4))]
    assert found.tokens.tolist() == emitted


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tree", [False, True])
def test_strides_and_offsets_are_honoured(method, tree):
    # vllm-project/vllm#42684: a kernel took the vocabulary's size for the stride.
    padded = random_logits(5, 7, 301, dtype=torch.bfloat16)
    check(padded[1:4, 1:6, 3:240], method, tree, config=Config(64, 1), inv_temperature=1.3)


def test_the_lowest_token_of_a_tie_is_the_targets_choice():
    logits = torch.zeros(2, 3, 300, device=DEVICE)
    logits[:, :, [70, 200, 299]] = 1.0
    tokens = torch.tensor([[70, 200], [200, 70]], device=DEVICE)
    found = walk(logits, "greedy", tokens, torch.tensor([2, 2], device=DEVICE), config=Config(64, 1))
    assert found.num_accepted.tolist() == [1, 0]
    assert found.tokens.tolist() == [[70, 70, -1], [70, -1, -1]]


@pytest.mark.parametrize("tree", [False, True])
def test_two_hundred_rows_of_many_blocks_are_joined_in_chunks(tree):
    # The second launch alone, over partials of 40 blocks of which each row's best may be anywhere.
    n, blocks = 200, 40
    values = random_logits(1, n + 1, blocks, dtype=torch.bfloat16).float()
    values[0, 150, 37] = values[0, 150].max()
    values[0, 180] = -math.inf
    indices = torch.arange(blocks, dtype=torch.int32, device=DEVICE) * 2048 + 3
    partials = torch.stack([values[0], indices.view(torch.float32).expand(n + 1, -1)])
    choices = indices[values[0].argmax(dim=-1)].long()
    drafted = choices[None, :-1].clone()
    for agreeing, accepted in ((150, 150), (179, 179), (200, -1)):
        drafted[0, agreeing:] = 5
        parents = torch.arange(-1, n - 1, device=DEVICE)
        found = [torch.empty(1, size, dtype=torch.int64, device=DEVICE) for size in (1, n + 1, n)]
        _walk.walk_rows[(1,)](
            partials, drafted, torch.tensor([n], device=DEVICE), parents, *found, n, n, 0, blocks,
            DRAWN=False, TREE=tree, ROWS=256, CHUNK=16,
        )  # fmt: skip
        drafted = choices[None, :-1].clone()
        assert int(found[0]) == accepted
        if accepted > 0:
            assert found[1][0, : accepted + 1].tolist() == choices[: accepted + 1].tolist()
            assert found[1][0, accepted + 1 :].eq(-1).all()
            assert not tree or found[2][0].tolist() == [*range(accepted), *[-1] * (n - accepted)]


def test_a_row_broken_past_the_walk_changes_nothing():
    logits = random_logits(1, 4, 50, dtype=torch.float32)
    tokens = logits[:, :-1].argmax(dim=-1)
    tokens[0, 1] = (tokens[0, 1] + 1) % 50
    logits[0, 2:] = math.nan
    lengths = torch.tensor([3], device=DEVICE)
    assert int(walk(logits, "greedy", tokens, lengths).num_accepted) == 1
    assert int(walk(logits.roll(2, dims=1), "greedy", tokens, lengths).num_accepted) == -1


# Cost


@interpreted
@pytest.mark.parametrize(("method", "tree"), [("greedy", True), ("gumbel", False)])
def test_two_launches_read_the_logits_once(method, tree):
    logits, arguments = random_logits(1, 3, 151936, dtype=torch.bfloat16), noise_arguments(1)
    tokens, lengths, parents, slots = draft_for(logits, method, tree, arguments)
    with counted() as counts:
        walk(logits, method, tokens, lengths, parents, slots=slots, **arguments)
    assert counts.launches == 2
    assert logits.numel() * 2 <= counts.read + counts.written <= 1.1 * logits.numel() * 2


# Refused


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"method": "inverse_cdf"}, "`method` is 'inverse_cdf'"),
        ({"logits": torch.zeros(2, 5)}, r"`logits` has shape \(2, 5\)"),
        ({"tokens": torch.zeros(2, 3, dtype=torch.int64)}, r"`tokens` is torch.int64 \[2, 3\]; give int64 \[2, 2\]"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int32)}, r"`tokens` is torch.int32"),
        ({"tokens": torch.zeros(2, 2, dtype=torch.int64).mT}, "`tokens` must be contiguous"),
        ({"lengths": torch.zeros(3, dtype=torch.int64)}, "`lengths` is torch.int64"),
        ({"parents": torch.zeros(3, dtype=torch.int64)}, "`parents` is torch.int64"),
        ({"parents": torch.zeros(2, dtype=torch.int64)}, "`slots` is None; a tree that is drawn"),
        ({"keys": None}, "`keys` is None"),
    ],
)
def test_what_no_kernel_serves_is_refused(changed, message):
    draft = {"tokens": torch.zeros(2, 2, dtype=torch.int64), "lengths": torch.zeros(2, dtype=torch.int64)}
    arguments = {"logits": torch.zeros(2, 3, 5), "method": "gumbel", **draft, **noise_arguments(2), **changed}
    arguments = {n: v.to(DEVICE) if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    with pytest.raises(ValueError, match=message):
        walk(**arguments)


def test_no_rows_give_no_verdicts():
    nothing = torch.zeros(0, 3, dtype=torch.int64, device=DEVICE)
    found = walk(torch.zeros(0, 4, 7, device=DEVICE), "greedy", nothing, nothing[:, 0])
    assert found.num_accepted.shape == (0,)
    assert found.tokens.shape == (0, 4)
