"""Training block drafters from end to end: they learn, and their scores are those of the drafts that they make."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_training_data import gather, random_prompts
from test_training_loop import LAYERS, mean_accepted_length
from tiny import tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.dflash.session import DFlashSession
from hf_specdec.drafters.dspark.session import DSparkSession
from hf_specdec.export.blocks import save_block_drafter
from hf_specdec.training.batches import held_out_batches, train_batches
from hf_specdec.training.blocks import BlockOptions, BlockTraining, DSparkOptions, new_block_drafter
from hf_specdec.training.loop import TrainOptions, evaluate, train
from hf_specdec.training.shards import read_ids, shards
from hf_specdec.training.vocabulary import most_frequent, unused_token

SMALL = dict(num_drafts=3, num_layers=2, anchor_stride=1, mask_token_id=4)
OPTIONS = {"dflash": BlockOptions(**SMALL), "dspark": DSparkOptions(**SMALL, markov_rank=16, cross_entropy=1.0)}
SESSIONS = {"dflash": DFlashSession, "dspark": DSparkSession}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Greedy answers of the target."""
    return gather(tmp_path_factory.mktemp("training") / "data", random_prompts(33), num_tokens=10_000, num_rows=8)


@pytest.fixture(scope="module", params=OPTIONS)
def trained(request, folder, tmp_path_factory):
    """(module, accelerator, folder of the drafter as it was, and as it is after training)."""
    work, options = tmp_path_factory.mktemp(request.param), OPTIONS[request.param]
    torch.manual_seed(0)
    target_ids, _ = most_frequent(folder, 97, 97)
    module = BlockTraining(new_block_drafter(tiny_target(), LAYERS, 97, options), tiny_target(), target_ids, options)
    AcceleratorState._reset_state(reset_partial_state=True)  # one for the process
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    save_block_drafter(work / "new", module.model, module.lm_head, None, "tiny", torch.float32)
    plan = TrainOptions(epochs=120, batch_tokens=300, learning_rate=1e-2, checkpoint_steps=1000)
    train(module, accelerator, folder, work / "checkpoint", plan)
    save_block_drafter(work / "trained", module.model, module.lm_head, None, "tiny", torch.float32)
    return request.param, module, accelerator, work


def drafter_of(folder: Path):
    return AutoDrafter.from_pretrained(folder, target=tiny_target(), governor="off")


def test_a_drafter_learns_what_its_target_says(folder, trained):
    _, _, _, work = trained
    assert mean_accepted_length(drafter_of(work / "new"), folder) < 1.5
    assert mean_accepted_length(drafter_of(work / "trained"), folder) > 2.3


def test_acceptance_in_training_is_that_of_drafts_from_every_token(folder, trained):
    method, module, accelerator, work = trained
    batches = held_out_batches(folder, 600, 10) + list(train_batches(folder, 250, seed=0, epoch=0))[:1]
    found = evaluate(module, accelerator, batches)
    drafter, first_drafts = drafter_of(work / "trained"), []

    class FirstDraft(SESSIONS[method]):
        """Keeps the tokens of its first draft."""

        def propose(self, budget, verification):
            draft = super().propose(budget, verification)
            if not self.kept:
                self.kept = first_drafts.append(draft.tokens[0].tolist()) or True
            return draft

        kept = False

    drafter.start = lambda request: FirstDraft(drafter, request)
    hits, rows = torch.zeros(3), torch.zeros(3)
    for batch in batches:
        for ids, length, prompt_length in zip(batch.ids, batch.lengths, batch.prompt_lengths, strict=True):
            text = ids[:length]
            for root in range(int(prompt_length) + 1, int(length)):
                # The prefill gives the text's next token; the draft goes on from there.
                inputs = dict(input_ids=text[None, : root - 1], attention_mask=torch.ones(1, root - 1))
                options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
                first_drafts.clear()
                tiny_target().generate(**inputs, **options, assistant_model=drafter)
                (drafted,), truth = first_drafts, text[root : root + 3].tolist()
                for depth in range(len(truth)):
                    rows[depth] += 1
                    hits[depth] += drafted[: depth + 1] == truth[: depth + 1]
    assert rows[0] > hits[0] > hits[2] > 0, "the drafter should be right in part"
    torch.testing.assert_close(torch.tensor(found["accepted_per_position"]), hits / rows)


def test_a_token_that_no_text_has_stands_for_those_to_be_guessed(folder):
    used = {token for path in shards(folder) for _, ids, _ in read_ids(path) for token in ids}
    low, middle, high = sorted(set(range(100)) - used)[-3:]
    assert high == 99, "beyond the tokenizer's words"

    def chosen(mask: int | None, *special: int) -> int:
        tokenizer = SimpleNamespace(mask_token_id=mask, added_tokens_decoder=dict.fromkeys(special))
        return unused_token(folder, tokenizer, 100)

    seen = max(used)
    assert chosen(low, middle) == low, "the mask token comes first"
    assert chosen(None, seen, middle, low) == chosen(seen, middle, low) == middle, "then special tokens"
    assert chosen(None) == chosen(seen, seen) == high, "then any"
