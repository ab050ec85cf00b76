"""docs/mtp.md lists what families.py and refusals.py hold, each type once, and what is refused is refused by name."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import tiny_target

from hf_specdec import AutoDrafter
from hf_specdec.drafters.mtp.families import FAMILIES, MtpFamily
from hf_specdec.drafters.mtp.refusals import NOT_SERVED

DOCUMENT = Path(__file__).parents[1] / "docs" / "mtp.md"


def rows(part: str) -> Iterator[list[str]]:
    for line in part.splitlines():
        if line.startswith("| ") and not line.startswith("| model type"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


SERVED, REFUSED = (list(rows(part)) for part in DOCUMENT.read_text(encoding="utf-8").split("## Not served"))


def described(family: MtpFamily) -> list[str]:
    reads, passes_on = ("streams", "streams") if family.streams else (family.target_state, family.carry)
    return [", ".join(family.model_types), f"`{family.tensors[0][0]}`", reads, passes_on]


def test_every_family_is_in_the_document_as_it_is():
    assert [row[:4] for row in SERVED] == [described(family) for family in FAMILIES]


def test_every_refusal_is_in_the_document_with_its_reason():
    assert {kind: reason for kind, reason, _ in REFUSED} == NOT_SERVED


def test_every_row_names_where_its_facts_are_from():
    assert all(row[-1] for row in [*SERVED, *REFUSED])


def test_no_type_is_both_served_and_refused_or_has_two_rows():
    served = [kind for family in FAMILIES for kind in family.model_types]
    assert len(served) == len(set(served))
    assert not set(served) & set(NOT_SERVED)


@pytest.mark.parametrize("kind", NOT_SERVED)
def test_a_target_that_is_not_served_is_refused_with_its_name_and_the_reason(kind, monkeypatch):
    target = tiny_target("llama")
    text = SimpleNamespace(model_type=kind)
    monkeypatch.setattr(target.config, "get_text_config", lambda *args, **options: text)
    with pytest.raises(ValueError) as caught:
        AutoDrafter.for_target(target, "mtp")
    assert f"targets of type '{kind}' are not served: {NOT_SERVED[kind]}." in str(caught.value)
