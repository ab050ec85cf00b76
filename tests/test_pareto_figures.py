"""tuning/figures.py: a figure for every view of the points."""

import pytest
from test_pareto_choice import LOOSE, MILD, PLAIN, POINTS, STRICT, point

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("points", [POINTS, [PLAIN, STRICT], [point(1.0, 9.0, 0.0, quality=0.5), MILD, LOOSE]])
def test_the_figures_are_written(tmp_path, points):
    from hf_specdec.tuning.figures import draw

    draw(points, points[:2], points[0], tmp_path)
    for name in ("front", "heatmaps", "acceptance", "predicted"):
        assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_without_a_draft_there_is_the_front_alone(tmp_path):
    from hf_specdec.tuning.figures import draw

    draw([PLAIN], [PLAIN], PLAIN, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["front.png"]
