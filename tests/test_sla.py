"""The SLA controller keeps to its limit by effort and draft length first, by lenience only where it must and may.

Times are scripted; no test reads a clock.
"""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_specdec import SLAController, SpecConfig
from hf_specdec.scheduling.sla import Setting

LONG, SHORT, DEEP, PLAIN = (1, 1.0, 8), (1, 1.0, 2), (4, 1.0, 8), (1, 1.0, 0)
MILD, LOOSE = (1, 0.8, 8), (1, 0.5, 8)
FRONT = {LONG: 10.0, DEEP: 12.0, SHORT: 14.0, PLAIN: 25.0, MILD: 8.0, LOOSE: 5.0}
TAU = {LONG: 4.0, DEEP: 5.0, SHORT: 2.0, PLAIN: 1.0, MILD: 5.0, LOOSE: 6.0}
WINDOW = 16


class Machine:
    """What a token takes at each setting, in milliseconds; by default what the front says.

    Args:
        times: those that differ.
        noise: share by which a round's time and tokens vary.
    """

    def __init__(self, noise=0.0, **times):
        self.random, self.noise, self.slowdown = random.Random(0), noise, 1.0
        self.times = {**FRONT, **{globals()[name]: ms for name, ms in times.items()}}

    def run(self, controller, windows) -> list[Setting]:
        """The setting of each window."""
        visited = []
        for _ in range(windows):
            visited.append(controller.setting)
            for _ in range(WINDOW):
                tau = TAU[controller.setting]
                seconds = 1e-3 * self.slowdown * self.times[controller.setting] * tau
                vary = lambda: 1.0 + self.noise * self.random.uniform(-1.0, 1.0)  # noqa: E731
                controller.observe(controller.setting, seconds * vary(), tau * vary())
        return visited


def controller(limit, allow_lenience=True, front=FRONT):
    return SLAController(front, max_tpot_ms=limit, allow_lenience=allow_lenience)


def without_repeats(visited):
    return [one for i, one in enumerate(visited) if i == 0 or one != visited[i - 1]]


def test_the_fastest_lossless_setting_is_kept_while_it_keeps_to_the_limit():
    assert set(Machine(noise=0.1).run(controller(12.0), 200)) == {LONG}


def test_a_missed_limit_is_first_met_by_another_effort_or_draft_length():
    """As under a load that makes long drafts dear: the other lossless settings are tried, the fastest stored first."""
    machine, ours = Machine(LONG=40.0, DEEP=30.0, SHORT=15.0, MILD=1.0, LOOSE=1.0), controller(20.0)
    assert without_repeats(machine.run(ours, 20)) == [LONG, DEEP, SHORT]


def test_lenience_comes_last_and_the_mildest_that_does_is_taken():
    machine = Machine(LONG=40.0, DEEP=30.0, SHORT=25.0, PLAIN=35.0, MILD=19.0, LOOSE=1.0)
    assert without_repeats(machine.run(controller(20.0), 20)) == [LONG, DEEP, SHORT, MILD]
    machine.times[MILD] = 24.0
    assert without_repeats(machine.run(controller(20.0), 20)) == [LONG, DEEP, SHORT, MILD, LOOSE]


def test_a_setting_that_never_was_as_fast_as_the_limit_is_not_tried():
    machine = Machine(LONG=40.0, DEEP=30.0, SHORT=25.0)
    assert PLAIN not in machine.run(controller(20.0), 100)
    assert PLAIN in machine.run(controller(30.0, front={LONG: 10.0, PLAIN: 25.0}), 100)


def test_without_leave_there_is_no_lenience_and_the_fastest_lossless_setting_is_taken():
    machine, ours = Machine(LONG=40.0, DEEP=25.0, SHORT=35.0), controller(20.0, allow_lenience=False)
    visited = machine.run(ours, 100)
    assert without_repeats(visited) == [LONG, DEEP, SHORT, DEEP]
    assert ours.levels == [1.0]


def test_where_no_setting_keeps_to_the_limit_the_fastest_is_taken():
    assert Machine().run(controller(2.0), 100)[-1] == LOOSE
    assert Machine().run(controller(2.0, allow_lenience=False), 100)[-1] == LONG


