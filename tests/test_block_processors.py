"""decoding/processors.py: a block of positions at once has the scores of position by position."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_processors import BanThirdLast
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    EncoderRepetitionPenaltyLogitsProcessor,
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    ExponentialDecayLengthPenalty,
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    InfNanRemoveLogitsProcessor,
    LogitNormalization,
    LogitsProcessor,
    LogitsProcessorList,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    TemperatureLogitsWarper,
    TopHLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
    WatermarkLogitsProcessor,
)

from hf_specdec.decoding import processors as processors_module
from hf_specdec.decoding.processors import BlockProcessors

VOCAB = 43
CPU = torch.device("cpu")
WATERMARKS = [
    WatermarkLogitsProcessor(VOCAB, CPU, seeding_scheme="lefthash"),
    WatermarkLogitsProcessor(VOCAB, CPU, seeding_scheme="selfhash", context_width=2),
]


def pure_processors(batch_size: int) -> list:
    """Every processor of transformers that is a function of (ids, scores), small enough to bite on short rows."""
    prompt = torch.arange(batch_size * 4).view(batch_size, 4) * 5 % VOCAB
    return [
        TemperatureLogitsWarper(0.7),
        TopKLogitsWarper(4),
        TopPLogitsWarper(0.8),
        MinPLogitsWarper(0.1),
        TopHLogitsWarper(0.6),
        TypicalLogitsWarper(0.7),
        EpsilonLogitsWarper(0.05),
        EtaLogitsWarper(0.1, device="cpu"),
        SuppressTokensLogitsProcessor([1, 4, 20]),
        InfNanRemoveLogitsProcessor(),
        LogitNormalization(),
        RepetitionPenaltyLogitsProcessor(1.7),
        RepetitionPenaltyLogitsProcessor(1.7, prompt_ignore_length=torch.arange(batch_size)),
        NoRepeatNGramLogitsProcessor(1),
        NoRepeatNGramLogitsProcessor(2),
        EncoderRepetitionPenaltyLogitsProcessor(1.5, prompt),
        EncoderNoRepeatNGramLogitsProcessor(2, prompt),
        SequenceBiasLogitsProcessor({(1,): 2.0, (3, 4): -5.0, (2, 5, 1): 4.0}),
        NoBadWordsLogitsProcessor([[6], [2, 7]], eos_token_id=0),
        MinLengthLogitsProcessor(7, 0),
        MinNewTokensLengthLogitsProcessor(4, 3, 0),
        ForcedBOSTokenLogitsProcessor(3),
        ForcedEOSTokenLogitsProcessor(8, 0),
        ExponentialDecayLengthPenalty((2, 1.5), torch.tensor([0]), 3),
        SuppressTokensAtBeginLogitsProcessor([2, 8, 9], 5),
        PrefixConstrainedLogitsProcessor(
            lambda row, ids: [token for token in range(VOCAB) if (token + int(ids[-1]) + row) % 3], 1
        ),
        BanThirdLast(),
        *WATERMARKS,
    ]


def position_by_position(processors, scores, widths, ids):
    """The reference: each position by itself, as a plain step would have it."""
    expected = torch.empty_like(scores)
    for b, width in enumerate(widths):
        for i in range(scores.shape[1]):
            step = scores[b, i].repeat(len(widths), 1)
            expected[b, i] = LogitsProcessorList(processors)(ids[:, : width + i].clone(), step)[b]
    return expected


def assert_equal_as_far_as_it_counts(processors, scores, widths, ids, seed=0):
    """Equal at every position that can be reached: none is behind a drafted token that is forbidden.

    Most drafted tokens are made the best ones first, so that blocks are reached to their ends. Returns their number.
    """
    best = torch.rand(scores.shape[:2], generator=torch.Generator().manual_seed(seed)) < 0.8
    for i in range(scores.shape[1]):
        expected = position_by_position(processors, scores[:, : i + 1], widths, ids)[:, i]
        for b, width in enumerate(widths):
            if best[b, i]:
                ids[b, width + i] = expected[b].argmax()
    expected = position_by_position(processors, scores, widths, ids)
    found = BlockProcessors(processors)(scores.clone(), widths, ids.clone())
    reached = 0
    for b, width in enumerate(widths):
        for i in range(scores.shape[1]):
            torch.testing.assert_close(found[b, i], expected[b, i], rtol=0, atol=1e-6, equal_nan=True)
            reached += 1
            if expected[b, i, ids[b, width + i]] < -1e30:  # infinities are finite once they are removed
                break
    return reached


def random_block(batch_size, num_positions, widths, seed):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(batch_size, num_positions, VOCAB, generator=generator) * 3
    ids = torch.randint(VOCAB, (batch_size, max(widths) + num_positions), generator=generator)
    return scores, ids


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_block_of_scores_equals_position_by_position(data):
    batch_size, num_positions = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 5))
    widths = data.draw(st.lists(st.integers(3, 9), min_size=batch_size, max_size=batch_size))
    if data.draw(st.booleans()):
        widths = widths[:1] * batch_size
    known = pure_processors(batch_size)
    chosen = data.draw(st.lists(st.integers(0, len(known) - 1), min_size=0, max_size=5))
    processors = [known[i] for i in chosen]
    seed = data.draw(st.integers(0, 1000))
    scores, ids = random_block(batch_size, num_positions, widths, seed)
    assert_equal_as_far_as_it_counts(processors, scores, widths, ids, seed)


@pytest.mark.parametrize("index", range(len(pure_processors(1))))
def test_each_processor_by_itself_over_ragged_rows(index):
    widths = [4, 8, 3]
    processor = pure_processors(3)[index]
    reached = 0
    for seed in range(4):
        scores, ids = random_block(3, 4, widths, seed)
        reached += assert_equal_as_far_as_it_counts([processor], scores, widths, ids, seed)
    assert reached > 4 * 3 * 4 * 0.6


class Counting(LogitsProcessor):
    def __init__(self):
        self.shapes = []

    def __call__(self, input_ids, scores):
        self.shapes.append((tuple(input_ids.shape), tuple(scores.shape)))
        return scores


def test_warpers_run_once_a_block_and_others_once_a_width(monkeypatch):
    counting = Counting()
    warped = []
    call = TopKLogitsWarper.__call__

    def counted(self, input_ids, scores):
        warped.append(tuple(scores.shape))
        return call(self, input_ids, scores)

    monkeypatch.setattr(TopKLogitsWarper, "__call__", counted)
    processors = BlockProcessors([counting, TopKLogitsWarper(4)])
    scores, ids = random_block(2, 3, [5, 6], seed=0)
    processors(scores, [5, 6], ids)
    assert warped == [(6, VOCAB)]
    assert counting.shapes == [((2, width), (2, VOCAB)) for width in (5, 6, 7, 8)]
    counting.shapes.clear()
    processors(scores, [5, 5], ids)
    assert counting.shapes == [((2, width), (2, VOCAB)) for width in (5, 6, 7)]
    counting.shapes.clear()
    scores, ids = random_block(2, 2, [5, 50], seed=0)
    processors(scores, [5, 50], ids)  # rows that are far apart cost nothing more
    assert counting.shapes == [((2, width), (2, VOCAB)) for width in (5, 6, 50, 51)]


def test_a_subclass_of_a_warper_may_look_at_the_ids():
    class TopKAfterAnOddToken(TopKLogitsWarper):
        def __call__(self, input_ids, scores):
            return torch.where(input_ids[:, -1:] % 2 == 1, super().__call__(input_ids, scores), scores)

    processors, widths = [TopKAfterAnOddToken(2)], [5, 4]
    assert BlockProcessors(processors).read_ids
    scores, ids = random_block(2, 4, widths, seed=1)
    assert assert_equal_as_far_as_it_counts(processors, scores, widths, ids) == 8


def test_taking_a_processor_that_looks_at_ids_for_a_warper_gives_other_scores(monkeypatch):
    """Negative control: what the sorting into kinds protects from."""
    processors, widths = [RepetitionPenaltyLogitsProcessor(1.7)], [5, 5]
    scores, ids = random_block(2, 4, widths, seed=2)
    expected = position_by_position(processors, scores, widths, ids)
    monkeypatch.setattr(processors_module, "_WARPER_TYPES", (RepetitionPenaltyLogitsProcessor,))
    assert not torch.allclose(BlockProcessors(processors)(scores.clone(), widths, ids), expected)


def test_every_processor_of_transformers_that_keeps_state_is_known():
    """A class whose __call__ writes to itself counts on being called once a token."""
    import ast
    import inspect

    from transformers.generation import logits_process

    # What these write is the same at every call: a table's device, biases prepared at the first call.
    harmless = {
        "ExponentialDecayLengthPenalty",
        "RepetitionPenaltyLogitsProcessor",
        "SequenceBiasLogitsProcessor",
        "NoBadWordsLogitsProcessor",
    }
    tree = ast.parse(inspect.getsource(logits_process))
    writing = set()
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or not node.name.endswith(
            ("Processor", "Warper", "Detection", "Penalty")
        ):
            continue
        for method in node.body:
            if isinstance(method, ast.FunctionDef) and method.name != "__init__" and not method.name.startswith("set_"):
                for inner in ast.walk(method):
                    targets = inner.targets if isinstance(inner, ast.Assign) else []
                    if any(ast.unparse(target).startswith("self.") for target in targets):
                        writing.add(node.name)
    assert writing - harmless <= set(processors_module._STATEFUL), "sort the new ones in decoding/processors.py"
