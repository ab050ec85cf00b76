"""`match` and `coupled` emit what plain decoding with the same noise emits, whatever was drafted."""

import itertools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from laws import (
    Language,
    Propose,
    Text,
    chain_drafter,
    emitted_texts,
    random_language,
    tabulate,
)

from hf_specdec.verification import (
    DRAFT,
    TARGET,
    Draft,
    Noise,
    OneHot,
    RoundNoise,
    Verdict,
    verify,
)

CPU = torch.device("cpu")
MATCHING_RULES = ["match", "coupled"]
SAMPLING_RULES = ["rejection", "block"]

# Plain decoding: what `match` and `coupled` must emit, whatever was drafted


def plain_texts(target: Language, noise: Noise | None, num_tokens: int, batch_size: int = 1) -> torch.Tensor:
    """[B, num_tokens] one token a forward; the number of the verification means nothing to it."""
    texts: list[Text] = [()] * batch_size
    for position in range(num_tokens):
        scores = torch.stack([target(text) for text in texts]).unsqueeze(1)
        if noise is None:
            tokens = scores.argmax(dim=-1)
        else:
            positions = torch.full((batch_size,), position)
            tokens = RoundNoise(noise, positions, verification=100 - position).choose(TARGET, scores)
        texts = [(*text, token) for text, token in zip(texts, tokens[:, 0].tolist(), strict=True)]
    return torch.tensor(texts)


def every_tree(vocab_size: int, num_nodes: int) -> Iterator[tuple[list[int], list[int]]]:
    """(parents, tokens) of every tree in every order that puts parents first and keeps siblings distinct."""
    if num_nodes == 0:
        yield [], []
        return
    for parents, tokens in every_tree(vocab_size, num_nodes - 1):
        taken = set(zip(parents, tokens, strict=True))
        for node in itertools.product(range(-1, num_nodes - 1), range(vocab_size)):
            if node not in taken:
                yield [*parents, node[0]], [*tokens, node[1]]


def node_texts(parents: list[int], tokens: list[int]) -> list[Text]:
    """The text of the root and of every node."""
    texts: list[Text] = [()]
    for parent, token in zip(parents, tokens, strict=True):
        texts.append(texts[parent + 1] + (token,))
    return texts


def tree_scores(target: Language, parents: list[list[int]], tokens: list[list[int]]) -> torch.Tensor:
    """[B, n + 1, V] the target's scores at the root and at every node."""
    rows = [node_texts(*tree) for tree in zip(parents, tokens, strict=True)]
    return torch.stack([torch.stack([target(text) for text in row]) for row in rows])


def same_noise(seed: int, batch_size: int) -> Noise:
    """Every row draws what a single row with this seed draws."""
    return Noise(Noise.from_seed(seed, 1, CPU).keys.expand(batch_size, 2))


def emitted(verdict: Verdict) -> list[Text]:
    assert int(verdict.num_accepted.min()) >= 0
    counts = (verdict.tokens >= 0).sum(dim=1)
    assert bool((counts == verdict.num_accepted + 1).all())
    return [tuple(token for token in row if token >= 0) for row in verdict.tokens.tolist()]


