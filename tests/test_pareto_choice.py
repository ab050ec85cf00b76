"""tuning/front.py and points.py: which points are kept, which one is chosen, and how sure a mean is."""

from dataclasses import replace

import pytest

from hf_specdec.tuning import Limits
from hf_specdec.tuning.front import choose, dominates, front_of
from hf_specdec.tuning.points import Estimate, Point, estimate
from hf_specdec.tuning.settings import WITHOUT_DRAFTS, Setting
from hf_specdec.tuning.sweep import worth_measuring


def known_to(half, mean):
    """An estimate that is off by `half`, one way for half of the prompts and the other way for the rest."""
    return Estimate(mean, (mean - half, mean + half) * 20)


def point(lenience, speed, kl, half=0.5, quality=None, itl=10.0, num_draft_tokens=4):
    """A point whose KL is known exactly."""
    return Point(
        setting=Setting(1, lenience, num_draft_tokens),
        lossless=lenience == 1.0,
        bound="",
        speed=known_to(half, speed),
        kl=known_to(0.0, kl),
        quality=None if quality is None else known_to(0.02, quality),
        itl_ms=(1.0, itl, 2 * itl),
    )


PLAIN = replace(point(1.0, 10.0, 0.0), setting=WITHOUT_DRAFTS)
STRICT, MILD, LOOSE = point(1.0, 20.0, 0.0), point(0.7, 25.0, 0.02), point(0.5, 30.0, 0.1)
WORSE = point(0.6, 22.0, 0.05)  # slower than MILD, and loses more
POINTS = [PLAIN, STRICT, MILD, LOOSE, WORSE]


def test_the_front_is_what_nothing_dominates_the_fastest_first():
    assert front_of(POINTS) == [LOOSE, MILD, STRICT]


def test_equal_points_stay_both():
    twin = point(0.5, 30.0, 0.1, num_draft_tokens=8)
    assert front_of([*POINTS, twin])[:2] == [LOOSE, twin]
    assert not dominates(LOOSE, twin) and not dominates(twin, LOOSE)


def test_a_point_is_dominated_only_where_the_difference_is_sure():
    slower = point(1.0, 19.2, 0.0, num_draft_tokens=8)
    assert slower.speed.high > STRICT.speed.low  # but on the same prompts it is always slower
    assert dominates(STRICT, slower) and slower not in front_of([*POINTS, slower])
    unsure = point(1.0, 19.2, 0.0, half=-0.5, num_draft_tokens=8)  # faster on half of the prompts
    assert not dominates(STRICT, unsure) and unsure in front_of([*POINTS, unsure])


def test_the_fastest_lossless_setting_is_on_the_front_even_where_a_lossy_one_beats_it():
    better = point(0.5, 40.0, 0.1, quality=0.95)
    strict, plain = (replace(one, quality=known_to(0.01, 0.9)) for one in (STRICT, PLAIN))
    assert dominates(better, strict)
    assert front_of([plain, strict, better]) == [better, strict]


def test_the_choice_is_lossless_unless_a_limit_on_loss_is_given():
    assert choose(POINTS, Limits()) == (STRICT, True)
    assert choose(POINTS, Limits(max_itl_ms=10.0)) == (STRICT, True)
    assert choose(POINTS, Limits(max_kl=0.02)) == (MILD, True)
    assert choose(POINTS, Limits(max_kl=1.0)) == (LOOSE, True)
    assert choose(POINTS, Limits(max_kl=0.0)) == (STRICT, True)


def test_the_unsure_end_of_the_kl_counts():
    unsure = replace(MILD, kl=known_to(0.02, 0.02))
    assert choose([PLAIN, STRICT, unsure], Limits(max_kl=0.03)) == (STRICT, True)


def test_quality_and_latency_limit_the_choice_together():
    points = [
        replace(point(1.0, 10.0, 0.0, quality=0.90, itl=12.0), setting=WITHOUT_DRAFTS),
        point(1.0, 20.0, 0.0, quality=0.90, itl=30.0),
        point(0.5, 30.0, 0.1, quality=0.80, itl=20.0),
    ]
    assert choose(points, Limits(min_quality=0.85)) == (points[1], True)
    assert choose(points, Limits(min_quality=0.85, max_itl_ms=25.0)) == (points[0], True)
    assert choose(points, Limits(min_quality=0.75, max_itl_ms=25.0)) == (points[2], True)


def test_where_nothing_keeps_to_the_limits_the_nearest_is_named_so():
    points = [replace(PLAIN, itl_ms=(1.0, 12.0, 12.0)), replace(STRICT, itl_ms=(1.0, 30.0, 30.0))]
    assert choose(points, Limits(max_itl_ms=5.0)) == (points[0], False)


def test_an_estimate_is_a_ratio_of_sums_with_an_interval_that_repeats():
    found = estimate([10.0, 30.0, 20.0], [1.0, 2.0, 3.0])
    assert found.mean == 10.0 and found.low < 10.0 < found.high
    assert found == estimate([10.0, 30.0, 20.0], [1.0, 2.0, 3.0])
    sure = estimate([2.0] * 9, [4.0] * 9)
    assert (sure.low, sure.mean, sure.high) == (0.5, 0.5, 0.5)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    import random

    draw, hits = random.Random(0), 0
    for _ in range(100):
        found = estimate([draw.gauss(5.0, 1.0) for _ in range(25)], [1.0] * 25)
        hits += found.low <= 5.0 <= found.high
    assert 86 <= hits <= 99  # 25 prompts make the bootstrap's intervals slightly short


def test_screening_keeps_what_is_near_the_predicted_front():
    strict, slow, near, lossy = Setting(1, 1.0, 2), Setting(1, 1.0, 1), Setting(1, 1.0, 4), Setting(1, 0.5, 4)
    predicted = {
        WITHOUT_DRAFTS: (5.0, 0.0),
        strict: (20.0, 0.0),
        slow: (15.0, 0.0),
        near: (19.0, 0.0),
        lossy: (19.5, 0.1),
    }
    assert worth_measuring(predicted) == [WITHOUT_DRAFTS, strict, near, lossy]


@pytest.mark.parametrize("wrong", [{"max_kl": "0.1"}, {"min_quality": True}, {"max_itl_ms": [3]}])
def test_a_limit_is_a_number(wrong):
    with pytest.raises(ValueError, match=f"`{next(iter(wrong))}` is .*; give a number or None"):
        Limits(**wrong)
