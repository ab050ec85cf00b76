"""How families of models publish their multi-token prediction (MTP) layers: one row each.

A layer is  block(projection([embedding_norm(embedding), hidden_norm(state)])).  The block is one or several of the
target's own decoder layers; rows say what the tensors are called and where families differ. Sources: the loading code
of vLLM (`vllm/model_executor/models/*_mtp.py`) and the checkpoints' indices.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_OUTER = ("model.", "language_model.")  # what composite models put in front of the names of their text part
_EMBEDDING, _HEAD = "embed_tokens.", "lm_head."


@dataclass(frozen=True)
class MtpFamily:
    """A family.

    Args:
        name: how standalone repositories and messages call it.
        model_types: of the targets' text configs. A standalone repository may serve any target.
        tensors: (published prefix, prefix in a layer of ours), the longest match counts. {L} stands for the number of
            the target's layers plus that of the MTP layer, {i} for the latter, {j} for a decoder layer among all those
            of the MTP layers, {k} for the last one of the MTP layer. A prefix without any of these belongs to all
            layers. `model.` and `language_model.` in front are left out.
        count_fields: config fields that give the number of layers, nested ones dotted; the first one that is there
            counts. Without one the tensors are counted.
        hidden_first: the projection takes [state, embedding] instead of [embedding, state].
        final_norm: whether the output head reads the block's output after a norm of its own, or the config's flag that
            says so.
        carry: what stands in the place of the target's state where a layer drafts on: the block's output "raw" or
            "normed", after the final norm. The wrong one is not seen in the first drafted token, only from the second.
        target_state: the target's last hidden state is taken "normed", after its final norm, or "raw".
        entries: what the MTP layers have in lists of the config with an entry for each of the target's layers. Where
            the config has the same list with mtp_ in front that one counts, without either the target's last entry.
        blocks_field: config field that lists the kinds of the several decoder layers of each MTP layer.
        divisor_field: config field with a number that the output head's input is divided by.
    """

    name: str
    model_types: tuple[str, ...]
    tensors: tuple[tuple[str, str], ...]
    count_fields: tuple[str, ...] = ("num_nextn_predict_layers", "num_mtp_layers")
    hidden_first: bool = False
    final_norm: bool | str = True
    carry: str = "raw"
    target_state: str = "normed"
    entries: tuple[tuple[str, Any], ...] = ()
    blocks_field: str | None = None
    divisor_field: str | None = None

    def num_layers(self, *configs: Any) -> tuple[int, str] | None:
        """(number of MTP layers, the field that says so); None where no config does."""
        for field in self.count_fields:
            for value in configs:
                for part in field.split("."):
                    value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
                if isinstance(value, int) and not isinstance(value, bool):
                    return value, field
        return None

    def prefixes(self, index: int, first_layer: int, num_blocks: int = 1) -> list[tuple[str, str]]:
        """(published prefix, ours) of the tensors of MTP layer `index`.

        Args:
            first_layer: number of the target's layers.
            num_blocks: decoder layers in each MTP layer.
        """
        filled = []
        for published, ours in self.tensors:
            for block in range(num_blocks) if "{j}" in published else (0,):
                first = index * num_blocks
                numbers = {"L": first_layer + index, "i": index, "j": first + block, "k": first + num_blocks - 1}
                filled.append((published.format(**numbers), ours.format(j=block)))
        return filled

    def ours(self, name: str, prefixes: Iterable[tuple[str, str]]) -> str | None:
        """A published tensor's name in one of our layers; None where it is not that layer's."""
        name = without_outer(name)
        found = max(((len(old), new) for old, new in prefixes if name.startswith(old)), default=None)
        return found and found[1] + name[found[0] :]

    def published(self, name: str, prefixes: Iterable[tuple[str, str]]) -> str:
        """The published name of a tensor of one of our layers."""
        old, new = next((old, new) for old, new in prefixes if name.startswith(new))
        return old + name[len(new) :]

    def count(self, names: Iterable[str], first_layer: int, num_blocks: int = 1) -> int:
        """MTP layers of which `names` holds tensors."""
        bare, count = [without_outer(name) for name in names], 0
        while True:
            first, last = count * num_blocks, (count + 1) * num_blocks - 1
            numbered = [old.format(L=first_layer + count, i=count, j=first, k=last) for old in self._numbered]
            if not any(name.startswith(tuple(numbered)) for name in bare):
                return count
            count += 1

    def fills(self, names: Iterable[str]) -> bool:
        """Whether these tensors are MTP layers of this family and nothing else but an embedding and an output head."""
        patterns = [(_pattern(published), ours) for published, ours in self.tensors]
        projections, blocks = set(), set()  # numbers of the layers that have them
        for name in map(without_outer, names):
            if name.startswith((_EMBEDDING, _HEAD)):
                continue
            matches = [(match, ours) for pattern, ours in patterns if (match := pattern.match(name))]
            if not matches:
                return False
            match, ours = max(matches, key=lambda pair: pair[0].end())
            number = match[1] if match.re.groups else ""
            if ours == "projection.":
                projections.add(number)
            elif ours.startswith("blocks."):
                blocks.add(number)
        # Where a target's own layers have such names, too, every layer must have a projection.
        numbered_alike = any("{L}" in published for published in self._numbered)
        return bool(projections) and (not numbered_alike or blocks <= projections)

    @property
    def _numbered(self) -> list[str]:
        return [published for published, _ in self.tensors if "{" in published]


def without_outer(name: str) -> str:
    """A tensor's name without the parts that a composite model puts in front."""
    for _ in _OUTER:
        for prefix in _OUTER:
            name = name.removeprefix(prefix)
    return name


