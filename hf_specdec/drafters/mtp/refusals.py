"""Targets that are not served although engines or transformers' configs speak of their MTP layers, with the reason."""

from __future__ import annotations

_NONE_KNOWN = "no checkpoint of its kind with MTP layers is known, nor what their tensors are called"

NOT_SERVED = {
    "minimax_m2": "its config counts MTP layers and its checkpoints were published without them",
    "minimax_m3_vl_text": (
        "sources disagree on whether its checkpoints have MTP layers, and engines on the states that these read"
    ),
    "glm5_next_text": (
        "the indexer of its MTP layer goes by one length of the cache for all rows, and rows here differ in theirs"
    ),
    "mistral_large4_text": "its checkpoint holds a DSpark drafter (mtp_dspark.*) and no MTP layers",
    "sarvam_moe": "its checkpoints were published without MTP layers",
    "sarvam_mla": "its checkpoints were published without MTP layers",
    "axk1": _NONE_KNOWN,
    "glm4v_moe_text": _NONE_KNOWN,
    "inkling2_text": _NONE_KNOWN,
    "kimi_linear": _NONE_KNOWN,
    "olmo_hybrid": _NONE_KNOWN,
    "solar_open": _NONE_KNOWN,
    "youtu": _NONE_KNOWN,
}
