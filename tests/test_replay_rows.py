"""What replay costs: the rows of a verification stay few, whatever is accepted, and the state is always the text's."""

import random
from types import SimpleNamespace

import pytest
import torch
from scripted import ScriptedDrafter
from tiny import VOCAB_SIZE, tiny_config
from transformers import GenerationConfig

from hf_specdec.config import SpecConfig
from hf_specdec.decoding.loop import Call, speculate
from hf_specdec.decoding.outputs import Publisher, Recorder
from hf_specdec.decoding.processors import BlockProcessors
from hf_specdec.decoding.rows import Rows
from hf_specdec.decoding.stopping import Stops
from hf_specdec.drafters import TargetSignals
from hf_specdec.drafters.request import DraftRequest
from hf_specdec.integration.own_target import OwnModel, OwnTarget, ReplayGovernor
from hf_specdec.metrics import RowStats, SpecStats
from hf_specdec.scheduling import Governor

NEW_TOKENS, PROMPT, LENGTH = 2_000, 7, 5


class Recurrent:
    """A target that knows its text, and a cache that can only be copied: the tokens that it has read.

    Attributes:
        rows: tokens of each forward after the prefill.
        drafted: what each of them drafted.
    """

    def __init__(self, text: list[int]) -> None:
        self.text, self.rows, self.config = text, [], tiny_config("llama")

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, cache=None, **kwargs):
        return {"input_ids": input_ids[:, -next_sequence_length:], "cache": cache}

    def register_forward_hook(self, hook):
        return SimpleNamespace(remove=lambda: None)

    def _prefill(self, input_ids, config, kwargs):
        return self(input_ids, kwargs["cache"])

    def __call__(self, input_ids, cache, return_dict=True):
        if cache.tokens:
            self.rows.append(input_ids.shape[1])
        start = len(cache.tokens)
        assert cache.tokens == self.text[:start], "the state has read what is not the text"
        cache.tokens.extend(input_ids[0].tolist())
        following = torch.tensor(self.text[start + 1 : len(cache.tokens) + 1])
        return Output(torch.nn.functional.one_hot(following, VOCAB_SIZE)[None].float(), cache)


class Output(SimpleNamespace):
    def __init__(self, logits, cache):
        super().__init__(logits=logits, cache=cache)

    def get(self, name):
        return getattr(self, name, None)


def run(acceptance: float, governor: type[Governor] = ReplayGovernor) -> tuple[Recurrent, SpecStats]:
    """Generate with drafts of which each token is right with that probability."""
    generator = random.Random(int(100 * acceptance))
    text = [generator.randrange(3, VOCAB_SIZE) for _ in range(PROMPT + NEW_TOKENS + LENGTH + 2)]
    rights = {}

    def right(row: int, round: int) -> int:
        if round not in rights:
            rights[round] = next((i for i in range(LENGTH) if generator.random() >= acceptance), LENGTH)
        return rights[round]

    model, prompt = Recurrent(text), torch.tensor([text[:PROMPT]])
    rows = Rows(prompt, None, 0)
    kwargs = {"cache": SimpleNamespace(tokens=[])}
    target = OwnTarget(OwnModel(model, prompt, GenerationConfig(), kwargs, "replay"), TargetSignals())
    request = DraftRequest(
        rows=rows, attention_mask=None, embedding=torch.nn.Identity(), head=None, process=lambda scores, slot: scores,
        processors_read_ids=False, config=SpecConfig(), vocab_size=VOCAB_SIZE, noise=None, max_columns=len(text),
    )  # fmt: skip
    arguments = {"num_tokens": LENGTH, "max_tokens": LENGTH, "adaptive": False}
    if governor is ReplayGovernor:
        arguments.update(target=target, rows=rows)
    stats = SpecStats(rows=[RowStats()])
    call = Call(
        target=target,
        session=ScriptedDrafter([text[PROMPT:]], right=right).start(request),
        processors=BlockProcessors([]),
        stops=Stops(PROMPT + NEW_TOKENS, ()),
        max_positions=None,
        rule="match",
        kernels="torch",
        noise=None,
        governor=governor(**arguments),
        schedule=None,
        publisher=Publisher(None, rows),
        recorder=Recorder(),
        completes=False,
    )
    speculate(call, rows, stats)
    assert rows.texts[0] == text[: PROMPT + NEW_TOKENS]
    return model, stats


@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.5, 0.9, 1.0])
def test_a_verification_never_has_more_rows_than_cap_and_draft_and_one(acceptance):
    model, stats = run(acceptance)
    assert stats.num_emitted == NEW_TOKENS
    assert max(model.rows) <= LENGTH + LENGTH + 1
    assert stats.num_forwards == len(model.rows) + 1, "no forward goes without a token"
    plain_steps = stats.num_plain_steps - 1  # the prefill
    if acceptance == 1.0:
        assert plain_steps <= 1 and set(model.rows[:-1]) == {LENGTH + 1}
    else:
        assert plain_steps > 0, "rounds without a draft are what keeps the rows few"


def test_without_the_cap_rows_pile_up():
    model, _ = run(0.5, Governor)
    assert max(model.rows) > 3 * LENGTH
