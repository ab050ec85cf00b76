"""The law of the emitted text, enumerated exactly or counted with real noise, by the same loop of rounds.

A language is a function from the text so far to the log-weights of the next token; the target is one, and so is the
law that a drafter draws from. A drafter is a function `propose(texts, noise) -> Draft` that draws through the noise it
is given. `emitted_law` hands it `EnumeratedNoise`, which takes every outcome of every draw and of every coin;
`emitted_texts` hands it real noise. A rule is a name for `verify`, or a function, for the controls that must fail.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable

import torch
from scipy import stats

from hf_specdec.lenient import Ensemble, Lenience, LenientRule, Margin, Mentored, TopK, Typical
from hf_specdec.verification import DRAFT, Draft, Noise, OneHot, RoundNoise, Sampled, Verdict, verify

Text = tuple[int, ...]
Language = Callable[[Text], torch.Tensor]
Propose = Callable[[list[Text], RoundNoise], Draft]
Rule = str | LenientRule | Callable[[Draft, torch.Tensor, RoundNoise], Verdict]

EXACT = 1e-12
"""Largest error of a probability that fp64 rounding explains."""

LENIENT_RULES = [Lenience(0.5), Lenience(0.9), Mentored(0.1), Ensemble(0.6), Typical(0.25, 0.7), TopK(2), Margin(0.4)]


# Languages


def random_language(vocab_size: int, seed: int, filtered: float = 0.2, dtype: torch.dtype = torch.float64) -> Language:
    """Independent normal log-weights after every text; the share `filtered` of them is -inf, never a whole row."""
    generator = torch.Generator().manual_seed(seed)
    rows: dict[Text, torch.Tensor] = {}

    def language(text: Text) -> torch.Tensor:
        if text not in rows:
            row = 1.5 * torch.randn(vocab_size, generator=generator, dtype=torch.float64)
            dropped = torch.rand(vocab_size, generator=generator) < filtered
            dropped[torch.randint(vocab_size, (1,), generator=generator)] = False
            rows[text] = row.masked_fill(dropped, -torch.inf).to(dtype)
        return rows[text]

    return language


def constant_language(*probabilities: float, dtype: torch.dtype = torch.float64) -> Language:
    """The same law after every text."""
    row = torch.tensor(probabilities, dtype=torch.float64).log().to(dtype)
    return lambda text: row


def tabulate(function: Callable[[Text], torch.Tensor], texts: list[Text], tokens: torch.Tensor) -> torch.Tensor:
    """[R, ...] `function` of each text continued by its row of `tokens` [R, m], called once for each distinct one.

    Rows whose tokens hold -1 have no such text. They get NaN (zeros where `function` returns integers), so a rule that
    reads one is found out.
    """
    numbers: dict[Text, int] = {}
    starts = torch.tensor([numbers.setdefault(text, len(numbers)) for text in texts])
    distinct, inverse = _codes(starts, tokens).unique(return_inverse=True)
    example = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(texts)))
    missing = function(())
    missing = torch.full_like(missing, torch.nan if missing.is_floating_point() else 0)
    values = [
        missing if -1 in continuation else function(texts[row] + tuple(continuation))
        for row, continuation in zip(example.tolist(), tokens[example].tolist(), strict=True)
    ]
    return torch.stack(values)[inverse]


def _codes(starts: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """[R] one integer for each (start, tokens)."""
    codes = starts
    base = int(tokens.max()) + 2 if tokens.numel() else 1
    for column in tokens.unbind(dim=1):
        codes = codes * base + column + 1
    return codes


# Drafters


def chain_drafter(
    q: Language,
    num_slots: int,
    *,
    ids: torch.Tensor | Callable[[Text], torch.Tensor] | None = None,
    one_hot: Iterable[int] = (),
    goes_on: Callable[[Text], bool] | None = None,
    stream: int = DRAFT,
) -> Propose:
    """Draws token after token from q, and declares so.

    Args:
        ids: [C] the candidates that q is cut down to, or a function of the text so far that gives [C] of them.
        one_hot: slots whose token is the most probable one and is declared as computed.
        goes_on: whether another token is drawn after this text; it sees nothing else, so it is causal.
    """
    one_hot = set(one_hot)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        tokens = torch.full((len(texts), num_slots), -1)
        logits, candidates = [], []
        for slot in range(num_slots):
            before = tokens[:, :slot]
            scores = tabulate(q, texts, before)
            if ids is not None:
                here = tabulate(ids, texts, before) if callable(ids) else ids.expand(len(texts), -1)
                scores = scores.gather(1, here)
                candidates.append(here)
            logits.append(scores)
            if slot in one_hot:
                choice = scores.nan_to_num(nan=0.0).argmax(dim=-1, keepdim=True)
            else:
                choice = noise.choose(stream, scores.unsqueeze(1), slot)
            token = choice if ids is None else here.gather(1, choice)
            drawn = slot == 0 or tokens[:, slot - 1] >= 0
            if goes_on is not None:
                drawn = drawn & (tabulate(lambda text: torch.tensor(float(goes_on(text))), texts, before) == 1.0)
            tokens[:, slot] = torch.where(torch.as_tensor(drawn), token[:, 0], -1)
        marks = torch.tensor([slot in one_hot for slot in range(num_slots)]).expand(len(texts), -1)
        law = Sampled(
            torch.stack(logits, dim=1),
            ids=torch.stack(candidates, dim=1) if callable(ids) else ids,
            one_hot=marks if one_hot else None,
        )
        return Draft(tokens, (tokens >= 0).sum(dim=1), law)

    return propose


def greedy_drafter(q: Language, num_slots: int, goes_on: Callable[[Text], bool] | None = None) -> Propose:
    """The most probable token after token, declared as a one-hot law."""
    drafter = chain_drafter(q, num_slots, one_hot=range(num_slots), goes_on=goes_on)

    def propose(texts: list[Text], noise: RoundNoise) -> Draft:
        draft = drafter(texts, noise)
        return Draft(draft.tokens, draft.lengths, OneHot())

    return propose


# The loop


def verification(target: Language, propose: Propose, rule: Rule, texts: list[Text], noise: RoundNoise) -> Verdict:
    """One round for every text."""
    draft = propose(texts, noise)
    scores = torch.stack([tabulate(target, texts, draft.tokens[:, :i]) for i in range(draft.num_slots + 1)], dim=1)
    if callable(rule):
        return rule(draft, scores, noise)
    return verify(draft, scores, rule, noise)


def emitted_law(target: Language, propose: Propose, rule: Rule, num_tokens: int, rounds: int = 2) -> dict[Text, float]:
    """The probability of each text, cut at `num_tokens`, after some rounds from the empty text."""
    law = {(): 1.0}
    for _ in range(rounds):
        starts = [text for text in law if len(text) < num_tokens]
        if not starts:
            break
        verdict, rows, weights = _enumerate_round(target, propose, rule, starts)
        weights = weights * torch.tensor([law[text] for text in starts], dtype=torch.float64)[rows]
        law = {text: probability for text, probability in law.items() if len(text) >= num_tokens}
        distinct, inverse = _codes(rows, verdict.tokens).unique(return_inverse=True)
        sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, inverse, weights)
        example = torch.empty_like(distinct).scatter_(0, inverse, torch.arange(len(rows)))
        for row, tokens, probability in zip(
            rows[example].tolist(), verdict.tokens[example].tolist(), sums.tolist(), strict=True
        ):
            text = (starts[row] + tuple(token for token in tokens if token >= 0))[:num_tokens]
            law[text] = law.get(text, 0.0) + probability
    return law


def expected_accepted(target: Language, propose: Propose, rule: Rule) -> float:
    """Expected accepted tokens of a round after the empty text."""
    verdict, _, weights = _enumerate_round(target, propose, rule, [()])
    return float((verdict.num_accepted * weights).sum())


def law_error(target: Language, law: dict[Text, float], num_tokens: int) -> float:
    """Largest error of a text's probability, after the target has continued shorter texts to `num_tokens`."""
    vocab_size = target(()).numel()
    expected = torch.ones(1, dtype=torch.float64)
    found = torch.zeros(1, dtype=torch.float64)
    for length in range(num_tokens + 1):
        contexts = list(itertools.product(range(vocab_size), repeat=length))
        found += torch.tensor([law.get(text, 0.0) for text in contexts], dtype=torch.float64)
        if length < num_tokens:
            p = torch.stack([target(text) for text in contexts]).double().softmax(dim=-1)
            found, expected = (found[:, None] * p).flatten(), (expected[:, None] * p).flatten()
    return float((found - expected).abs().max())


