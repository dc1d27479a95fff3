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
}

FEATURES = tuple(
    Feature(
        name=name,
        group="model",
        option=option,
        draw=setting(architecture=architecture, times=2 if architecture == "gpt_oss" else 1),
        acted=lambda ran: ran.outcome.compared > 0 or ran.case.approximate,
        alone_in="model",
    )
    for name, (architecture, option) in MODELS.items()
)
