"""DFlash drafters of tiny networks, and their sessions outside of a generate call."""

import torch
from dflash_formats import Net, write_net
from tiny import VOCAB_SIZE

from hf_specdec import AutoDrafter
from hf_specdec.config import SpecConfig
from hf_specdec.decoding.rows import Rows
from hf_specdec.decoding.stopping import Stops
from hf_specdec.drafters.base import Signals
from hf_specdec.drafters.request import DraftRequest
from hf_specdec.verification import Draft, Verdict


def load(folder, net: Net, target, format: str = "z-lab", **options):
    return AutoDrafter.from_pretrained(write_net(folder / format, net, format), target=target, **options)


def request_of(rows, target, max_columns: int) -> DraftRequest:
    """A greedy call without processors."""
    return DraftRequest(
        rows=rows,
        attention_mask=None,
        embedding=target.get_input_embeddings(),
        head=target.get_output_embeddings(),
        process=lambda scores, slot: scores,
        processors_read_ids=False,
        config=SpecConfig(rule="match", draft_sampling="greedy"),
        vocab_size=VOCAB_SIZE,
        noise=None,
        max_columns=max_columns,
    )


def block_after(drafter, target, text: list[int], states: dict[int, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """([n, H] states, [n, V] logits) of the rows that guess after a text.

    Args:
        states: index -> [len(text) - 1, H] hidden states of the target, as if it had given them.
    """
    rows, request_columns = Rows(torch.tensor([text[:-1]]), None, 0), len(text) + 64
    session = drafter.start(request_of(rows, target, request_columns))
    verdict = Verdict(torch.tensor([0]), torch.tensor([text[-1:]]))
    rows.commit(Draft.empty(1, rows.ids.device), verdict, Stops(request_columns, eos_token_ids=[]))
    session.observe(Signals({i: one[None] for i, one in states.items()}), verdict)
    with torch.no_grad():
        guessing = session.run_block()
        logits = drafter.scatter(drafter.logits(guessing, session.request), session.request)
    return guessing[0], logits[0]
