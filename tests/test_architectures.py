"""docs/architectures.md says what is so: for every causal-LM type the path that it takes, and plain generate's text."""

import pytest
from architectures import TYPES, VISION_TYPES, documented, verdict, verdict_with_images


def test_the_document_names_every_type():
    assert sorted(documented()) == TYPES
    assert tuple(documented("With images")) == VISION_TYPES


def test_the_document_says_of_no_type_that_its_text_is_wrong():
    assert {path for path, _ in [*documented().values(), *documented("With images").values()]} <= {
        "ragged", "own, crop", "own, replay", "own, stepwise", "refused", "not built",
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", TYPES)
def test_a_type_takes_the_path_that_the_document_names(name):
    assert verdict(name) == documented()[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", VISION_TYPES)
def test_a_type_takes_the_path_that_the_document_names_with_images_too(name):
    assert verdict_with_images(name) == documented("With images")[name]