def test_a_stricter_setting_comes_back_where_there_is_room_and_not_before():
    machine, ours = Machine(LONG=20.0, DEEP=21.0, SHORT=22.0, MILD=15.0), controller(16.0)
    assert machine.run(ours, 10)[-1] == MILD
    machine.slowdown = 0.75  # LONG would take 15 of 16: no room
    assert set(machine.run(ours, 20)) == {MILD}
    machine.slowdown = 0.6
    assert machine.run(ours, 10)[-1] == LONG
    machine.slowdown = 0.75
    assert set(machine.run(ours, 50)) == {LONG}


@pytest.mark.parametrize("slowdown", [0.7, 0.8, 0.9, 1.0, 1.1, 1.2])
def test_noise_at_the_limit_moves_it_seldom(slowdown):
    machine, ours = Machine(noise=0.3, LONG=16.0, DEEP=21.0, SHORT=22.0, MILD=12.0), controller(16.0)
    machine.slowdown = slowdown
    assert len(without_repeats(machine.run(ours, 500))) < 50


def test_one_slow_round_does_not_move_it():
    ours = controller(12.0)
    for number in range(10 * WINDOW):
        ours.observe(ours.setting, 1.0 if number % WINDOW == 5 else 0.04, 4.0)
        assert ours.setting == LONG


def test_what_was_too_slow_once_is_tried_again_one_day():
    machine, ours = Machine(LONG=60.0, DEEP=45.0, SHORT=15.0), controller(20.0)
    assert machine.run(ours, 10)[-1] == SHORT
    machine.times[LONG], machine.times[DEEP], machine.slowdown = 10.0, 12.0, 1.0
    assert machine.run(ours, 400)[-1] == LONG
    machine.times[LONG] = 60.0  # and where it is no better, not too often
    visited = Machine(LONG=60.0, DEEP=45.0, SHORT=15.0).run(controller(20.0), 500)
    assert 1 < visited.count(LONG) < 5


def test_what_was_learnt_at_a_load_is_used_again_there():
    busy, ours = Machine(LONG=60.0, DEEP=45.0, SHORT=17.5), controller(20.0)
    assert set(Machine().run(ours, 5)) == {LONG}
    ours.load = 8
    assert without_repeats(busy.run(ours, 10)) == [LONG, DEEP, SHORT]
    ours.load = 1
    assert ours.setting == LONG and set(Machine().run(ours, 5)) == {LONG}
    ours.load = 8
    assert ours.setting == SHORT and set(busy.run(ours, 5)) == {SHORT}
    ours.load = 12  # not seen yet: no faster than at 8
    assert ours.setting == SHORT
    ours.load = 4  # no slower than at 1
    assert ours.setting == LONG and ours.load == 4.0


def test_rounds_of_another_setting_do_not_count():
    ours = controller(20.0)
    for _ in range(100):
        ours.observe(Setting(*SHORT), 10.0, 1.0)
        assert ours.setting == LONG


rounds = st.lists(st.tuples(st.floats(0.0, 1e3), st.floats(1.0, 9.0), st.sampled_from([0, 0, 0, 1, 3])), max_size=120)


