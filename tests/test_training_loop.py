"""Training from end to end: a head that learns, runs that go on where they stopped, and the command."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from test_training_data import gather, random_prompts, texts_of, write_prompts
from tiny import prompts, tiny_target, tiny_tokenizer

from hf_specdec import AutoDrafter
from hf_specdec.drafters.eagle3.session import Eagle3Session
from hf_specdec.export.eagle3 import save_eagle3
from hf_specdec.training import loop
from hf_specdec.training.__main__ import main
from hf_specdec.training.batches import held_out_batches, train_batches
from hf_specdec.training.blocks import BlockTraining
from hf_specdec.training.diffusion import DiffusionTraining
from hf_specdec.training.eagle3 import Eagle3Training, new_head
from hf_specdec.training.loop import TrainOptions, evaluate, train
from hf_specdec.training.mtp import MtpTraining
from hf_specdec.training.shards import HELD_OUT, shards
from hf_specdec.training.vocabulary import most_frequent

LAYERS = (0, 2)  # beside the final state, those of test_training_data
FEW_STEPS = TrainOptions(epochs=2, batch_tokens=200, checkpoint_steps=3)


@pytest.fixture(autouse=True)
def fresh_accelerate():
    """Its state is one for the process, and each test asks for a precision of its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Greedy answers of the target."""
    folder = tmp_path_factory.mktemp("training") / "data"
    return gather(folder, random_prompts(33), num_tokens=10_000, num_rows=8)


def new_module(folder: Path, size: int = 80) -> Eagle3Training:
    torch.manual_seed(0)
    target_ids, _ = most_frequent(folder, size, 97)
    return Eagle3Training(
        new_head(tiny_target(), LAYERS, target_ids), tiny_target(), target_ids, num_steps=3, decay=0.8
    )


def on_cpu(precision: str = "no") -> Accelerator:
    return Accelerator(cpu=True, mixed_precision=precision)


def drafter_of(module: Eagle3Training, folder: Path):
    """The drafter that is read from the head as it is written."""
    save_eagle3(folder, module.model, module.draft_ids.ge(0).nonzero().flatten(), torch.float32)
    return AutoDrafter.from_pretrained(folder, target=tiny_target(), num_draft_tokens=3)


def no_step(*arguments):
    raise AssertionError("nothing should be trained")


# Learning


def mean_accepted_length(drafter, folder: Path) -> float:
    """Over the prompts that are trained on; the text must be plain generate's."""
    stats, options = None, dict(max_new_tokens=24, do_sample=False)
    for text in texts_of(folder):
        ids = text.ids[None, : text.prompt_length]
        expected = tiny_target().generate(ids, **options)
        assert torch.equal(tiny_target().generate(ids, **options, assistant_model=drafter), expected)
        if text.index % HELD_OUT:
            stats = drafter.last_stats if stats is None else stats + drafter.last_stats
    return stats.mean_accepted_length


def test_a_head_learns_what_its_target_says(folder, tmp_path):
    module = new_module(folder, size=97)
    assert mean_accepted_length(drafter_of(module, tmp_path / "new"), folder) < 1.5
    options = TrainOptions(epochs=120, batch_tokens=300, learning_rate=2e-2, checkpoint_steps=1000)
    (last,) = train(module, on_cpu(), folder, tmp_path / "checkpoint", options)
    assert last["step"] == last["of"]
    assert mean_accepted_length(drafter_of(module, tmp_path / "trained"), folder) > 2.5


class FirstDraft(Eagle3Session):
    """Keeps the tokens of its first draft."""

    def propose(self, budget, verification):
        draft = super().propose(budget, verification)
        self.drafter.first_drafts.setdefault(id(self), draft.tokens[0].tolist())
        return draft


def test_acceptance_in_training_is_that_of_drafts_from_every_token(folder, tmp_path):
    module, accelerator = new_module(folder), on_cpu()
    train(module, accelerator, folder, tmp_path, TrainOptions(epochs=40, batch_tokens=600, learning_rate=2e-2))
    batches = held_out_batches(folder, 600, 10) + list(train_batches(folder, 250, seed=0, epoch=0))[:1]
    found = evaluate(module, accelerator, batches)
    drafter = drafter_of(module, tmp_path / "head")
    hits, rows = torch.zeros(3), torch.zeros(3)
    for batch in batches:
        for ids, length, prompt_length in zip(batch.ids, batch.lengths, batch.prompt_lengths, strict=True):
            text = ids[:length]
            for root in range(int(prompt_length) + 1, int(length)):
                drafter.first_drafts = {}
                drafter.start = lambda request: FirstDraft(drafter, request)
                # The prefill gives the text's next token; the draft goes on from there.
                inputs = dict(input_ids=text[None, : root - 1], attention_mask=torch.ones(1, root - 1))
                options = dict(max_new_tokens=6, do_sample=False, eos_token_id=None)
                tiny_target().generate(**inputs, **options, assistant_model=drafter)
                (drafted,), truth = drafter.first_drafts.values(), text[root : root + 3].tolist()
                for depth in range(len(truth)):
                    rows[depth] += 1
                    hits[depth] += drafted[: depth + 1] == truth[: depth + 1]
    assert rows[0] > hits[0] > hits[2] > 0, "the head should be right in part"
    torch.testing.assert_close(torch.tensor(found["accepted_per_position"]), hits / rows)
    assert found["tau"] == pytest.approx(1 + float((hits / rows).sum()))


