"""Configuration of a run: the model's shape and the recipe. Defaults are those of quire-tiny."""

from dataclasses import asdict, dataclass

from quire.errors import ConfigError

DOCUMENT = "<|doc|>"
BEGIN, END = "<s>", "</s>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Shape of a Llama decoder with tied embeddings; field names are those of its config.json."""

    vocab_size: int = 2048
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    max_position_embeddings: int = 4096
    rope_theta: float = 5e5
    rms_norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"expected query heads to be a multiple of KV heads, got "
                f"{self.num_attention_heads} and {self.num_key_value_heads}; change one of them"
            )

    @property
    def query_size(self) -> int:
        """Elements of all query heads."""
        return self.num_attention_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Elements of all key heads; also of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per KV head."""
        return self.num_attention_heads // self.num_key_value_heads


SMOKE_MODEL = ModelConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Training recipe; together with the step it determines the batch and the learning rate.

    Attributes:
        plan: stages "length:steps:tokens per batch", comma separated.
        mixture: fraction of sequences of each task family and of plain text.
        primer: fraction of sequences of repeated random tokens at the start and at the end, and the
            number of steps in between.
        lr: learning rate of the weight matrices (Muon).
        lr_embed: learning rate of embedding and norms (AdamW).
        weight_decay: weight decay of the weight matrices, in units of the learning rate.
        warmup_steps: steps with a rising learning rate.
        decay: final fraction of the steps, with a linearly decreasing learning rate.
        micro_tokens: tokens of a micro-batch.
        seed: seed of weights and batches.
        structured: initialize previous-token and induction heads.
        autocast: use autocast to bfloat16.
    """

    plan: str = "64:220:4096,128:780:4096,256:340:8192,512:420:8192,1024:400:8192,2048:300:8192"
    mixture: str = (
        "lines=.24,kv=.15,niah=.10,facts=.06,copy=.06,headline=.02,"
        "variables=.04,labels=.07,arithmetic=.06,text=.20"
    )
    primer: str = "0.7,0.03,700"
    lr: float = 0.012
    lr_embed: float = 1.5e-3
    weight_decay: float = 0.01
    warmup_steps: int = 40
    decay: float = 0.45
    micro_tokens: int = 8192
    seed: int = 0
    structured: bool = True
    autocast: bool = True

    def as_dict(self) -> dict[str, object]:
        """All fields, saved with the weights."""
        return asdict(self)
