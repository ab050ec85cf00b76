"""Which hidden states of the target a DFlash drafter reads.

Two conventions are in use. `target_layer_ids` (z-lab, ModelOpt, transformers) names the layer that a state comes out
of, `aux_hidden_state_layer_ids` (speculators) and `eagle_aux_hidden_state_layer_ids` (Nemotron) the one that it enters,
which is one more and transformers' index of `hidden_states`. We keep the latter.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..common.fields import Fields

_LEAVING = "target_layer_ids"
_ENTERING = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")


def read_aux_layers(
    fields: Fields, num_layers: int, num_target_layers: int, override: Sequence[int] | None
) -> tuple[int, ...]:
    """The entering ids.

    Args:
        fields: of config.json.
        num_layers, num_target_layers: of the drafter and of the target.
        override: entering ids that the user gives instead.

    Raises:
        ValueError: the lists contradict each other, or the target has no such layer.
    """
    leaving = tuple(i + 1 for i in fields.layer_ids(_LEAVING))
    entering = next((ids for name in _ENTERING if (ids := fields.layer_ids(name))), ())
    if override is not None:
        layers = tuple(override)
    elif leaving and entering and leaving != entering:
        raise ValueError(
            f"config.json in {fields.path} has {_LEAVING} {[i - 1 for i in leaving]}, which are the hidden states "
            f"{list(leaving)}, and another list that names {list(entering)}; say which with aux_layers=..."
        )
    elif leaving or entering:
        layers = leaving or entering
    else:
        depth = fields.integer("num_target_layers", num_target_layers)
        layers = tuple(i + 1 for i in default_target_layers(depth, num_layers))
    if not layers or min(layers) < 0 or max(layers) > num_target_layers:
        raise ValueError(
            f"{fields.path} reads the hidden states {list(layers)} and the target has {num_target_layers} layers; it "
            "was trained for another target, or on other layers (aux_layers=...)."
        )
    return layers


def default_target_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """z-lab's ids where a config names none: one for each layer of the drafter, evenly from 1 to the last but two."""
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_layers))
