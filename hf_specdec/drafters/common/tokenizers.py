"""What the tokenizer files beside a model say, read without building a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..auto import Repository


def differing_tokens(folder: Path, target: PreTrainedModel, own_ids: Collection[int] | None = None) -> list[str]:
    """Tokens with another id in a drafter's tokenizer than in the target's; none where one of the two is not at hand.

    Args:
        folder: of the drafter.
        target: the model that it drafts for.
        own_ids: ids that may differ, for a drafter with tokens of its own: then only ids that both have are compared.
    """
    ours, theirs = vocabulary(folder), vocabulary(folder_of(target))
    if ours is None or theirs is None:
        return []
    if own_ids is None:
        return sorted(token for token in ours.keys() | theirs.keys() if ours.get(token) != theirs.get(token))
    named = {id: token for token, id in theirs.items()}
    return sorted(token for token, id in ours.items() if id not in own_ids and named.get(id, token) != token)


def vocabulary(folder: Path | None) -> dict[str, int] | None:
    """token -> id of a tokenizer.json, added tokens included; None where there is none."""
    content = {} if folder is None else _read(folder / "tokenizer.json")
    found = content.get("model", {}).get("vocab")
    if not isinstance(found, dict):
        return None
    return {**found, **{token["content"]: token["id"] for token in content.get("added_tokens", [])}}


def added_tokens(folder: Path) -> dict[str, int]:
    """token -> id of the tokens that were added to a vocabulary; {} where no file tells."""
    listed = _read(folder / "tokenizer.json").get("added_tokens", [])
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    return {
        **{token: id for token, id in _read(folder / "added_tokens.json").items() if isinstance(id, int)},
        **{_content(token): int(id) for id, token in decoder.items()},
        **{token["content"]: token["id"] for token in listed},
    }


def special_token_id(folder: Path, name: str) -> int | None:
    """Id of a special token such as "mask_token"; None where there is none."""
    for file in ("tokenizer_config.json", "special_tokens_map.json"):
        token = _read(folder / file).get(name)
        if token is not None:
            return {**(vocabulary(folder) or {}), **added_tokens(folder)}.get(_content(token))
    return None


def is_masked_qwen2(repository: Repository) -> bool:
    """Whether what calls itself a plain Qwen2 brings a mask token, which no autoregressive one has: it was trained on
    to fill in masks (open-dcoder)."""
    if repository.config.get("architectures") != ["Qwen2ForCausalLM"]:
        return False
    return special_token_id(repository.path, "mask_token") is not None


def folder_of(model: PreTrainedModel) -> Path | None:
    """Where a model was loaded from, as far as it is on this machine."""
    name = model.name_or_path
    if not name:
        return None
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(name, "tokenizer.json") if name.count("/") <= 1 else None
    return Path(cached).parent if isinstance(cached, str) else None


def _content(token: Any) -> str:
    return token["content"] if isinstance(token, dict) else str(token)


def _read(file: Path) -> dict[str, Any]:
    """The object in a JSON file; {} where there is none."""
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not readable JSON: {error}.") from error
    return content if isinstance(content, dict) else {}