def emitted_texts(
    target: Language,
    propose: Propose,
    rule: Rule,
    noise: Noise,
    num_tokens: int,
    round_noise: Callable[[Noise, torch.Tensor, int], RoundNoise] = RoundNoise,
) -> torch.Tensor:
    """[B, num_tokens] the texts of B rows with real noise; every row goes through `num_tokens` rounds."""
    texts: list[Text] = [()] * len(noise.keys)
    for number in range(num_tokens):
        positions = torch.tensor([len(text) for text in texts])
        verdict = verification(target, propose, rule, texts, round_noise(noise, positions, number))
        texts = [
            text + tuple(token for token in tokens if token >= 0)
            for text, tokens in zip(texts, verdict.tokens.tolist(), strict=True)
        ]
    return torch.tensor([text[:num_tokens] for text in texts])


def text_probabilities(target: Language, num_tokens: int) -> torch.Tensor:
    """[V ** num_tokens] the target's law of the first tokens, the last token running fastest."""
    vocab_size = target(()).numel()
    probabilities = torch.ones(1, dtype=torch.float64)
    for length in range(num_tokens):
        contexts = itertools.product(range(vocab_size), repeat=length)
        p = torch.stack([target(text) for text in contexts]).double().softmax(dim=-1)
        probabilities = (probabilities[:, None] * p).flatten()
    return probabilities


