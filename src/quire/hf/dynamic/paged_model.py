"""The parts of an engine for a user's own model: the model, and options of memory and schedule."""

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.hf.cache_memory import folder_of
from quire.hf.dynamic.batch_options import BatchOptions
from quire.hf.wrapped import WrappedModel
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel
from quire.scheduler.batchers.registry import parse_batcher
from quire.scheduler.schedule_config import ScheduleConfig

_QUEUED = ("baton_pd", "baton_pd_best_fit")  # batchers with a queue of prefilled queries


def loaded_model(
    model: PreTrainedModel, decoder: WrappedModel, tokenizer: PreTrainedTokenizerBase | None
) -> LoadedModel:
    """A user's model as the model of an engine.

    Args:
        model: the model.
        decoder: the wrapped model.
        tokenizer: for the text of outputs; None: token ids only.
    """
    eos = getattr(model.generation_config, "eos_token_id", None)
    ids = tuple(eos) if isinstance(eos, list | tuple) else () if eos is None else (eos,)
    return LoadedModel(
        decoder=decoder,
        tokenizer=tokenizer,
        generation=GenerationDefaults(eos_token_ids=ids),
        spec=decoder.spec,
        name=model.name_or_path or type(model).__name__,
        weight_bytes=sum(part.numel() * part.element_size() for part in model.parameters()),
        folder=folder_of(model),
    )


def kv_options(options: BatchOptions) -> KVConfig:
    """Options of the KV memory of paged rows.

    Raises:
        ConfigError: an option that only dense rows have.
    """
    defaults = BatchOptions()
    for name in ("capacity_tokens", "group_tokens"):
        if getattr(options, name) != getattr(defaults, name):
            raise ConfigError(
                f"{name} is an option of dense rows; leave it out with rows='paged', whose prompts "
                "are prefilled in chunks without padding"
            )
    return KVConfig(
        memory="auto" if options.scale_at is None else options.scale_at,
        swap_space="auto" if options.swap_space is None else options.swap_space,
        page_tokens=options.page_tokens,
        codec=options.codec,
        evict=options.policy,
    )


def schedule_options(options: BatchOptions) -> ScheduleConfig:
    """Options of the scheduler of paged rows.

    Raises:
        UnknownName, ConfigError: the batcher is unknown, or needs dense rows.
    """
    batcher = options.batcher
    parse_batcher(batcher)
    if batcher in _QUEUED:
        batcher += f":prefill={options.prefill},tokens={options.prefill_tokens}"
        batcher += f",hold={options.queue}"
    # a step returns its own tokens
    return ScheduleConfig(max_num_seqs=options.batch_size, batcher=batcher, async_scheduling=False)
