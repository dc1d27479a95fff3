"""Unsupported model types, in one table: reason and alternative of each.

The table is separate from the loader so that `quire plan` can refuse a model without loading it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quire.errors import UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason why a model type is unsupported, and the alternative."""

    reason: str
    instead: str


WITH_TRANSFORMERS = "run it with Transformers itself"
ALIBI = Refusal(
    reason="ALiBi adds a distance bias to attention, which paged attention does not support",
    instead="use a model with rotary positions, such as Llama, Qwen or Mistral",
)
LATENT = Refusal(
    reason="its attention caches one latent vector per token, not keys and values per head (MLA)",
    instead="use a model with grouped-query attention, such as Llama or Qwen",
)
RECURRENT = Refusal(
    reason="some of its layers are recurrent: their state has no keys and values",
    instead="use a model with attention in all layers, such as Llama, Mistral or Qwen 2 and 3",
)
ENCODER_DECODER = Refusal(
    reason="it has an encoder, whose keys and values do not grow token by token",
    instead="use a decoder-only model, or " + WITH_TRANSFORMERS,
)
ENCODER = Refusal(
    reason="it is an encoder: its tokens attend to later tokens",
    instead="use a causal language model",
)
MULTIMODAL = Refusal(
    reason="it is multimodal (images, audio or video), and Quire supports only text",
    instead="use its text-only checkpoint if one is published (for example gemma3_text)",
)
CHUNKED = Refusal(
    reason="some layers use chunked attention, which is not a sliding window",
    instead="use a model with full or sliding-window attention",
)
SHARED_KV = Refusal(
    reason="some layers attend to the keys and values of other layers",
    instead="use Gemma 2 or Gemma 3 text models",
)
OWN_ATTENTION = Refusal(
    reason="its layers do not use Transformers' attention interface",
    instead=WITH_TRANSFORMERS + ", or use Llama, Qwen, Mistral or GPT-NeoX models",
)
OLD_ATTENTION = Refusal(
    reason="the installed Transformers computes its attention without the attention interface",
    instead="install transformers>=5.24, whose layers of this model use it",
)
WITH_NEWER_TRANSFORMERS = frozenset({"codegen", "gptj"})
"""Families whose layers use the attention interface since Transformers 5.24."""
OWN_MASK = Refusal(
    reason="its attention depends on a learned mask or bias",
    instead=WITH_TRANSFORMERS,
)
REPEATED = Refusal(
    reason="its layers compute attention several times per token, and a slot holds one key",
    instead="use a model with one attention per layer, such as Llama or Qwen",
)
MIXED_HEADS = Refusal(
    reason="a router selects the query heads of each token",
    instead="use a mixture with experts in its MLPs only, such as Mixtral or Qwen 3 MoE",
)
SPARSE = Refusal(
    reason="an indexer selects the tokens that each query attends to",
    instead="use a model with full or sliding-window attention",
)
LENGTH_DEPENDENT_ROPE = Refusal(
    reason="its RoPE scale depends on the longest sequence of the batch",
    instead="use Phi-3 or Mixtral models",
)

_BY_NAME: tuple[tuple[Refusal, str], ...] = (
    (ALIBI, "bloom mpt"),
    (OWN_ATTENTION, "falcon ctrl gpt_neo gpt_neox_japanese imagegpt openai-gpt xglm"),
    (
        LATENT,
        "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 dots3_note dots3_note_text "
        "glm4_moe_lite glm_moe_dsa hy_v4 longcat_flash minicpm3 mistral4 youtu",
    ),
    (
        RECURRENT,
        "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_linear lfm2 "
        "lfm2_moe lfm3 mamba mamba2 minimax nemotron_h olmo_hybrid qwen3_5 qwen3_5_moe "
        "qwen3_5_moe_text qwen3_5_text qwen3_next qwen4_exp qwen4_exp_text recurrent_gemma rwkv "
        "xlstm zamba zamba2 zaya",
    ),
    (
        ENCODER_DECODER,
        "bart bigbird_pegasus blenderbot blenderbot-small encoder-decoder led longt5 m2m_100 "
        "marian mbart mt5 mvp pegasus plbart prophetnet switch_transformers t5 t5gemma umt5 "
        "whisper",
    ),
    (
        ENCODER,
        "albert bert bert-generation big_bird camembert data2vec-text deberta deberta-v2 "
        "distilbert electra ernie megatron-bert modernbert reformer rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm xlm-roberta xlm-roberta-xl xlnet xmod",
    ),
    (SHARED_KV, "gemma3n gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text"),
    (CHUNKED, "llama4 llama4_text"),
    (OWN_MASK, "doge inkling inkling2 inkling2_text inkling_text"),
    (REPEATED, "diffllama hrm_text"),
    (MIXED_HEADS, "jetmoe"),
    (SPARSE, "minimax_m3_vl_text"),
    (LENGTH_DEPENDENT_ROPE, "phimoe"),
    (
        MULTIMODAL,
        "emu3 fuyu git got_ocr2 mllama moshi moss_transcribe_diarize musicgen musicgen_melody "
        "phi4_multimodal trocr",
    ),
)
REFUSED: Mapping[str, Refusal] = {
    model_type: refusal for refusal, names in _BY_NAME for model_type in names.split()
}
"""Refused `model_type`s. The names are those of Transformers."""


def refuse_model_type(model_type: str) -> None:
    """Refuse an unsupported model type.

    Raises:
        UnsupportedModel: the model type is unsupported; the message states reason and alternative.
    """
    if model_type in REFUSED:
        raise refused(model_type, REFUSED[model_type])


def refused(name: str, refusal: Refusal) -> UnsupportedModel:
    """Return the error for an unsupported model, family or class."""
    return UnsupportedModel(f"{name} is not supported: {refusal.reason}; {refusal.instead}")