def chi_square_p_value(samples: torch.Tensor, probabilities: torch.Tensor) -> float:
    """P(a chi-square as large) for integer samples; outcomes that are expected less than 5 times are pooled.

    An outcome of probability 0 that occurs gives 0.
    """
    counts = torch.bincount(samples, minlength=len(probabilities)).double()
    expected = probabilities.double() / probabilities.double().sum() * len(samples)
    if bool((counts[expected == 0.0] > 0).any()):
        return 0.0
    rare = expected < 5.0
    found = [*counts[~rare].tolist(), float(counts[rare].sum())]
    wanted = [*expected[~rare].tolist(), float(expected[rare].sum())]
    if wanted[-1] < 5.0:  # too rare even together: join the rarest of the others
        join = min(range(len(wanted) - 1), key=wanted.__getitem__)
        found[join] += found.pop()
        wanted[join] += wanted.pop()
    return float(stats.chisquare(found, wanted).pvalue)


# Enumeration


class _Undecided(Exception):
    """A draw that no script has decided yet, with the probabilities [R, m, K] of its outcomes."""

    def __init__(self, probabilities: torch.Tensor):
        super().__init__()
        self.probabilities = probabilities


class EnumeratedNoise:
    """Stands in for RoundNoise: each row is a world of its own, and a script says what happens in it.

    Draws of one round are independent only if no noise is read twice, so reading a slot of a stream again is an error.
    """

    def __init__(self, script: list[torch.Tensor]):
        self.script = iter(script)
        self.read: set[tuple[int, int]] = set()

    def choose(self, stream: int | torch.Tensor, scores: torch.Tensor, slots: int | torch.Tensor = 0) -> torch.Tensor:
        streams = [stream] if isinstance(stream, int) else stream.unique().tolist()
        numbers = range(slots, slots + scores.shape[1]) if isinstance(slots, int) else slots.flatten().tolist()
        for pair in itertools.product(streams, numbers):
            assert pair not in self.read, f"slot {pair[1]} of stream {pair[0]} is read twice in one round"
            self.read.add(pair)
        p = scores.softmax(dim=-1)
        first = torch.zeros_like(p)
        first[..., 0] = 1.0  # where a row holds NaN, as past a row's length, nothing is at stake
        return self._outcome(torch.where(p.isnan(), first, p))

    def accepts(self, p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
        heads = torch.where(q <= p, (p > 0.0).to(p.dtype), p / q).nan_to_num(nan=0.0)
        return self._outcome(torch.stack([1.0 - heads, heads], dim=-1)).bool()

    def _outcome(self, probabilities: torch.Tensor) -> torch.Tensor:
        if probabilities.shape[1] == 0:
            return torch.zeros(probabilities.shape[:2], dtype=torch.long)
        scripted = next(self.script, None)
        if scripted is None:
            raise _Undecided(probabilities)
        return scripted


def enumerate_worlds(
    run: Callable[[torch.Tensor, EnumeratedNoise], Verdict], num_rows: int
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    """Every outcome of `run(rows, noise)`: its result over all worlds, the row each world began as, its probability.

    `run` is started again at each draw, with the worlds multiplied by that draw's outcomes; it must be a pure function
    of the rows and of what it draws.
    """
    rows, weights = torch.arange(num_rows), torch.ones(num_rows, dtype=torch.float64)
    script: list[torch.Tensor] = []
    while True:
        try:
            return run(rows, EnumeratedNoise(script)), rows, weights
        except _Undecided as draw:
            num_draws, num_outcomes = draw.probabilities.shape[1:]
            outcomes = torch.tensor(list(itertools.product(range(num_outcomes), repeat=num_draws)))
            branches = torch.ones(len(rows), len(outcomes), dtype=torch.float64)
            for i in range(num_draws):
                branches *= draw.probabilities[:, i, outcomes[:, i]]
            parent, outcome = branches.nonzero(as_tuple=True)
            rows, weights = rows[parent], weights[parent] * branches[parent, outcome]
            script = [*(past[parent] for past in script), outcomes[outcome]]


def _enumerate_round(
    target: Language, propose: Propose, rule: Rule, starts: list[Text]
) -> tuple[Verdict, torch.Tensor, torch.Tensor]:
    def run(rows: torch.Tensor, noise: EnumeratedNoise) -> Verdict:
        return verification(target, propose, rule, [starts[row] for row in rows.tolist()], noise)

    verdict, rows, weights = enumerate_worlds(run, len(starts))
    assert int(verdict.num_accepted.min()) >= 0, "a row was marked as broken"
    return verdict, rows, weights