# Going on


def test_a_run_that_was_stopped_ends_with_the_weights_of_one_that_was_not(folder, tmp_path, monkeypatch):
    whole = new_module(folder)
    history = train(whole, on_cpu(), folder, tmp_path / "whole", FEW_STEPS)
    assert len(history) >= 3 and history[-1]["step"] == history[-1]["of"]
    save = loop._save

    def save_and_stop(work, *arguments):
        save(work, *arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(loop, "_save", save_and_stop)
        with pytest.raises(KeyboardInterrupt):
            train(new_module(folder), on_cpu(), folder, tmp_path / "parts", FEW_STEPS)
    resumed = new_module(folder)
    with torch.no_grad():
        resumed.model.fc.weight.zero_()  # what a run starts from does not matter where there is a checkpoint
    assert train(resumed, on_cpu(), folder, tmp_path / "parts", FEW_STEPS) == history
    for (name, found), expected in zip(resumed.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_a_finished_run_is_not_run_again(folder, tmp_path, monkeypatch):
    history = train(new_module(folder), on_cpu(), folder, tmp_path, FEW_STEPS)
    monkeypatch.setattr(Eagle3Training, "forward", no_step)
    again = new_module(folder)
    start = again.model.fc.weight.clone()
    assert train(again, on_cpu(), folder, tmp_path, FEW_STEPS) == history
    assert not torch.equal(again.model.fc.weight, start), "the checkpoint should be loaded"


def test_a_checkpoint_of_another_run_is_refused(folder, tmp_path):
    train(new_module(folder), on_cpu(), folder, tmp_path, FEW_STEPS)
    longer = dataclasses.replace(FEW_STEPS, epochs=3)
    with pytest.raises(
        ValueError, match=r"out: .* is of a run of \d+ steps and this one has \d+; the data or the options"
    ):
        train(new_module(folder), on_cpu(), folder, tmp_path, longer)


def test_a_folder_without_texts_is_refused(tmp_path):
    with pytest.raises(ValueError, match="has no texts to train on"):
        train(torch.nn.Linear(1, 1), on_cpu(), tmp_path, tmp_path, FEW_STEPS)


# How it trains


def test_every_parameter_has_one_optimiser(folder):
    module = new_module(folder)
    held = [p for o in loop._optimizers(module, 1e-3) for group in o.param_groups for p in group["params"]]
    assert len(held) == len({id(p) for p in held}) and {id(p) for p in held} == {id(p) for p in module.parameters()}


def test_the_rate_rises_and_falls_to_zero():
    factors = [loop._warmup_cosine(100, 0.1)(step) for step in range(100)]
    assert factors[:10] == sorted(factors[:10]) and factors[9] == factors[10] == 1.0
    assert factors[10:] == sorted(factors[10:], reverse=True) and 0 < factors[-1] < 1e-3 < factors[0] <= 0.1


# The command


@pytest.fixture(scope="module")
def saved_target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    tiny_target().save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


DATA = "--num-tokens 500 --max-length 48 --max-new-tokens 24 --num-rows 4 --num-code 0 --num-text 0 --num-synthesised 0"
TRAINING = "--epochs 1 --batch-tokens 300"
OF_METHOD = {
    "eagle3": "--draft-vocab-size 60 --num-steps 2",
    "dflash": "--draft-vocab-size 60 --num-drafts 3 --num-layers 1",
    "dspark": "--draft-vocab-size 60 --num-drafts 3 --num-layers 1 --markov-rank 8 --confidence-detached",
    "mtp": "--num-frequent 60 --num-negatives 10 --num-steps 2",
    "diffusion": "--num-frequent 60 --num-negatives 10 --block-size 4 --num-layers 2",
}
MODULES = {
    "eagle3": Eagle3Training,
    "dflash": BlockTraining,
    "dspark": BlockTraining,
    "mtp": MtpTraining,
    "diffusion": DiffusionTraining,
}
SHARES_HEAD = ("mtp", "diffusion")


def command(target: Path, out: Path, *extra: str, method: str = "eagle3") -> list[str]:
    asked = write_prompts(out.with_suffix(".jsonl"), random_prompts(60))
    where = ["--target", str(target), "--out", str(out), "--prompts", str(asked)]
    training = f"{TRAINING} {OF_METHOD[method]}" if method in OF_METHOD else ""
    options = f"{DATA} --num-follow-ups 4 --dtype float32 --aux-layers 0 1 2 {training}"
    return [method, *where, *options.split(), *extra]


@pytest.mark.parametrize("method", OF_METHOD)
def test_the_command_makes_a_drafter_and_asking_again_does_nothing(saved_target, tmp_path, monkeypatch, capsys, method):
    out = tmp_path / "drafter"
    main(command(saved_target, out, method=method))
    assert f"{out} holds the drafter" in capsys.readouterr().out
    target = tiny_target()
    drafter = AutoDrafter.from_pretrained(out, target=target)
    options = dict(max_new_tokens=20, do_sample=False)
    expected = target.generate(**prompts([9, 4]), **options)
    assert torch.equal(target.generate(**prompts([9, 4]), **options, assistant_model=drafter), expected)
    assert drafter.method == method
    assert drafter.last_stats.num_drafted > 0
    assert method in SHARES_HEAD or drafter.model.config.aux_layers == (0, 1, 2)
    record = json.loads((out / "training.json").read_text())
    size, covered = "draft_vocab_size", "draft_vocabulary"
    if method in SHARES_HEAD:
        size, covered = "num_frequent", "frequent"
    assert record["options"][size] == 60 and record["options"]["epochs"] == 1
    assert 0.5 < record[f"{covered}_coverage"] <= 1.0 and record["held_out"][-1]["step"] >= 2

    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    monkeypatch.setattr(MODULES[method], "forward", no_step)
    AcceleratorState._reset_state(reset_partial_state=True)
    main(command(saved_target, out, method=method))
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before


def test_data_alone_can_be_collected_and_shared(saved_target, tmp_path):
    shared = tmp_path / "shared"
    main(command(saved_target, tmp_path / "first", "--data", str(shared), method="data"))
    collected = {path: path.read_bytes() for path in shards(shared)}
    assert collected and not (tmp_path / "first" / "model.safetensors").exists()
    AcceleratorState._reset_state(reset_partial_state=True)
    main(command(saved_target, tmp_path / "second", "--data", str(shared)))
    assert {path: path.read_bytes() for path in shards(shared)} == collected
    assert (tmp_path / "second" / "model.safetensors").exists()


@pytest.mark.parametrize("layers", ["0 1 3", "-1 0", "2 1", "1 1"])
def test_layers_that_the_target_lacks_are_refused_with_a_sentence(saved_target, tmp_path, capsys, layers):
    with pytest.raises(SystemExit):
        main([*command(saved_target, tmp_path / "head"), "--aux-layers", *layers.split()])
    (error,) = (line for line in capsys.readouterr().err.splitlines() if "error:" in line)
    assert "--aux-layers: [" in error and "of a target that has 3; name the layers" in error
    assert not (tmp_path / "head").exists(), "nothing should be collected"


def test_every_option_is_described(capsys):
    with pytest.raises(SystemExit):
        main(["eagle3", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    for words in ("answer tokens to collect", "at its highest", "depths to unroll", "most tokens of an answer"):
        assert words in printed


@pytest.mark.slow
def test_two_processes_share_the_work(saved_target, tmp_path):
    out = tmp_path / "head"
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "hf_specdec.training"]
    arguments = command(saved_target, out, "--num-synthesised", "4", "--num-rows", "2", "--batch-tokens", "100")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*run, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("holds the drafter") == 1
    assert {path.stem[-1] for path in shards(out / "data")} == {"0", "1"}
    assert len(list((out / "data").glob("synthesised-*-of-2.jsonl"))) == 2
    texts = texts_of(out / "data")
    assert len({text.index for text in texts}) == len(texts)
    first_turns = [text for text in texts if text.index < 60]
    assert sum(len(text.ids) - text.prompt_length for text in first_turns) < 500 + 2 * 24, "each stops at its share"
    AutoDrafter.from_pretrained(out, target=tiny_target())
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    done = subprocess.run([*run, *arguments], capture_output=True, text=True, env=environment, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
