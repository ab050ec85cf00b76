"""`hf-specdec pareto` and `hf_specdec.pareto`: what is measured, written, resumed, chosen and refused."""

import csv
import json
import subprocess
import sys

import pytest
import torch
from diffusion_rounds import load as load_diffusion
from test_bad_input import no_forward  # noqa: F401 - a fixture
from tiny import VOCAB_SIZE, perturbed, tiny_encoder_decoder, tiny_target, tiny_tokenizer

import hf_specdec
from hf_specdec import AutoDrafter, SLAController, SpecConfig, cli
from hf_specdec.drafters.draft_model import DraftModelDrafter
from hf_specdec.tuning import Limits, measure, pareto, sweep
from hf_specdec.tuning.measure import log_likelihood, share_matched
from hf_specdec.tuning.settings import WITHOUT_DRAFTS, Setting

PROMPTS = ["w7 w8 w9", "w20 w30 w12 w40"]
FILES = {"points.csv", "pareto.json", "report.md", "recommended.json", "measurements.jsonl"}
SHORT = {"lenience": [1.0, 0.3], "num_draft_tokens": [2], "max_new_tokens": 6, "repeats": 1, "measure_all": True}


def near_copy(**options):
    target = tiny_target("llama")
    return DraftModelDrafter(perturbed(target, 0.03), **options).bind(target)


def measured(out, drafter=None, prompts=PROMPTS, **options):
    return pareto(tiny_target("llama"), drafter or near_copy(), tiny_tokenizer(), prompts, out, **{**SHORT, **options})


@pytest.fixture(autouse=True)
def no_matplotlib(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "hf_specdec.tuning.figures", raising=False)


@pytest.fixture
def counted(monkeypatch):
    """The settings of the timed answers, warm-ups and calibration left out."""
    calls, answer = [], sweep._Sweep._answer

    def count(self, setting, prompt, repeat):
        calls.append((setting, prompt, repeat))
        return answer(self, setting, prompt, repeat)

    monkeypatch.setattr(sweep._Sweep, "_answer", count)
    return calls


def test_the_command_measures_a_folder_and_writes_what_it_says(tmp_path, capsys):
    tiny_target("llama").save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    out = tmp_path / "out"
    command = ["pareto", "--target", str(tmp_path / "target"), "--drafter", "lookup", "--prompts", str(file)]
    options = "--lenience 1,0.5 --num-draft-tokens 2 --max-new-tokens 4 --repeats 1 --dtype float32 --max-kl 0.1"
    assert cli.main([*command, "--out", str(out), *options.split()]) == 0
    printed = capsys.readouterr().out
    assert "| effort 1, lenience 1, 0 tokens |" in printed or "| effort 1, lenience 1, 2 tokens |" in printed
    assert "within the limits: " in printed and "recommended.json" in printed
    assert {path.name for path in out.iterdir()} >= FILES
    assert SpecConfig.from_file(out / "recommended.json").governor == "off"
    assert not any(str(tmp_path) in (out / name).read_text() for name in ("pareto.json", "measurements.jsonl"))
    assert cli.main([*command, "--out", str(out), *options.split(), "--num-draft-tokens", "0"]) == 1
    assert "`num_draft_tokens` has 0; a sweep takes positive integers." in capsys.readouterr().err
    assert cli.main([*command, "--out", str(out), "--metric", "nowhere:f"]) == 1
    assert "--metric is 'nowhere:f'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main([*command, "--out", str(out), "--lenience", "1;2"])


