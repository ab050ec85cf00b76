"""Which path each causal-LM type of transformers takes: `python tests/architectures.py` writes docs/architectures.md.

A type counts as served only if a small random model of it, two rows of different lengths and a drafter that is right
now and then, gives the text of plain `generate` in fp32.
"""

import re
import warnings
from collections import Counter
from pathlib import Path

import torch
import transformers
from scripted import RowScript
from tiny import prompts
from tiny_types import tiny_of_type
from tiny_vision import TYPES as VISION_TYPES
from tiny_vision import tiny_vlm, with_images
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_specdec.decoding.ragged_model import why_not_ragged
from hf_specdec.integration.images import image_layers
from hf_specdec.integration.probe import NotRagged, check_ragged

TYPES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
DOCUMENT = Path(__file__).parent.parent / "docs" / "architectures.md"
HEADER = """# Served architectures

Every causal-LM type of transformers {version}, from a tiny random model of it: the path that it takes, and why no
better one. `python tests/architectures.py` writes this file, and `make slow` checks every line of it against plain
`generate` (greedy, fp32, two rows of different lengths, a drafter that is right now and then). Configs are the default
ones made small, so options that are off by default are not covered, and models with images or audio ran on text; some
with images are below.

- **ragged**: a batch at once, rows of different lengths in one preallocated cache; rejected tokens are written over.
- **own, crop**: row by row with the model's own cache, which is cut back.
- **own, replay**: row by row; a recurrent state is put back, and the accepted tokens run again before the next draft.
- **own, stepwise**: row by row without drafts, because the model is wrong over several tokens at once.
- **refused**, with a sentence, before any forward pass.
- **not built**: no small model of this type could be made here, so nothing is known.

{counts}

| model type | path | why |
|---|---|---|
"""
WITH_IMAGES = """
## With images

Vision-language models that `tests/tiny_vision.py` builds, on three rows with two images, one and none. The prefill is
transformers' own, so images are read once, as in plain decoding; drafters see their placeholders as tokens.

| model type | path | why |
|---|---|---|
"""
OPTIONS = {"do_sample": False, "max_new_tokens": 20, "eos_token_id": None, "pad_token_id": 0}


def verdict(model_type: str) -> tuple[str, str]:
    """(path, why not a better one)."""
    try:
        model = tiny_of_type(model_type)
    except ValueError as fault:
        return "not built", str(fault).rstrip(": ")
    notes = []
    for lengths in ([9, 4], [9, 9]):
        inputs = prompts(lengths)
        expected = model.generate(**inputs, **OPTIONS)
        drafter = right_now_and_then(expected[:, 9:])
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = model.generate(**inputs, **OPTIONS, assistant_model=drafter.bind(model))
        except ValueError as refusal:
            if "without padding only" in str(refusal):
                notes.append("without padding only")
                continue
            return "refused", str(refusal).split("drafters yet: ")[-1].rstrip(".")
        if not torch.equal(found, expected):
            return "WRONG", "its text is not that of plain generate"
        stats = drafter.last_stats
        if stats.cache == "ragged":
            return "ragged", ""
        stepwise = [str(w.message).split("a step: ")[1].rstrip(".") for w in caught if "a step: " in str(w.message)]
        return f"own, {stats.rollback}", "; ".join([*notes, why_not(model), *map(_without_numbers, stepwise)])
    raise AssertionError("rows of one length are refused for padding")


def verdict_with_images(name: str) -> tuple[str, str]:
    """(path, why not a better one) of a model of `tiny_vision`."""
    model, inputs = tiny_vlm(name), with_images(name, [2, 1, 0], [7, 9, 5])
    expected = model.generate(**inputs, **OPTIONS)
    drafter = right_now_and_then(expected[:, inputs["input_ids"].shape[1] :]).bind(model)
    if not torch.equal(model.generate(**inputs, **OPTIONS, assistant_model=drafter), expected):
        return "WRONG", "its text is not that of plain generate"
    stats = drafter.last_stats
    return ("ragged", "") if stats.cache == "ragged" else (f"own, {stats.rollback}", why_not(model))


def right_now_and_then(texts: torch.Tensor) -> RowScript:
    """A drafter of the new tokens [B, m] that are to come."""
    return RowScript(texts.tolist(), right=lambda row, round: (row + 2 * round) % 5, num_draft_tokens=4)


def why_not(model: PreTrainedModel) -> str:
    """Why it does not take ragged rows."""
    if image_layers(model):
        return "its cross-attention layers keep images in the cache"
    if reason := why_not_ragged(model):
        return reason
    try:
        check_ragged(model)
    except NotRagged as reason:
        return _without_numbers(str(reason))
    return "it prepares the inputs of each step in a way of its own"


def _without_numbers(reason: str) -> str:
    """Measured errors and messages of other libraries differ from machine to machine."""
    return re.sub(r" by [0-9.e+-]+ of .*", "", re.sub(r" \(.*", "", reason, flags=re.DOTALL))


def document(verdicts: dict[str, tuple[str, str]], with_images: dict[str, tuple[str, str]]) -> str:
    counted = Counter(path for path, _ in verdicts.values())
    counts = f"Of {len(verdicts)} types: " + "; ".join(f"{n} {path}" for path, n in counted.most_common()) + "."
    counts = "\n".join(re.findall(r".{1,119}(?:\s|$)", counts)).rstrip()
    header = HEADER.format(version=transformers.__version__, counts=counts)
    return header + _lines(verdicts) + WITH_IMAGES + _lines(with_images)


def _lines(verdicts: dict[str, tuple[str, str]]) -> str:
    return "".join(f"| {name} | {path} | {why} |\n" for name, (path, why) in verdicts.items())


def documented(section: str = "Served architectures") -> dict[str, tuple[str, str]]:
    """What a section of the document says."""
    text = DOCUMENT.read_text().split(f"# {section}\n")[1].split("\n#")[0]
    cells = [line.strip("| \n").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    return {name: (path, why[0].strip(" |") if why else "") for name, path, *why in cells[1:]}


def main() -> None:
    transformers.logging.set_verbosity_error()
    verdicts = {}
    for name in TYPES:
        verdicts[name] = verdict(name)
        print(name, *verdicts[name], sep=" | ", flush=True)
    DOCUMENT.parent.mkdir(exist_ok=True)
    DOCUMENT.write_text(document(verdicts, {name: verdict_with_images(name) for name in VISION_TYPES}))


if __name__ == "__main__":
    main()
