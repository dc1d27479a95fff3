"""Mixture-of-experts layers: how many weights there are, and how many one token uses."""

from dataclasses import dataclass

from quire.layout.config import ConfigReader


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """The expert layers of a model, all alike.

    Attributes:
        num_layers: layers with experts; the others have a dense MLP.
        num_experts: routed experts per layer.
        experts_per_token: routed experts that one token goes through.
        expert_size: width of one expert, in neurons.
        shared_size: width of the part every token goes through; 0 for none.
    """

    num_layers: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0


def read_mixture(reader: ConfigReader, num_layers: int) -> MixtureSpec | None:
    """The experts of a model, or None for a dense one.

    Raises:
        ModelError: there are experts, but not how many of them a token uses.
    """
    num_experts = reader.optional_integer(
        "num_local_experts",
        "num_experts",
        "n_routed_experts",
        "moe_num_experts",
        "ffn_config.moe_num_experts",
    )
    if num_experts is None or num_experts <= 1:
        return None
    expert_size = reader.integer(
        "moe_intermediate_size", "ffn_config.ffn_hidden_size", "intermediate_size"
    )
    return MixtureSpec(
        num_layers=_expert_layers(reader, num_layers),
        num_experts=num_experts,
        experts_per_token=reader.integer(
            "num_experts_per_tok", "num_experts_per_token", "moe_k", "ffn_config.moe_top_k"
        ),
        expert_size=expert_size,
        shared_size=_shared_size(reader, expert_size),
    )


def _shared_size(reader: ConfigReader, expert_size: int) -> int:
    width = reader.optional_integer("shared_expert_intermediate_size", "shared_intermediate_size")
    if width is not None:
        return width
    shared = reader.optional_integer("n_shared_experts", "moe_num_shared_experts")
    return (shared or 0) * expert_size


def _expert_layers(reader: ConfigReader, num_layers: int) -> int:
    first = reader.optional_integer("first_k_dense_replace", "moe_layer_start_index") or 0
    step = reader.positive_integer("decoder_sparse_step") or 1
    dense_layers = reader.integers("mlp_only_layers")
    return sum(
        layer >= first and layer not in dense_layers and (layer + 1) % step == 0
        for layer in range(num_layers)
    )