SEEDS = [None, 0, 1, 2, 3, 4, 5]
"""None decodes greedily."""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("vocab_size", "num_slots"), [(2, 1), (2, 3), (3, 2), (3, 3), (4, 3)])
@pytest.mark.parametrize("rule", MATCHING_RULES)
def test_every_chain_emits_the_plain_text(rule, vocab_size, num_slots, seed):
    target = random_language(vocab_size, seed or 0, dtype=torch.float32)
    drafts = torch.tensor(
        [
            (*chain, *[-1] * (num_slots - length))
            for length in range(num_slots + 1)
            for chain in itertools.product(range(vocab_size), repeat=length)
        ]
    )
    draft = Draft(drafts, (drafts >= 0).sum(dim=1), OneHot())
    texts: list[Text] = [()] * len(drafts)
    scores = torch.stack([tabulate(target, texts, drafts[:, :i]) for i in range(num_slots + 1)], dim=1)
    noise, plain = None, plain_texts(target, None, num_slots + 1)[0].tolist()
    if seed is not None:
        noise = RoundNoise(same_noise(seed, len(drafts)), torch.zeros(len(drafts), dtype=torch.long), 3)
        plain = plain_texts(target, same_noise(seed, 1), num_slots + 1)[0].tolist()
    verdict = verify(draft, scores, rule, noise)
    for chain, text in zip(drafts.tolist(), emitted(verdict), strict=True):
        agreeing = next(i for i in range(num_slots + 1) if i == num_slots or chain[i] != plain[i])
        assert text == tuple(plain[: agreeing + 1])


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("vocab_size", "num_nodes"), [(2, 1), (2, 4), (3, 2), (3, 3)])
@pytest.mark.parametrize("rule", MATCHING_RULES)
def test_every_tree_emits_the_plain_text(rule, vocab_size, num_nodes, seed):
    target = random_language(vocab_size, seed or 0, dtype=torch.float32)
    trees = list(every_tree(vocab_size, num_nodes))
    parents, tokens = (list(column) for column in zip(*trees, strict=True))
    scores = tree_scores(target, parents, tokens)
    noise, plain = None, plain_texts(target, None, num_nodes + 1)[0].tolist()
    if seed is not None:
        noise = RoundNoise(same_noise(seed, len(trees)), torch.zeros(len(trees), dtype=torch.long), 3)
        plain = plain_texts(target, same_noise(seed, 1), num_nodes + 1)[0].tolist()
    for length in range(num_nodes + 1):  # the nodes past it are padding
        past = torch.arange(num_nodes) >= length
        lengths = torch.full((len(trees),), length)
        whole = Draft(torch.tensor(tokens), lengths, OneHot(), parents=torch.tensor(parents))
        draft = replace(whole, tokens=whole.tokens.masked_fill(past, -1), parents=whole.parents.masked_fill(past, -1))
        padded = scores.clone()
        padded[:, length + 1 :] = torch.nan
        verdict = verify(draft, padded, rule, noise)
        assert torch.equal(verdict.tokens, verify(whole, scores, rule, noise).tokens)
        for row, text in enumerate(emitted(verdict)):
            nodes = {text: node - 1 for node, text in enumerate(node_texts(parents[row], tokens[row])[: length + 1])}
            deepest = next(i for i in range(num_nodes + 1) if tuple(plain[: i + 1]) not in nodes)
            assert text == tuple(plain[: deepest + 1])
            path = [nodes[tuple(plain[: i + 1])] for i in range(deepest)]
            assert verdict.path[row].tolist() == path + [-1] * (num_nodes - deepest)


def test_one_tree_may_serve_every_row():
    target = random_language(3, 0, dtype=torch.float32)
    parents, tokens = [-1, -1, 0, 2, 1], [0, 1, 1, 2, 1]
    scores = tree_scores(target, [parents] * 4, [tokens] * 4)
    noise = RoundNoise(Noise.from_seed(5, 4, CPU), torch.tensor([3, 1, 0, 9]), 0)
    lengths = torch.tensor([5, 4, 0, 5])
    past = torch.arange(5) >= lengths[:, None]
    draft = Draft(torch.tensor([tokens] * 4).masked_fill(past, -1), lengths, OneHot(), parents=torch.tensor(parents))
    shared = verify(draft, scores, "match", noise)
    each = verify(replace(draft, parents=torch.tensor([parents] * 4)), scores, "match", noise)
    for field in ("num_accepted", "tokens", "path"):
        assert bool((getattr(shared, field) == getattr(each, field)).all())


def _random_tree_drafter(vocab_size: int, num_nodes: int, seed: int) -> Propose:
    generator = torch.Generator().manual_seed(seed)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        trees = []
        for _ in texts:
            parents: list[int] = []
            tokens: list[int] = []
            while len(parents) < num_nodes:
                parent = int(torch.randint(-1, len(parents), (1,), generator=generator))
                token = int(torch.randint(vocab_size, (1,), generator=generator))
                if (parent, token) not in set(zip(parents, tokens, strict=True)):
                    parents.append(parent)
                    tokens.append(token)
            trees.append((parents, tokens))
        parents, tokens = (torch.tensor(column) for column in zip(*trees, strict=True))
        return Draft(tokens, torch.full((len(texts),), num_nodes), OneHot(), parents=parents)

    return propose


