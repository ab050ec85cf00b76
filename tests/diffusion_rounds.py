"""Generate calls whose diffusion passes are watched, and whose drafts are made right and wrong by turns."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from diffusion_formats import BEGIN, FORMATS, MASK, random_model, write_model
from test_greedy import coin, plain, speculative

from hf_specdec import AutoDrafter
from hf_specdec.drafters.diffusion.reveal import ORDERS
from hf_specdec.drafters.diffusion.session import DiffusionSession
from hf_specdec.verification import Draft


class Pass(NamedTuple):
    """A pass as the drafter ran it.

    Attributes:
        texts, finished: of the rows.
        canvas: [B, n] tokens in the slots, MASK where they are masked.
        logits: [B, n, V].
    """

    texts: list[list[int]]
    finished: list[bool]
    canvas: torch.Tensor
    logits: torch.Tensor


class Watched(DiffusionSession):
    """Keeps its passes, and makes `right(row, round)` of the drafted tokens right and the next one wrong."""

    def __init__(self, drafter, request, passes: list[Pass], to_come, right: Callable) -> None:
        order = ORDERS.get(drafter.reveal_order, ORDERS["confidence"])
        super().__init__(drafter.canvases(request), request, order, drafter.final_resample)
        self.to_come, self.right = to_come, right
        self.prompt_lengths = [len(text) for text in request.rows.texts]
        run = self.canvases.run

        def watched(tokens: torch.Tensor, masked: torch.Tensor) -> torch.Tensor:
            logits = run(tokens, masked)
            rows = self.rows
            canvas = tokens.masked_fill(masked, MASK)
            passes.append(Pass([list(text) for text in rows.texts], list(rows.finished), canvas, logits.clone()))
            return logits

        self.canvases.run = watched

    def propose(self, budget, verification) -> Draft:
        draft = super().propose(budget, verification)
        tokens = draft.tokens.clone()
        for row, text in enumerate(self.rows.texts):
            truth = self.to_come[row][len(text) - self.prompt_lengths[row] :]
            for slot in range(min(int(draft.lengths[row]), len(truth), self.right(row, verification) + 1)):
                wrong = slot == self.right(row, verification)
                tokens[row, slot] = (truth[slot] + wrong) % self.request.vocab_size
        return Draft(tokens, draft.lengths, draft.law)


def load(folder, format: str, target, model=None, **options):
    """A drafter of a format, with its random model."""
    model = random_model(format) if model is None else model
    return AutoDrafter.from_pretrained(write_model(folder, format, model), target=target, **options)


def passes_of(drafter, target, inputs, right: Callable = coin, **options) -> list[Pass]:
    """The passes of a greedy call, drafts made right and wrong by turns, whose text must be the target's."""
    passes: list[Pass] = []
    drafter.spec_config = drafter.spec_config.with_options(governor="off")  # it goes by time
    expected = plain(target, inputs, **options)
    to_come = expected[:, inputs["input_ids"].shape[1] :].tolist()
    drafter.start = lambda request: Watched(drafter, request, passes, to_come, right)
    assert torch.equal(speculative(target, inputs, drafter, **options), expected)
    return passes


def reference(model, format: str, text: list[int], canvas: list[int], vocab_size: int) -> torch.Tensor:
    """[n, V] logits of a canvas behind a text: one forward of the whole, without padding and without a cache."""
    how, num_slots = FORMATS[format], len(canvas)
    size = how.block_size or 32
    length = len(text) + max(num_slots, size)
    if how.block_size is not None:
        length = -(-(len(text) + num_slots) // size) * size
    between = [BEGIN] if how.separates else []
    ids = torch.tensor([[*text, *between, *canvas, *[MASK] * (length - len(text) - num_slots)]])
    length += len(between)
    ids = ids.clamp_max(model.config.vocab_size - 1)  # the target may have more
    blocks = torch.arange(length) // (size if how.block_size is not None else length)
    seen = blocks[None] <= blocks[:, None]
    mask = torch.zeros(1, 1, length, length).masked_fill(~seen, torch.finfo(torch.float32).min)
    with torch.no_grad():
        logits = model(ids, attention_mask=mask).logits[0]
    first = len(text) + len(between) - how.shifts
    logits = logits[first : first + num_slots]
    logits[:, [MASK, BEGIN] if how.begin else [MASK]] = -torch.inf
    missing = max(0, vocab_size - logits.shape[-1])
    return torch.nn.functional.pad(logits[:, :vocab_size], (0, missing), value=-torch.inf)


def largest_error(passes: list[Pass], model, format: str, vocab_size: int) -> float:
    """Of the logits of every slot of every running row."""
    worst = 0.0
    assert passes
    for one in passes:
        for row, text in enumerate(one.texts):
            if not one.finished[row]:
                expected = reference(model, format, text, one.canvas[row].tolist(), vocab_size)
                assert torch.equal(expected.isinf(), one.logits[row].isinf())
                finite = expected.isfinite()
                worst = max(worst, float((expected - one.logits[row])[finite].abs().max()))
    return worst
