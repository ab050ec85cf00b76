"""P-EAGLE heads in every layout: the tensors and fields of an EAGLE-3 format, a mask token and a mask feature."""

from collections.abc import Callable
from pathlib import Path

from eagle3_formats import Head, modelopt, specforge, speculators_new, write

TRAINED_LENGTH = 8  # tokens that speculators' config says a draft has


def peagle_speculators(head: Head) -> tuple[dict, dict]:
    """Its proposals are as long as the drafts that it was trained on."""
    config, tensors = speculators_new(head)
    proposal = {"proposal_type": "greedy", "speculative_tokens": TRAINED_LENGTH, "verifier_accept_k": 1}
    config.update(
        architectures=["PEagleDraftModel"],
        speculators_model_type="peagle",
        mask_token_id=head.mask_token_id,
        embed_requires_grad=True,
        speculators_config={
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
    )
    return config, tensors


def peagle_midlayer(head: Head) -> tuple[dict, dict]:
    config, tensors = specforge(head)
    return {**config, "pard_token": head.mask_token_id}, tensors


def peagle_layers(head: Head) -> tuple[dict, dict]:
    config, tensors = modelopt(head)
    return {**config, "ptd_token_id": head.mask_token_id}, tensors


FORMATS: dict[str, Callable[[Head], tuple[dict, dict]]] = {
    "P-EAGLE, speculators": peagle_speculators,
    "P-EAGLE, SafeAILab or SpecForge": peagle_midlayer,
    "P-EAGLE, ModelOpt": peagle_layers,
}


def write_head(folder: Path, head: Head, format: str = "P-EAGLE, speculators", **config) -> Path:
    """A head in one layout, with fields of its config replaced."""
    fields, tensors = FORMATS[format](head)
    return write(folder, {**fields, **config}, tensors)
