"""benchmarks/pareto_smollm2.py says which settings that turn both knobs no setting with one of them beats."""

from dataclasses import replace
from types import SimpleNamespace

from test_examples import script
from test_pareto_choice import point

from hf_specdec.tuning.front import dominates
from hf_specdec.tuning.settings import Setting

benchmark = script("benchmarks/pareto_smollm2.py")


def setting(effort, lenience, speed, kl, tau=1.5):
    return replace(point(lenience, speed, kl), setting=Setting(effort, lenience, 4), tau=tau)


SINGLE = [setting(1, 1.0, 20.0, 0.0, 1.4), setting(1, 0.5, 30.0, 0.1, 1.8), setting(2, 1.0, 15.0, 0.0, 1.6)]


def test_both_knobs_are_worth_it_where_no_single_one_is_as_fast_and_as_close():
    beaten, worth_it = setting(2, 0.7, 25.0, 0.2, 1.7), setting(4, 0.7, 26.0, 0.05, 1.9)
    said = benchmark.statement("tokens a second", [*SINGLE, beaten, worth_it], dominates)
    assert "1 of the 2 settings with effort above 1 and lenience below 1 are beaten by none" in said
    assert said.splitlines()[1:] == ["- effort 4, lenience 0.7, 4 tokens: 26.0 tokens/s, tau 1.90, KL 0.0500"]


def test_that_none_is_worth_it_is_said():
    said = benchmark.statement("tokens a second", [*SINGLE, setting(2, 0.7, 10.0, 0.2)], dominates)
    assert "0 of the 1 settings" in said and len(said.splitlines()) == 1


def test_without_the_clock_tokens_a_verification_count():
    slow_but_long = setting(4, 0.5, 5.0, 0.1, 2.2)
    points = [*SINGLE, slow_but_long]
    assert "0 of the 1" in benchmark.statement("tokens a second", points, dominates)
    assert "1 of the 1" in benchmark.statement("tokens a verification", points, benchmark.is_as_good_without_clock)


def test_prompts_are_of_both_kinds_by_turns(monkeypatch):
    names = ["mt_bench/81", "mt_bench/82", "HumanEval/0", "HumanEval/1"]
    found = [SimpleNamespace(name=name, turns=(name, "more")) for name in names]
    monkeypatch.setattr(benchmark, "evaluation_prompts", lambda: found)
    chats = benchmark.prompts(3)
    assert [chat[0]["content"] for chat in chats] == ["mt_bench/81", "HumanEval/0", "mt_bench/82"]
