"""Drafters that do what a test tells them."""

from collections.abc import Callable, Sequence

import torch

from hf_specdec import Drafter
from hf_specdec.drafters import DraftRequest, DraftSession, TargetSignals
from hf_specdec.verification import DRAFT, TARGET, Draft, OneHot, RoundNoise, Sampled


class ScriptedDrafter(Drafter):
    """Knows the text that is to come, and drafts as much of it rightly as the script says.

    Args:
        texts: the new tokens that each row is going to emit.
        right: (row, round) -> how many drafted tokens are right; the one after them is wrong.
        hidden_states: layers to ask the target for.

    Attributes:
        seen: (signals, first column, columns of text) of each target forward that was followed by another.
        budgets: of each round.
    """

    method = "scripted"
    default_num_draft_tokens = 4

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        right: Callable[[int, int], int] = lambda row, round: 1_000,
        hidden_states: tuple[int, ...] = (),
        **options,
    ) -> None:
        super().__init__(**options)
        self.texts, self.right, self.hidden_states = [list(text) for text in texts], right, hidden_states
        self.seen: list = []
        self.budgets: list[list[int]] = []

    @property
    def signals(self) -> TargetSignals:
        return TargetSignals(hidden_states=self.hidden_states)

    def start(self, request: DraftRequest) -> DraftSession:
        return ScriptedSession(self, request)


class ScriptedSession(DraftSession):
    def __init__(self, drafter: ScriptedDrafter, request: DraftRequest) -> None:
        self.drafter, self.rows, self.vocab_size = drafter, request.rows, request.vocab_size
        self.prompt_lengths = [len(text) for text in request.rows.texts]
        self.first_column = 0

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        self.drafter.budgets.append(list(budget))
        drafts = []
        for row, k in enumerate(budget):
            done = len(self.rows.texts[row]) - self.prompt_lengths[row]
            to_come = self.drafter.texts[row][done : done + k]
            to_come += [3] * (k - len(to_come))
            right = self.drafter.right(row, verification)
            if right < k:
                to_come[right] = (to_come[right] + 1) % self.vocab_size
            drafts.append(to_come + [-1] * (max(budget) - k))
        device = self.rows.ids.device
        return Draft(torch.tensor(drafts, device=device), torch.tensor(list(budget), device=device), OneHot())

    def observe(self, signals, verdict) -> None:
        columns = self.rows.widths[0] - 1 - self.first_column  # all but the newest token have been an input
        self.drafter.seen.append((signals, self.first_column, columns))
        self.first_column += columns


class RowScript(ScriptedDrafter):
    """A script for all rows at once, or for rows that are run one after another: each start is then the next row's."""

    def start(self, request: DraftRequest) -> DraftSession:
        if len(request.rows.texts) == len(self.texts):
            return super().start(request)
        row = getattr(self, "row", 0)
        self.row = (row + 1) % len(self.texts)
        one = ScriptedDrafter([self.texts[row]], right=lambda _, round: self.right(row, round))
        one.hidden_states, one.seen, one.budgets = self.hidden_states, self.seen, self.budgets
        return one.start(request)


class RandomDrafter(Drafter):
    """Draws every token from its own random law, which depends on the text's last token.

    Args:
        vocab_size: of the target.
        seed: of the laws.
        declared: "law" tells the truth; "uniform" declares another law than the one it drew from, which is wrong.
    """

    method = "random"
    default_num_draft_tokens = 3

    def __init__(self, vocab_size: int, seed: int = 0, declared: str = "law", **options) -> None:
        super().__init__(**options)
        generator = torch.Generator().manual_seed(seed)
        self.laws = torch.randn(vocab_size, vocab_size, generator=generator) * 1.5
        self.declared = declared

    def start(self, request: DraftRequest) -> DraftSession:
        return RandomSession(self, request)


class RandomSession(DraftSession):
    def __init__(self, drafter: RandomDrafter, request: DraftRequest) -> None:
        self.drafter, self.request = drafter, request

    def propose(self, budget: Sequence[int], verification: int) -> Draft:
        request, rows = self.request, self.request.rows
        coupled = request.config.rule == "coupled"
        noise = RoundNoise(request.noise, rows.positions, verification)
        token, tokens, laws = rows.last_tokens(), [], []
        for slot in range(max(budget)):
            logits = self.drafter.laws[token]
            token = noise.choose(TARGET if coupled else DRAFT, logits, slot)
            tokens.append(token)
            laws.append(torch.zeros_like(logits) if self.drafter.declared == "uniform" else logits)
        lengths = torch.tensor(list(budget))
        drafted = torch.cat(tokens, dim=1)
        drafted = drafted.masked_fill(torch.arange(max(budget)) >= lengths[:, None], -1)
        return Draft(drafted, lengths, Sampled(torch.cat(laws, dim=1), shared_noise=coupled))
