"""A drafter behind transformers' CandidateGenerator, for its own decoding loop: one row, chains.

Our loop does not use it. It lets a drafter run in transformers' `_assisted_decoding`, which is an independent
implementation to compare with.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation import CandidateGenerator

from ..decoding.processors import BlockProcessors
from ..decoding.rows import Rows
from ..decoding.stopping import Stops
from ..drafters.base import Drafter
from ..verification import Draft, Sampled, Verdict
from .generate import draft_request
from .options import call_noise, num_draft_tokens, resolve


class DrafterCandidates(CandidateGenerator):
    """Candidates of one drafter session.

    Sampled chains carry their law, so transformers verifies them by rejection; other drafts are compared with the
    target's choice.

    Args:
        model: the target.
        drafter: a drafter that needs no signals from the target.
        input_ids: [1, W] the prompt.
        generation_config, logits_processor: of the call.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        drafter: Drafter,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        logits_processor: Iterable[Any],
    ) -> None:
        if input_ids.shape[0] != 1 or drafter.signals.hidden_states:
            raise ValueError(
                "transformers' own loop serves one row and drafters that need no hidden states of the target."
            )
        if drafter.spec_config.lenience is not None:
            raise ValueError(
                f"`lenience` is {drafter.spec_config.lenience!r}; transformers' own loop is lossless, leave it at None."
            )
        if drafter.spec_config.controller is not None:
            raise ValueError("`controller` has no effect in transformers' own loop; leave it at None.")
        self.num_tokens = num_draft_tokens(drafter, generation_config).first
        self.max_width = generation_config.max_length
        columns = self.max_width + self.num_tokens + 1
        self.rows = Rows(input_ids, None, pad_token_id=0)
        self.stops = Stops(self.max_width, ())
        self.rounds = 0
        config = resolve(drafter, generation_config)
        noise, _ = call_noise(config, generation_config, input_ids)
        processors = BlockProcessors(logits_processor)
        self.session = drafter.start(draft_request(model, self.rows, None, processors, config, noise, columns))
        self.draft = Draft.empty(1, input_ids.device)

    def get_candidates(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """(text and draft [1, W + n], log-weights of the draft [1, n, V] or None)."""
        self.rounds += 1
        budget = min(self.num_tokens, self.max_width - input_ids.shape[1] - 1)
        self.draft = Draft.empty(1, input_ids.device)
        if budget > 0:
            self.draft = self.session.propose([budget], self.rounds)
        law = self.draft.law
        logits = law.logits if isinstance(law, Sampled) and not law.shared_noise and law.ids is None else None
        return torch.cat([input_ids, self.draft.tokens], dim=1), logits

    def update_candidate_strategy(self, input_ids: torch.Tensor, scores: torch.Tensor, num_matches: int) -> None:
        """Learn the text after a verification."""
        new = input_ids[:, self.rows.widths[0] :]
        accepted = torch.tensor([new.shape[1] - 1], device=input_ids.device)
        verdict = Verdict(accepted, new)
        self.rows.commit(self.draft, verdict, self.stops)
        self.session.observe(None, verdict)
