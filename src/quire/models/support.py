"""Refusal of models that paged attention does not support, by their config or class.

`layout.limits` refuses models by name. Models that pass all checks are still compared with
Transformers when they are loaded (`verify`).
"""

import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping

from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from quire.errors import UnsupportedModel
from quire.layout.limits import (
    CHUNKED,
    ENCODER,
    ENCODER_DECODER,
    IGNORED_OPTIONS,
    LENGTH_DEPENDENT_ROPE,
    MULTIMODAL,
    OLD_ATTENTION,
    OWN_ATTENTION,
    RECURRENT,
    SHARED_KV,
    SPARSE,
    WITH_NEWER_TRANSFORMERS,
    WITH_TRANSFORMERS,
    Refusal,
    refuse_model_type,
    unsupported,
)
from quire.models.own_attention import has_own_attention, needs_no_positions
from quire.models.rope import refuse_dynamic

Applies = Callable[[PreTrainedConfig], bool]


def _truthy(*names: str) -> Applies:
    return lambda config: any(getattr(config, name, None) for name in names)


def _attends_to_later_tokens(config: PreTrainedConfig) -> bool:
    """Whether text attends to later tokens; "vision": only the tokens of an image do."""
    return getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision")


def _has_layer_type(*kinds: str) -> Applies:
    return lambda config: any(kind in kinds for kind in _layer_types(config))


def _unless(families: Collection[str], applies: Applies) -> Applies:
    return lambda config: config.model_type not in families and applies(config)


def _of_rope(config: PreTrainedConfig, name: str) -> object:
    parameters = getattr(config, "rope_parameters", None)
    return parameters.get(name) if isinstance(parameters, Mapping) else None


def _has_plain_alibi(config: PreTrainedConfig) -> bool:
    attention = config.attn_config
    other = attention.prefix_lm or attention.qk_ln or attention.alibi_bias_max != 8
    return bool(attention.alibi and not other)


_SHARING = frozenset({"gemma3n_text", "gemma4_text", "gemma4_unified_text"})
_CHUNKED = frozenset({"llama4_text"})
_INDEXED = frozenset({"axk2", "deepseek_v32", "dots3_note_text", "glm_moe_dsa", "hy_v4"})
_CAPABILITIES: tuple[tuple[Applies, Refusal], ...] = (
    (_truthy("text_config", "vision_config", "audio_config"), MULTIMODAL),
    (_truthy("is_encoder_decoder"), ENCODER_DECODER),
    (_attends_to_later_tokens, ENCODER),
    (lambda config: config.model_type == "mpt" and not _has_plain_alibi(config), IGNORED_OPTIONS),
    (
        lambda config: _of_rope(config, "short_mscale") != _of_rope(config, "long_mscale"),
        LENGTH_DEPENDENT_ROPE,
    ),
    (_unless(_INDEXED, _truthy("index_topk")), SPARSE),
    (_unless(_SHARING, _truthy("num_kv_shared_layers")), SHARED_KV),
    (_unless(_CHUNKED, _truthy("attention_chunk_size")), CHUNKED),
    (_unless(_CHUNKED, _has_layer_type("chunked_attention")), CHUNKED),
    (_has_layer_type("recurrent"), RECURRENT),
)


def refuse_config(config: PreTrainedConfig) -> None:
    """Refuse an unsupported model by its config, before any weight is read."""
    refuse_model_type(config.model_type)
    for applies, refusal in _CAPABILITIES:
        if applies(config):
            raise unsupported(config.model_type, refusal)
    for rope_type in _rope_types(config):
        refuse_dynamic(rope_type)


def refuse_class(model_class: type[PreTrainedModel]) -> None:
    """Refuse a model class without Transformers' attention interface or without `position_ids`."""
    module = sys.modules[model_class.__module__]
    if not (hasattr(module, "ALL_ATTENTION_FUNCTIONS") or has_own_attention(model_class)):
        family = getattr(model_class.config_class, "model_type", None)
        is_newer = family in WITH_NEWER_TRANSFORMERS
        raise unsupported(model_class.__name__, OLD_ATTENTION if is_newer else OWN_ATTENTION)
    takes_positions = "position_ids" in inspect.signature(model_class.forward).parameters
    if not takes_positions and not needs_no_positions(model_class):
        raise UnsupportedModel(
            f"{model_class.__name__} is not supported: it takes no position_ids, and the tokens of "
            f"several sequences in one batch need them; {WITH_TRANSFORMERS}"
        )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel] | None:
    """The causal language model that Transformers has for a config, or None."""
    found: object = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found if isinstance(found, type) else None


def _layer_types(config: PreTrainedConfig) -> Iterator[str]:
    kinds = getattr(config, "layer_types", None)
    yield from kinds if isinstance(kinds, list | tuple) else ()


def _rope_types(config: PreTrainedConfig) -> Iterator[str]:
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return
    if "rope_type" in parameters:
        yield str(parameters["rope_type"])
    for nested in parameters.values():  # one set for each kind of layer
        if isinstance(nested, Mapping) and "rope_type" in nested:
            yield str(nested["rope_type"])