def test_a_sweep_says_of_every_setting_what_it_gains_and_loses(tmp_path):
    found = measured(tmp_path, temperature=1.0, num_draft_tokens=[1, 3], max_new_tokens=10, repeats=2)
    rows = list(csv.DictReader((tmp_path / "points.csv").open(encoding="utf-8")))
    assert [point.setting for point in found.points] == [
        WITHOUT_DRAFTS,
        *(Setting(1, lenience, k) for lenience in (1.0, 0.3) for k in (1, 3)),
    ]
    for point, row in zip(found.points, rows, strict=True):
        assert float(row["speed"]) == point.speed.mean > 0.0 and point.speed.low <= point.speed.mean <= point.speed.high
        assert point.lossless == (point.setting.lenience == 1.0) and row["lossless"] == str(point.lossless)
        assert (point.kl.mean > 0.0, point.tv > 0.0, bool(point.bound)) == (not point.lossless,) * 3
        assert 0.0 < point.itl_ms[0] <= point.itl_ms[1] <= point.itl_ms[2] and point.ttft_ms > 0.0
        assert point.log_likelihood < 0.0 and point.predicted_speed > 0.0 and point.match is None
        assert 1.0 <= point.tau <= 1.0 + point.setting.num_draft_tokens
    assert found.points[0].speed_up == 1.0 and found.points[0].tau == 1.0
    assert found.points[4].acceptance > found.points[2].acceptance
    text = (tmp_path / "report.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        assert not ("lenience 0.3" in line and "| lossless |" in line)
    whole = json.loads((tmp_path / "pareto.json").read_text(encoding="utf-8"))
    assert [point["lossless"] for point in whole["points"]] == [point.lossless for point in found.points]
    assert whole["chosen"]["keeps_to_limits"] and whole["chosen"]["lenience"] == 1.0


def test_the_recommended_options_are_the_chosen_setting_and_give_its_text(tmp_path):
    found = measured(tmp_path, limits=Limits(max_kl=5.0), metric=lambda prompt, answer: len(answer.split()))
    config = SpecConfig.from_file(tmp_path / "recommended.json")
    assert config == found.recommended == found.chosen.setting.config(SpecConfig())
    record = sweep.answer(
        tiny_target("llama"), near_copy(), config, tiny_tokenizer()(PROMPTS[0])["input_ids"], measure.Sampler(6, 0.0)
    )
    lines = [json.loads(line) for line in (tmp_path / "measurements.jsonl").read_text().splitlines()]
    assert dict(lines)[f"answer 0, repeat 0, {found.chosen.setting.key}"]["tokens"] == record["tokens"]


def test_lossless_settings_match_the_text_without_drafts_and_the_metric_sees_prompt_and_answer(tmp_path):
    seen = []
    found = measured(tmp_path, metric=lambda prompt, answer: seen.append((prompt, answer)) or len(answer.split()))
    assert [point.match for point in found.points if point.lossless] == [1.0, 1.0]
    assert {prompt for prompt, _ in seen} == set(PROMPTS)
    assert found.points[0].quality.mean == 6.0 and found.points[0].merit == found.points[0].quality


def test_a_stopped_sweep_goes_on_where_it_was(tmp_path, counted):
    whole = measured(tmp_path)
    assert len(counted) == 3 * len(PROMPTS)
    file = tmp_path / "measurements.jsonl"
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join(lines[:-2]) + lines[-2][:30])
    counted.clear()
    again = measured(tmp_path)
    assert len(counted) == 2
    assert again.points[0] == whole.points[0]
    assert file.read_text().splitlines(keepends=True)[:-2] == lines[:-2]
    counted.clear()
    measured(tmp_path, lenience=[1.0, 0.5])  # a new value only
    assert {setting.lenience for setting, _, _ in counted} == {0.5}
    counted.clear()
    with pytest.raises(ValueError, match="measurements of a sweep that differs in max_new_tokens, temperature"):
        measured(tmp_path, max_new_tokens=7, temperature=0.5)
    with pytest.raises(ValueError, match="differs in drafter_weights"):
        measured(tmp_path, DraftModelDrafter(perturbed(tiny_target("llama"), 0.2)).bind(tiny_target("llama")))
    file.write_text("[]\n")
    with pytest.raises(ValueError, match=r"line 1 of .* is not a record"):
        measured(tmp_path)
    assert not counted


def test_settings_take_turns_and_see_the_same_seeds(tmp_path, counted, monkeypatch):
    seeds, answer = [], sweep.answer
    monkeypatch.setattr(sweep, "answer", lambda *a: seeds.append((a[2].seed, a[4].max_new_tokens)) or answer(*a))
    measured(tmp_path, repeats=2, seed=40, max_new_tokens=9, temperature=1.0)
    order = [setting for setting, _, _ in counted]
    assert all(len(set(order[i : i + 3])) == 3 for i in range(0, len(order), 3))
    assert [repeat for _, _, repeat in counted] == [0] * 6 + [1] * 6
    assert [seed for seed, length in seeds if length == 9][-12:] == [40] * 6 + [41] * 6


def test_lenience_for_the_thinking_only_is_swept_and_its_front_steers_a_controller(tmp_path):
    drafter = near_copy(lenience=0.5, lenient_between=(90, 91))
    found = measured(tmp_path / "out", drafter, limits=Limits(max_kl=5.0))
    assert [("between the markers" in point.bound, point.lossless) for point in found.points] == [
        (point.setting.lenience < 1.0, point.setting.lenience == 1.0) for point in found.points
    ]
    for point in found.points:
        expected = None if point.lossless else ((90,), (91,))
        assert point.setting.config(drafter.spec_config).lenient_between == expected
    with pytest.raises(ValueError, match="differs in lenient_between"):
        measured(tmp_path / "out", near_copy())
    for allow in (False, True):
        path = tmp_path / "out" / "pareto.json"
        controller = SLAController.from_file(path, max_tpot_ms=1e6, allow_lenience=allow)
        kept = {point.setting for point in found.points if point.lossless or (allow and point in found.front)}
        assert set(controller.order) == kept
    drafter = near_copy(controller=controller, lenient_between=(90, 91))
    ids = torch.tensor([[7, 8, 9]])
    tiny_target("llama").generate(ids, max_new_tokens=4, do_sample=False, assistant_model=drafter)
    assert sum(drafter.last_stats.settings.values()) == drafter.last_stats.num_forwards - 1
    with pytest.raises(ValueError, match="beside a `controller`, which chooses it"):
        measured(tmp_path / "other", drafter)