def _pattern(published: str) -> re.Pattern[str]:
    """A published prefix with any number in it."""
    return re.compile(re.sub(r"\\{[Lijk]\\}", r"(\\d+)", re.escape(published)))


_DEEPSEEK_NAMES = (
    ("layers.{L}.enorm.", "embedding_norm."),
    ("layers.{L}.hnorm.", "hidden_norm."),
    ("layers.{L}.eh_proj.", "projection."),
    ("layers.{L}.shared_head.norm.", "final_norm."),
    ("layers.{L}.shared_head.head.", "lm_head."),
    ("layers.{L}.embed_tokens.", "embed_tokens."),
    ("layers.{L}.", "blocks.0."),
)
_QWEN_NAMES = (
    ("mtp.fc.", "projection."),
    ("mtp.pre_fc_norm_embedding.", "embedding_norm."),
    ("mtp.pre_fc_norm_hidden.", "hidden_norm."),
    ("mtp.norm.", "final_norm."),
    ("mtp.embed_tokens.", "embed_tokens."),
    ("mtp.lm_head.", "lm_head."),
    ("mtp.layers.{i}.", "blocks.0."),
)
_STEP_NAMES = (
    *_DEEPSEEK_NAMES,
    *((old.replace("{L}.", "{L}.transformer."), new) for old, new in _DEEPSEEK_NAMES),
    ("layers.{L}.shared_head.output.", "lm_head."),
    ("layers.{L}.transformer.shared_head.output.", "lm_head."),
)
_ERNIE_NAMES = (
    ("mtp_emb_norm.{i}.", "embedding_norm."),
    ("mtp_hidden_norm.{i}.", "hidden_norm."),
    ("mtp_linear_proj.{i}.", "projection."),
    ("mtp_block.{i}.", "blocks.0."),
)
_NEMOTRON_NAMES = (
    ("mtp.layers.{j}.", "blocks.{j}."),
    ("mtp.layers.{j}.enorm.", "embedding_norm."),
    ("mtp.layers.{j}.hnorm.", "hidden_norm."),
    ("mtp.layers.{j}.eh_proj.", "projection."),
    ("mtp.layers.{k}.final_layernorm.", "final_norm."),
)
_MIMO_NAMES = (
    ("mtp_layers.{i}.token_layernorm.", "embedding_norm."),
    ("mtp_layers.{i}.hidden_layernorm.", "hidden_norm."),
    ("mtp_layers.{i}.input_proj.", "projection."),
    ("mtp_layers.{i}.final_layernorm.", "final_norm."),
    ("mtp_layers.{i}.", "blocks.0."),
)
_INKLING_NAMES = (
    ("mtp.layers.{i}.embed_norm.", "embedding_norm."),
    ("mtp.layers.{i}.hidden_norm.", "hidden_norm."),
    ("mtp.layers.{i}.input_proj.", "projection."),
    ("mtp.layers.{i}.transformer_block.", "blocks.0."),
    ("mtp.chain_norm.", "final_norm."),
)

FAMILIES: tuple[MtpFamily, ...] = (
    MtpFamily("deepseek_v3", ("deepseek_v3", "glm4_moe"), _DEEPSEEK_NAMES),
    MtpFamily(
        "qwen3_next",
        ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
        _QWEN_NAMES,
        count_fields=("mtp_num_hidden_layers", "num_nextn_predict_layers"),
        carry="normed",
        entries=(("layer_types", "full_attention"),),
    ),
    MtpFamily("mellum", ("mellum",), _QWEN_NAMES, carry="normed"),
    MtpFamily("ernie4_5_moe", ("ernie4_5_moe",), _ERNIE_NAMES, final_norm=False),
    MtpFamily("nemotron_h", ("nemotron_h",), _NEMOTRON_NAMES, carry="normed", blocks_field="mtp_layers_block_type"),
    MtpFamily(
        "step3p5",
        ("step3p5",),
        _STEP_NAMES,
        # The lists of the published config are cut to the target's layers; of the MTP layers' entries all are zero.
        entries=(("swiglu_limits", None), ("swiglu_limits_shared", None)),
    ),
    MtpFamily(
        "inkling",
        ("inkling_text",),
        _INKLING_NAMES,
        count_fields=("num_mtp_layers", "mtp_config.num_nextn_predict_layers"),
        hidden_first=True,
        final_norm="chain_hidden_post_norm",
        carry="normed",
        divisor_field="logits_mup_width_multiplier",
    ),
    MtpFamily("mimo", ("mimo",), _MIMO_NAMES, hidden_first=True, carry="normed"),
)


def family_of(model_type: str) -> MtpFamily | None:
    """The row of a target's text config."""
    return next((family for family in FAMILIES if model_type in family.model_types), None)