def _coupled_tree_drafter(q: Language, width: int, depth: int) -> Propose:
    """At every node the `width` best tokens of log q plus the target's own noise."""

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        rows = []
        for row, text in enumerate(texts):
            parents, tokens, contexts, level = [], [], {-1: text}, [-1]
            for step in range(depth):
                counters = (noise.positions[row] + step).to(torch.int32).view(1, 1)
                g = Noise(noise.noise.keys[row : row + 1]).gumbel(TARGET, counters, q(()).numel())[0, 0]
                reached = []
                for node in level:
                    for token in (q(contexts[node]) + g).topk(width).indices.tolist():
                        parents.append(node)
                        tokens.append(token)
                        contexts[len(parents) - 1] = contexts[node] + (token,)
                        reached.append(len(parents) - 1)
                level = reached
            rows.append((parents, tokens))
        parents, tokens = (torch.tensor(column) for column in zip(*rows, strict=True))
        return Draft(tokens, torch.full((len(texts),), tokens.shape[1]), OneHot(), parents=parents)

    return propose


def _tree_texts(
    target: Language, propose: Propose, rule: str, noise: Noise, num_tokens: int
) -> tuple[list[Text], float]:
    """The texts of every row, and the mean number of emitted tokens of a verification."""
    texts: list[Text] = [()] * len(noise.keys)
    verifications = 0
    while min(map(len, texts)) < num_tokens:
        positions = torch.tensor([len(text) for text in texts])
        this = RoundNoise(noise, positions, verifications)
        draft = propose(texts, this)
        scores = torch.stack(
            [
                torch.stack([target(text + more) for more in node_texts(parents, tokens)])
                for text, parents, tokens in zip(texts, draft.parents.tolist(), draft.tokens.tolist(), strict=True)
            ]
        )
        verdict = verify(draft, scores, rule, this)
        texts = [text + more for text, more in zip(texts, emitted(verdict), strict=True)]
        verifications += 1
    return [text[:num_tokens] for text in texts], sum(map(len, texts)) / len(texts) / verifications


@pytest.mark.parametrize("rule", MATCHING_RULES)
def test_rounds_of_any_trees_emit_the_plain_text(rule):
    target, noise = random_language(3, 7, dtype=torch.float32), Noise.from_seed(8, 20, CPU)
    plain = [tuple(row) for row in plain_texts(target, noise, 12, 20).tolist()]
    assert _tree_texts(target, _random_tree_drafter(3, 5, seed=1), rule, noise, 12)[0] == plain


def test_rounds_of_coupled_trees_emit_the_plain_text_and_reach_further_than_coupled_chains():
    target, q = random_language(5, 7, dtype=torch.float32), random_language(5, 8, dtype=torch.float32)
    noise = Noise.from_seed(8, 40, CPU)
    plain = [tuple(row) for row in plain_texts(target, noise, 12, 40).tolist()]
    wide, reach = _tree_texts(target, _coupled_tree_drafter(q, width=2, depth=2), "coupled", noise, 12)
    narrow, shorter_reach = _tree_texts(target, _coupled_tree_drafter(q, width=1, depth=2), "coupled", noise, 12)
    assert wide == plain
    assert narrow == plain
    assert reach > shorter_reach


@pytest.mark.parametrize("stream", [TARGET, DRAFT], ids=["coupled drafts", "independent drafts"])
@pytest.mark.parametrize("rule", MATCHING_RULES)
def test_rounds_of_drawn_chains_emit_the_plain_text(rule, stream):
    target, q = random_language(4, 9, dtype=torch.float32), random_language(4, 10, dtype=torch.float32)
    noise = Noise.from_seed(11, 200, CPU)

    def goes_on(text: Text) -> bool:
        return (sum(text) + len(text)) % 3 != 2

    propose = chain_drafter(q, 3, goes_on=goes_on, stream=stream)
    texts = emitted_texts(target, propose, rule, noise, 6)
    assert bool((texts == plain_texts(target, noise, 6, 200)).all())