@settings(deadline=None, max_examples=100)
@given(rounds, st.floats(0.01, 1e4), st.booleans())
def test_any_times_give_an_allowed_setting_and_the_same_ones_the_same(found, limit, allow):
    ours, twin = controller(limit, allow), controller(limit, allow)
    for seconds, tokens, load in found:
        for one in (ours, twin):
            if load:
                one.load = load
            for _ in range(WINDOW // 2):
                one.observe(one.setting, seconds, tokens)
        assert ours.setting == twin.setting
        assert ours.setting in FRONT and (allow or ours.setting.lenience == 1.0)


# A sweep's file


def point(setting, tokens_per_second, on_front):
    effort, lenience, length = setting
    return {
        "effort": effort,
        "lenience": lenience,
        "num_draft_tokens": length,
        "lossless": lenience == 1.0,
        "speed": {"mean": tokens_per_second},
        "on_front": on_front,
    }


def test_a_file_gives_its_front_and_every_lossless_setting(tmp_path):
    points = [point(LONG, 100.0, True), point(SHORT, 50.0, False), point(MILD, 125.0, True), point(LOOSE, 90.0, False)]
    (tmp_path / "pareto.json").write_text(json.dumps({"points": points}))
    ours = SLAController.from_file(tmp_path / "pareto.json", max_tpot_ms=20, allow_lenience=True)
    assert ours.order == [LONG, SHORT, MILD]
    strict = SLAController.from_file(tmp_path / "pareto.json", max_tpot_ms=20)
    assert strict.order == [LONG, SHORT] and strict.setting.key == "effort 1, lenience 1, 8 tokens"


@pytest.mark.parametrize("content", ["{", "[]", '{"points": [{}]}', '{"point": []}', "3"])
def test_a_file_that_is_none_is_refused(content, tmp_path):
    (tmp_path / "pareto.json").write_text(content)
    with pytest.raises(ValueError, match=r"pareto.json is no pareto.json of `hf-specdec pareto`"):
        SLAController.from_file(tmp_path / "pareto.json", max_tpot_ms=20)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"max_tpot_ms": 0}, "`max_tpot_ms` is 0; give a positive number"),
        ({"max_tpot_ms": "20"}, "`max_tpot_ms` is '20'"),
        ({"max_tpot_ms": float("nan")}, "`max_tpot_ms` is nan"),
        ({"allow_lenience": 0.5}, "`allow_lenience` is 0.5; give True or False"),
        ({"settings": [LONG]}, "`settings` is a list; give a dictionary"),
        ({"settings": {}}, "`settings` has none of lenience 1"),
        ({"settings": {MILD: 3.0}}, "`settings` has none of lenience 1"),
        ({"settings": {LONG: -1.0}}, "`settings` has a time of -1.0"),
        ({"settings": {LONG: None}}, "`settings` has a time of None"),
        ({"settings": {(1, 1.0): 3.0}}, r"`settings` has \(1, 1.0\); a setting is \(effort, lenience"),
        ({"settings": {"abc": 3.0}}, "`settings` has 'abc'"),
        ({"settings": {(0, 1.0, 4): 3.0}}, r"`settings` has \(0, 1.0, 4\)"),
        ({"settings": {(1, 1.5, 4): 3.0}}, r"`settings` has \(1, 1.5, 4\)"),
        ({"settings": {(1, True, 4): 3.0}}, r"`settings` has \(1, True, 4\)"),
        ({"settings": {(1, 1.0, 2.0): 3.0}}, r"`settings` has \(1, 1.0, 2.0\)"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused_by_name(arguments, match):
    with pytest.raises(ValueError, match=match):
        SLAController(**{"settings": FRONT, "max_tpot_ms": 20.0, **arguments})


def test_a_load_that_is_none_is_refused():
    ours = controller(20.0)
    for load in (0, -1, "8", None, True):
        with pytest.raises(ValueError, match=r"`load` is .*; give a positive number"):
            ours.load = load


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"controller": 5}, "`controller` is a int; give an SLAController"),
        ({"controller": {"max_tpot_ms": 5}}, "`controller` is a dict"),
        ({"effort": 2}, "`effort` is 2 beside a `controller`, which chooses it; leave one of them out"),
        ({"num_draft_tokens": 3}, "`num_draft_tokens` is 3 beside a `controller`"),
        ({"lenience": 0.5}, "`lenience` is 0.5 beside a `controller`"),
        ({"rule": "coupled"}, "`rule` is 'coupled' beside a `controller` with lenience"),
    ],
    ids=str,
)
def test_options_that_a_controller_chooses_are_refused_beside_it(options, match):
    with pytest.raises(ValueError, match=match):
        SpecConfig(**{"controller": controller(20.0), **options})


def test_markers_beside_a_controller_that_is_never_lenient_are_refused():
    assert SpecConfig(controller=controller(20.0), lenient_between=(5, 6)).lenient_between == ((5,), (6,))
    with pytest.raises(ValueError, match=r"`lenient_between` is .* a `controller` without `allow_lenience`, which"):
        SpecConfig(controller=controller(20.0, allow_lenience=False), lenient_between=(5, 6))
    assert SpecConfig(controller=controller(20.0, allow_lenience=False), rule="block").lenient_rule is None
