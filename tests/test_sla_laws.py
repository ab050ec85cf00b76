"""A controller's lossless settings keep the target's law: exact enumeration under `rejection` and `block`.

The real controller moves after each round, by times that depend on the text so far in every way they can. The controls
let it look at what has just been drafted. Under `coupled` the text itself does not change: tests/test_sla_calls.py.
"""

import pytest
import torch
from laws import EXACT, Language, emitted_law, law_error, random_language, tabulate

from hf_specdec import SLAController
from hf_specdec.scheduling import sla
from hf_specdec.verification import DRAFT, Draft, Sampled

LONGEST, NUM_TOKENS = 2, 4
SETTINGS = {(1, 1.0, 2): 500.0, (2, 1.0, 1): 510.0, (2, 1.0, 2): 520.0, (1, 1.0, 0): 530.0}


@pytest.fixture(autouse=True)
def windows_of_one_round(monkeypatch):
    monkeypatch.setattr(sla, "_WINDOW", 1)


def setting_after(text: tuple[int, ...]) -> sla.Setting:
    """What a new controller does after a first round that emitted `text`, whose time depends on all of it."""
    ours = SLAController(SETTINGS, max_tpot_ms=600.0)
    start = ours.setting
    for number, token in enumerate(text):
        ours.observe(ours.setting, 0.4 + 0.5 * ((token + number) % 3), 1.0)
    return ours.setting if text else start


def controlled(efforts: dict[int, Language], peeks: str = ""):
    """Drafts by the effort and to the length of the setting.

    Args:
        efforts: the drafter's law at each.
        peeks: "length" drafts nothing where the first token came out as 0, "effort" takes what was drawn with one
            effort for a draft of the other, by what came out.
    """

    def propose(texts, noise) -> Draft:
        settings = {text: setting_after(text) for text in texts}
        tokens, logits = torch.full((len(texts), LONGEST), -1), []
        for slot in range(LONGEST):
            law = lambda text, slot=slot: efforts[settings[text[: len(text) - slot] if slot else text].effort](text)  # noqa: E731
            scores = tabulate_from(law, texts, tokens[:, :slot])
            logits.append(scores)
            tokens[:, slot] = noise.choose(DRAFT, scores.unsqueeze(1), slot)[:, 0]
        lengths = torch.tensor([settings[text].num_draft_tokens for text in texts])
        if peeks == "length":
            lengths = torch.where(tokens[:, 0] == 0, 0, lengths)
        if peeks == "effort":
            other = tabulate(efforts[1], texts, tokens[:, :0])
            logits[0] = torch.where((tokens[:, :1] == 0), other, logits[0])
        return Draft(tokens, torch.full_like(lengths, LONGEST), Sampled(torch.stack(logits, dim=1))).cut(
            lengths, LONGEST
        )

    return propose


def tabulate_from(law, texts, tokens):
    """As `tabulate`, for a law that also depends on where the round began."""
    return torch.stack([law((*text, *new)) for text, new in zip(texts, tokens.tolist(), strict=True)])


def error(rule: str, seed: int, peeks: str = "") -> float:
    target = random_language(3, seed, filtered=0.0)
    efforts = {1: random_language(3, 100 + seed, filtered=0.0), 2: random_language(3, 200 + seed, filtered=0.0)}
    law = emitted_law(target, controlled(efforts, peeks), rule, NUM_TOKENS)
    assert sum(law.values()) == pytest.approx(1.0, abs=EXACT)
    return law_error(target, law, NUM_TOKENS)


def test_the_controller_moves_between_the_rounds():
    texts = [(a,) for a in range(3)] + [(a, b) for a in range(3) for b in range(3)]
    assert {setting_after(text) for text in texts} >= {(1, 1.0, 2), (2, 1.0, 1), (2, 1.0, 2)}


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_the_text_has_the_targets_law(rule):
    for seed in range(4):
        assert error(rule, seed) < EXACT


@pytest.mark.parametrize("peeks", ["length", "effort"])
@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_control_a_decision_that_looks_at_the_draft_is_found_out(rule, peeks):
    assert max(error(rule, seed, peeks) for seed in range(3)) > 1e-3
