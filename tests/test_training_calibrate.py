"""training/calibrate.py: what is measured is what drafting sees, and what is written is what loading reads."""

import json

import pytest
import torch
from dspark_formats import random_drafter, write_drafter
from dspark_reference import Reference
from tiny import prompts, tiny_target, tiny_tokenizer

from hf_specdec import AutoDrafter
from hf_specdec.training.__main__ import main
from hf_specdec.training.calibrate import measure, write_temperatures

PROMPTS = [prompts([5 + seed], seed=seed)["input_ids"][0].tolist() for seed in range(3)]


def test_rounds_hold_the_heads_logits_and_how_many_tokens_passed(tmp_path):
    target, one = tiny_target("llama"), random_drafter(seed=3)
    drafter = AutoDrafter.from_pretrained(write_drafter(tmp_path, one), target=target, schedule="confidence")
    logits, accepted = measure(target, drafter, PROMPTS, 12, 1.0, 0)
    assert logits.shape == (len(accepted), 5) and int(accepted.max()) <= 5
    assert drafter.spec_config.schedule == "confidence" and "start" not in vars(drafter)
    assert drafter.last_stats.rule == "rejection"
    reference = Reference(one, target)
    greedy, _ = measure(target, drafter, PROMPTS[:1], 12, 0.0, 0)
    text = target.generate(torch.tensor(PROMPTS[:1]), max_new_tokens=1, do_sample=False)[0].tolist()
    expected = reference.confidences(text, [0])[0]  # of the first slot, which no drafted token stands before
    assert float(greedy[0, 0]) == pytest.approx(float(expected), abs=1e-4)


def test_a_drafter_without_confidence_is_refused(tmp_path):
    target = tiny_target("llama")
    drafter = AutoDrafter.from_pretrained(write_drafter(tmp_path, random_drafter(confidence=False)), target=target)
    with pytest.raises(ValueError, match="gives no confidence"):
        measure(target, drafter, PROMPTS, 8, 1.0, 0)
    assert drafter.spec_config.schedule is None and "start" not in vars(drafter)


def test_temperatures_are_written_where_the_loader_reads_them_and_multiply(tmp_path):
    folder = write_drafter(tmp_path, random_drafter())
    for _ in range(2):
        write_temperatures(folder, (1.5, 2.0, 1.0, 0.5, 3.0))
    drafter = AutoDrafter.from_pretrained(folder, target=tiny_target("llama"))
    assert drafter.model.heads.confidence_temperatures == (2.25, 4.0, 1.0, 0.25, 9.0)


def test_the_command_calibrates_a_folder(tmp_path, capsys):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"w{6 + i} w{20 + i}"}) + "\n" for i in range(6)))
    folder = write_drafter(tmp_path / "drafter", random_drafter())
    command = ["calibrate", "--target", str(tmp_path / "target"), "--drafter", str(folder), "--prompts", str(file)]
    main([*command, "--max-new-tokens", "24", "--dtype", "float32"])
    temperatures = json.loads((folder / "config.json").read_text())["confidence_temperatures"]
    assert len(temperatures) == 5 and all(0.2 < t < 5.1 for t in temperatures)
    printed = capsys.readouterr().out
    assert "before" in printed and "after" in printed and "confidence_temperatures" in printed
    with pytest.raises(SystemExit, match="no folder with a config"):
        main([*command[:4], str(tmp_path / "nowhere"), *command[5:]])
    with pytest.raises(SystemExit, match="1 prompts are too few"):
        main([*command, "--limit", "1"])