def test_screening_leaves_out_what_cannot_pay_and_says_so(tmp_path, monkeypatch):
    seconds = {0: 1.0, 1: 1.0, 4: 50.0}
    monkeypatch.setattr(sweep._Sweep, "_round_seconds", lambda self, setting: seconds[setting.num_draft_tokens])
    found = measured(tmp_path, num_draft_tokens=[1, 4], measure_all=False)
    assert {setting.num_draft_tokens for setting in found.skipped} == {4}
    assert "Left out by screening: effort 1, lenience 1, 4 tokens" in found.summary()
    assert WITHOUT_DRAFTS in [point.setting for point in found.points]


def test_effort_is_swept_with_drafters_that_take_it(tmp_path):
    target = tiny_target("llama")
    drafter = load_diffusion(tmp_path / "drafter", "a2d Qwen3, mdlm", target)
    found = measured(tmp_path / "out", drafter, effort=[1, 2], lenience=[1.0], max_new_tokens=4)
    assert [point.setting.effort for point in found.points] == [1, 1, 2]
    assert drafter.spec_config == SpecConfig()


def test_the_likelihood_is_the_targets_own_and_a_match_ends_at_the_first_difference():
    target = tiny_target("llama")
    logits = target(torch.tensor([[7, 8, 9, 10, 11]])).logits[0].detach().double()
    expected = sum(float((logits[i] / 0.7).log_softmax(dim=-1)[token]) for i, token in ((2, 10), (3, 11)))
    assert log_likelihood(target, [7, 8, 9], [10, 11], 0.7) == pytest.approx(expected, abs=1e-5)
    assert share_matched([1, 2, 3, 4], [1, 2, 5, 4]) == 0.5 and share_matched([1], [1]) == 1.0


def test_without_matplotlib_everything_else_is_written(tmp_path):
    measured(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert "Figures need matplotlib: pip install 'hf-specdec[plots]'" in (tmp_path / "report.md").read_text()


@pytest.mark.slow
def test_the_package_loads_the_sweep_only_when_it_is_asked_for():
    code = (
        "import sys, hf_specdec; print([m for m in sys.modules if m.startswith(('hf_specdec.tuning', 'matplotlib'))]);"
        "print(hf_specdec.pareto.__name__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "pareto"]
    assert hf_specdec.pareto is pareto
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        hf_specdec.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"effort": [1, 2]}, "`effort` is 2 and a 'draft_model' drafter cannot spend more passes"),
        ({"effort": 2}, "`effort` is 2; give a list of values"),
        ({"effort": []}, r"`effort` is \[\]; give a list of values"),
        ({"lenience": [1, 0]}, "`lenience` is 0.0; give a number above 0"),
        ({"lenience": ["x"]}, "`lenience` has 'x'; a sweep takes numbers"),
        ({"num_draft_tokens": [0]}, "`num_draft_tokens` has 0; a sweep takes positive integers"),
        ({"num_draft_tokens": [2000]}, "`num_draft_tokens` is 2000; give 'auto' or an integer"),
        ({"repeats": 0}, "`repeats` is 0; give a positive integer"),
        ({"max_new_tokens": 1}, "`max_new_tokens` is 1; give an integer of at least 2"),
        ({"temperature": -1.0}, "`temperature` is -1.0; give 0"),
        ({"prompts": ["w7"]}, "`prompts` needs at least two texts or chats"),
        ({"prompts": ["w7", ""]}, "`prompts` has '', which holds no token"),
        ({"metric": 3}, "`metric` is a int; give a function"),
        ({"limits": Limits(min_quality=0.5)}, "`min_quality` is 0.5 without a `metric`"),
        ({"drafter": "lookup"}, "`drafter` is a str; load one by AutoDrafter"),
    ],
)
def test_bad_input_is_refused_in_a_sentence_and_nothing_is_written(tmp_path, no_forward, options, sentence):  # noqa: F811
    with pytest.raises(ValueError, match=sentence):
        measured(tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_drafters_and_targets_that_a_sweep_cannot_measure_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`rule` of the drafter is 'block'; a sweep verifies by `lenience`"):
        measured(tmp_path, near_copy(rule="block"))
    limited = near_copy()
    limited.max_num_draft_tokens = 3
    with pytest.raises(ValueError, match="`num_draft_tokens` has 4; this 'draft_model' drafter drafts at most 3"):
        measured(tmp_path, limited, num_draft_tokens=[4])
    target = tiny_encoder_decoder("t5")
    drafter = AutoDrafter.for_target(target, "lookup")
    with pytest.raises(ValueError, match="an encoder-decoder; a sweep takes decoder-only models"):
        pareto(target, drafter, tiny_tokenizer(VOCAB_SIZE), PROMPTS, tmp_path)
