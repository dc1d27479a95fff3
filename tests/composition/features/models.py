"""Kinds of models."""

from composition.feature import Feature, setting

MODELS = {
    "sliding windows": ("gemma3", "half of the layers (`gemma3`)"),
    "windows in all layers": ("mistral", "`mistral` with sliding windows"),
    "attention sinks": ("gpt_oss", "`gpt_oss`, with windows and experts"),
    "learned positions": ("opt", "`opt`"),
    "long RoPE": ("phi3_longrope", "`phi3` with long RoPE"),
    "one KV head": ("llama_mqa", "`llama` with one KV head"),
    "native decoder": ("wide_llama", "`llama` in C (`--model-impl native`)"),
    "unequal heads": ("gemma4_unified", "other dims and KV heads in windows (`gemma4_unified`)"),
    "shared KV": ("gemma4", "layers that read the KV of other layers (`gemma4`)"),
    "chunked attention": ("llama4", "half of the layers (`llama4`)"),
    "latent attention": ("deepseek_v3", "one latent per token (`deepseek_v3`)"),
    "recurrent states": ("qwen3_5", "half of the layers (`qwen3_5`)"),
    "sparse attention": ("glm_moe_dsa", "an index selects latents (`glm_moe_dsa`)"),
}

OTHERS = {
    "long RoPE": "phi3_longrope_window",
    "one KV head": "wide_mistral",
    "native decoder": "wide_qwen2",
    "unequal heads": "gemma4_apart",
    "latent attention": "youtu",
    "sparse attention": "glm_moe_dsa_dense",
}
"""Tried where a feature needs sliding windows, several KV heads, or no experts."""


def _models(name: str, architecture: str) -> dict[str, tuple[str, ...]]:
    return {"architecture": (architecture, OTHERS[name])} if name in OTHERS else {}


FEATURES = tuple(
    Feature(
        name=name,
        group="model",
        option=option,
        draw=setting(
            architecture=architecture,
            times=2 if architecture == "gpt_oss" else 1,
            vary=_models(name, architecture),
        ),
        acted=lambda ran: ran.outcome.compared > 0 or ran.case.approximate,
        alone_in="model",
    )
    for name, (architecture, option) in MODELS.items()
)
