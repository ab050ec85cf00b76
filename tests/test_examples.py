"""The examples and the benchmark run on the small real target and print what they promise."""

import importlib.util
from pathlib import Path

import pytest

from hf_specdec.demo import Unavailable, small_target_path

pytestmark = [pytest.mark.real_target, pytest.mark.timeout(1800)]
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def target():
    try:
        small_target_path()
    except Unavailable as reason:
        pytest.skip(str(reason))


def script(name):
    spec = importlib.util.spec_from_file_location(Path(name).stem, ROOT / name)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_quickstart_prints_all_ways_side_by_side_and_equal_text(capsys, monkeypatch):
    quickstart = script("examples/quickstart.py")
    monkeypatch.setattr(quickstart, "MAX_NEW_TOKENS", 16)
    quickstart.main()
    printed = capsys.readouterr().out
    fp32, bf16 = printed.split("bf16 on")
    for part in (fp32, bf16):
        for title in quickstart.SHOWN_PROMPTS:
            assert f"{title}:" in part
        columns = "plain   prompt lookup    EAGLE-3 head"
        for line in (columns, "tokens/s", "speed-up", "(tau)", "position 1, 2", "identical text: "):
            assert part.count(line) >= len(quickstart.SHOWN_PROMPTS), line
    assert fp32.count("identical text: yes") == 4 * len(quickstart.SHOWN_PROMPTS)
    assert fp32.count("sampled with one seed: identical text: yes") == 2 * len(quickstart.SHOWN_PROMPTS)
    assert "identical text: no" not in printed


def test_the_pipeline_example_prints_an_answer_and_its_statistics(capsys):
    script("examples/pipeline.py").main()
    printed = capsys.readouterr().out
    assert "tau" in printed and "rule match, lossless" in printed


def test_the_efficiency_benchmark_fills_its_table(monkeypatch):
    import torch

    from hf_specdec import AutoDrafter
    from hf_specdec.demo import load_small_target
    from hf_specdec.drafters.draft_model import DraftModelDrafter

    efficiency = script("benchmarks/efficiency.py")
    monkeypatch.setattr(efficiency, "NEW_TOKENS", 8)
    model, tokenizer = load_small_target(torch.bfloat16)
    drafters = {
        "none": AutoDrafter.for_target(model, "none"),
        "draft model": DraftModelDrafter(efficiency.first_layers(model, 2), num_draft_tokens=2).bind(model),
    }
    race = efficiency.Race(model, tokenizer("Once upon a time", return_tensors="pt"), drafters)
    (row, _) = race.measure("short", 1)
    assert row["drafter"] == "none" and row["tau"] == 1.0 and row["speed_up"] > 0 and row["rounds"] == 1
    assert row["share_of_limit"] == pytest.approx(row["speed_up"] / row["limit"])
    rows = race.measure("short", 1)
    assert [row["rounds"] for row in rows] == [2, 2] == [race.num_rounds] * 2  # the first round still counts
    bad = {"prompt": "code edit", "drafter": "lookup", "speed_up": 1.2, "share_of_limit": 0.5}
    assert len(efficiency.broken_promises([bad])) == 2
