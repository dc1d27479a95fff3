"""Combinations of features and model types that are refused: reason and alternative of each.

The conditions of combinations are where the features are; their errors come from `refused`. The
model types are separate from the loader, so that `quire plan` can refuse a model without loading
it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from quire.errors import UnsoundCombination, UnsupportedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """Two features that cannot be combined.

    Attributes:
        area: group of the documentation.
        one, other: the features, for the documentation.
        reason: why they cannot be combined; names in braces are filled in by `refused`.
        instead: what to change.
        subject: begin of the message: the option or text at fault.
        delimiter: between reason and alternative.
    """

    area: str
    one: str
    other: str
    reason: str
    instead: str
    subject: str = ""
    delimiter: str = "; "


def refused(limit: Limit, **values: object) -> UnsoundCombination:
    """Return the error of a limit.

    Args:
        limit: the combination.
        values: values for the names in its texts.
    """
    text = f"{limit.subject}{limit.reason}{limit.delimiter}{limit.instead}"
    return UnsoundCombination(text.format(**values))


# ---- codecs --------------------------------------------------------------------------------------

_codec = partial(Limit, area="codec", subject="KV codec {text!r}: ")
CALIBRATED_KEYS = _codec(
    one="calibrated codecs of keys (`int8_channel`, `kvquant4`, `kvquant3`, `equalise=1`)",
    other="`streaming`",
    reason="constants are measured on keys after RoPE, and streaming stores keys before it",
    instead="use int8 or int4_outliers for keys; values may have a calibrated codec",
)
PROMOTED_WITHOUT_RULE = _codec(
    one="`promoted`",
    other="no eviction",
    reason="the scores of an eviction rule select promoted tokens, and eviction is off",
    instead="use --evict with a rule, such as h2o, or a finer codec",
)
PROMOTED_TOO_LATE = _codec(
    one="`promoted`",
    other="a `residual` below the rule's `every`",
    reason="tokens would leave the residual window before the rule scores them",
    instead="use residual=... of at least the rule's every=..., or a smaller every",
)

# ---- eviction ------------------------------------------------------------------------------------

_rule = partial(Limit, area="eviction", subject="{text!r}: ")
BUDGET_WITHOUT_SCORES = _rule(
    one="a budget that reads the cache (squeeze, lazy, fastgen, ada)",
    other="a rule that returns a retained set and no scores",
    reason="budget {budget} compares scores, and this rule returns none",
    instead="use budget=uniform, or a rule that returns scores",
)
BUDGET_OF_HEADS = _rule(
    one="a budget that gives the heads of a layer unequal caps (ada, fastgen, duo)",
    other="a rule with one set per layer (tova with `scope=layer`, kvcrush and variants with "
    "`sets=layer`; with ada and fastgen also recent, sinks, and random with `scope=layer`)",
    reason="budget {budget} divides a layer over its heads, and this rule retains one set for all "
    "heads of a layer",
    instead="use a rule with one set per head, such as h2o, scope=lane of tova and random, or "
    "sets=head of kvcrush",
)
QUERIES_REROTATED = _rule(
    one="a rule that re-rotates positions (streaming)",
    other="a rule or a budget that stores queries (lazy, fastgen)",
    reason="queries are stored at their original positions, and keys are re-rotated",
    instead="use sinks, which retains the same tokens at their original positions",
)
BUDGET_IN_TOKENS = _rule(
    one="a budget in tokens (by_layer with numbers)",
    other="a cap relative to the prompt",
    reason="the budget sets caps in tokens, and cap={cap} depends on the prompt",
    instead="give cap in tokens, or relative sizes such as by_layer:factors=1.5/0.5",
)
PIECES_BY_TOKEN = _rule(
    one="a rule on whole pages or chunks",
    other="`granularity=token`",
    reason="{name} evicts whole pages or chunks, not single tokens",
    instead="use granularity=page",
)
ONLY_WINDOWS = _rule(
    one="a rule that evicts",
    other="a model whose layers all have sliding windows",
    reason="every layer of the model has a sliding window, chunks or a state, which bound its KV: "
    "{text!r} would never evict",
    instead="use evict=full",
    subject="",
)
UNEQUAL_HEADS = _rule(
    one="a rule that evicts",
    other="a model whose layers with full attention have unequal numbers of KV heads",
    reason="a rule divides its cap over layers of equal KV heads, and the layers with full "
    "attention of this model have unequal numbers of them",
    instead="use evict=full",
)
UNEQUAL_RECORDS = _rule(
    one="a budget that reads the whole cache (lazy, fastgen) with a rule that reads vectors",
    other="a model whose layers with full attention differ in head dims, or of which only some "
    "share their KV with other layers",
    reason="budget {budget} reads the records of all layers together, and those of this model have "
    "unequal sizes",
    instead="leave out budget, or use one that reads no such records, such as squeeze or pyramid",
)
ONE_KV_HEAD = _rule(
    one="a budget over heads, such as `ada`",
    other="a model with one KV head per layer",
    reason="the budget divides each layer over its KV heads, and this model has one KV head per "
    "layer",
    instead="leave out budget, or use one that divides over layers, such as pyramid",
)
RULE_ON_LATENTS = _rule(
    one="`knorm`, `value_norm`, `criticalkv`, `expected_attention` and `triattention`, also as the "
    "base of another rule",
    other="a model with latent attention (MLA)",
    reason="the model stores latents instead of keys and values, and {why}",
    instead="use a rule on attention, positions or directions of keys, such as h2o, snapkv or "
    "keydiff",
)
NO_PROJECTION = _rule(
    one="`criticalkv`, also as the base of another rule",
    other="a model that changes the output of attention before projecting it (a gate, a norm), or "
    "with offloaded weights (`--weights-memory`)",
    reason="the rule reads the weight that projects the output of attention, and {why}",
    instead="use value_norm, which reads values alone",
)
BOTH_SIDES_OF_ROPE = _rule(
    one="`streaming`",
    other="a list of other rules in `--evict-allow`",
    reason="{before!r} needs keys stored before RoPE and {after!r} after it, and an engine has "
    "pages of one kind",
    instead="start one engine for each, or use 'sinks', which retains the same tokens as "
    "'streaming' at their original positions",
    subject="",
)
NO_PRE_ROPE = _rule(
    one="`streaming`",
    other="a model with learned positions, or with an unknown RoPE variant",
    reason="'streaming' stores pre-RoPE keys and rotates them in attention, but {why}",
    instead="use 'sinks', which retains the same tokens at their original positions",
    subject="",
)

_scored = partial(
    _rule, one="a rule with a scoring pass (`kvzip`, also as the base of another rule)"
)
_NO_PASS = "use a rule without a scoring pass, such as snapkv or keydiff"
SCORED_LATER = _scored(
    other="`when` other than `prefill_end`",
    reason="the rule scores tokens in a pass after the prompt, and with when={when} tokens are "
    "evicted when there are no such scores",
    instead="use when=prefill_end, or leave out when",
)
SCORED_TWICE = _scored(
    other="a rule or a budget with another scoring pass",
    reason="a prompt has one scoring pass, and this rule needs two",
    instead="use equal options for both",
)
SCORED_STATES = _scored(
    other="a model with recurrent states or chunked attention",
    reason="the tokens of a scoring pass are removed again, and the model's recurrent states or "
    "chunks of attention cannot go back",
    instead=_NO_PASS,
)
SCORED_RECENT = _scored(
    other="a codec that keeps the newest tokens in full precision (`residual`, codecs of whole "
    "pages)",
    reason="the tokens of a scoring pass would take the place of the newest tokens in full "
    "precision",
    instead="use a codec without them, such as int8 or none, or a rule without a scoring pass",
)
SCORED_OFFLOAD = _scored(
    other="`--kv-offload-memory`",
    reason="a scoring pass needs the KV of the whole prompt in the KV memory",
    instead="leave out --kv-offload-memory, or " + _NO_PASS,
)
SCORED_IN_TRANSFORMERS = _scored(
    other="`QuireCache`",
    reason="a scoring pass runs the model after the prompt, and a cache in Transformers cannot",
    instead="use LLM, or " + _NO_PASS,
)

# ---- several ranks -------------------------------------------------------------------------------

_ranks = partial(Limit, area="ranks", other="`--tensor-parallel-size` above 1")
_ONE_RANK = "or use --tensor-parallel-size 1"
BUDGET_ON_RANKS = _ranks(
    one="a budget over heads",
    subject="{text!r}: ",
    reason="the budget gives the heads of a layer different numbers of tokens, and {ranks} ranks "
    "with different heads share one schedule",
    instead="leave out budget, use one that divides over layers, such as pyramid, " + _ONE_RANK,
)
PIECES_ON_RANKS = _ranks(
    one="`granularity=page` or `chunk` of a rule with one set per head",
    subject="{text!r}: ",
    reason="with granularity={granularity} the heads of a layer retain different numbers of "
    "tokens, and {ranks} ranks with different heads share one schedule",
    instead="use granularity=token, a rule with one set per layer, such as sinks, or "
    "--tensor-parallel-size 1",
)
THRESHOLD_ON_RANKS = _ranks(
    one="`threshold` around a rule with one set per head",
    subject="{text!r}: ",
    reason="the heads of a layer retain different numbers of tokens, and {ranks} ranks with "
    "different heads share one schedule",
    instead="use a base with one set per layer, such as tova, " + _ONE_RANK,
)
PROMOTED_ON_RANKS = _ranks(
    one="`promoted`",
    subject="{text!r}: ",
    reason="mixed precision promotes tokens by the heads of one rank, and the model has {ranks} "
    "ranks",
    instead="use a codec without promoted tokens, such as int8, or --tensor-parallel-size 1",
)
LATENTS_ON_RANKS = _ranks(
    one="a rule with attention statistics of a model with latent attention (MLA)",
    subject="{text!r}: ",
    reason="each of the {ranks} ranks stores the latents of all heads, and has statistics of its "
    "own query heads",
    instead="use a rule without attention statistics, such as sinks or keydiff, " + _ONE_RANK,
)
TIER_ON_RANKS = _ranks(
    one="a tier for cached prefixes",
    reason="a tier for cached prefixes loads pages at times that differ between ranks",
    instead="leave out --cpu-kv-memory, --disk-kv-memory and --remote-kv; " + _ONE_RANK,
    delimiter=": ",
)
OFFLOAD_ON_RANKS = _ranks(
    one="KV offload",
    reason="KV offload splits sequences by times that differ between ranks",
    instead="leave out --kv-offload-memory, and use --swap-space for preempted requests; "
    + _ONE_RANK,
    delimiter=": ",
)
INVARIANT_ON_RANKS = _ranks(
    one="`--batch-invariant`",
    reason="a sum over ranks depends on the rows of a batch",
    instead="leave out --batch-invariant; " + _ONE_RANK,
    delimiter=": ",
)
SHARED_POOL_ON_RANKS = _ranks(
    one="a KV memory that several engines share",
    reason="a shared pool belongs to one process, and this model has {ranks} ranks",
    instead="give the engine a KV memory of its own",
)
NATIVE_ON_RANKS = _ranks(
    one="`--model-impl native`",
    reason="model_impl=native runs all layers in one call and cannot sum over {ranks} ranks "
    "between them",
    instead="use model_impl=auto with --tensor-parallel-size",
)
WEIGHTS_ON_RANKS = _ranks(
    one="offloaded weights",
    reason="weights_memory offloads whole layers of a model with one rank",
    instead="leave out --weights-memory, " + _ONE_RANK,
)

# ---- KV offload ----------------------------------------------------------------------------------

_offload = partial(
    Limit,
    area="offload",
    one="`--kv-offload-memory` with a default rule that evicts",
    subject="--kv-offload-memory would not be used: ",
)
OFFLOAD_OF_PROMOTED = _offload(
    other="`promoted`",
    reason="offloaded layers are in the KV memory one after another, and the tokens that mixed "
    "precision promotes are written for all layers together",
    instead="use a codec without promoted tokens, such as int8, or leave out --kv-offload-memory",
)
_recompute = partial(Limit, area="offload", one="recompute of offloaded KV")
_cpu_attention = partial(Limit, area="offload", one="CPU attention")
RECOMPUTE_OF_HEADS = _recompute(
    other="an eviction rule with one set per head",
    reason="each KV head retains tokens of its own",
    instead="use eviction rules that retain the same tokens for all heads of a layer, such as tova "
    "or recent",
)
RECOMPUTE_OF_PAGES = _recompute(
    other="a codec of whole pages",
    reason="slots of this codec are not written one by one",
    instead="use a codec such as int8 or none",
)
RECOMPUTE_BY_MODEL = _recompute(
    other="a model whose layers cannot be recomputed",
    reason="{why}",
    instead="use another model",
)
CPU_ATTENTION_OF_PARTS = _cpu_attention(
    other="`streaming`, or a codec with full-precision tokens",
    reason="partial attention needs keys stored after RoPE, and a codec without full-precision "
    "tokens",
    instead="use a codec without +sinks and +residual and a rule other than streaming",
)
CPU_ATTENTION_WITH_INDEX = _cpu_attention(
    other="a model with an index of sparse attention (DSA)",
    reason="an index selects tokens by the scores of the whole sequence before attention begins",
    instead="use --kv-offload-recompute",
)
CPU_ATTENTION_WITH_WEIGHTS = _cpu_attention(
    other="a rule with statistics of the attention to every token",
    reason="the eviction rule needs statistics of the attention to every token",
    instead="use a rule without them, such as tova, keydiff or sinks",
)
CPU_ATTENTION_WITH_SPARSE = _cpu_attention(
    other="`--sparse`",
    reason="decode steps with --sparse fetch the few pages that they read",
    instead="leave out --sparse",
)

# ---- scheduling ----------------------------------------------------------------------------------

_engine = partial(Limit, area="scheduling", delimiter=": ")
DENSE_BATCHER = _engine(
    one="`--batcher baton`",
    other="KV in pages",
    reason="batcher 'baton' needs the dense rows of quire.hf.DynamicBatch, and an engine stores KV "
    "in pages",
    instead="use baton_pd here, or use quire.hf.DynamicBatch",
)
NO_SWAP_SPACE = _engine(
    one="a batcher that swaps out prefilled requests",
    other="no `--swap-space`",
    reason="--batcher {batcher} swaps out prefilled requests and needs swap space",
    instead="set --swap-space SIZE, or use hold=device",
)
UNUSED_SWAP_SPACE = _engine(
    one="`--swap-space`",
    other="`--preempt recompute`",
    reason="--swap-space {num_bytes:,} B would not be used, because --preempt recompute swaps no "
    "requests",
    instead="use --preempt auto, swap or hybrid, or leave out --swap-space",
)
NOTHING_SHARED = _engine(
    one="`--objective throughput`",
    other="all weights on the device",
    reason="--objective throughput lets batches of a step share prefetched layers, and all weights "
    "are on the device",
    instead="set --weights-memory below the size of the weights, or raise "
    "--max-num-batched-tokens for larger steps",
)
EXPORT_WITHOUT_CACHE = _engine(
    one="export of KV",
    other="`--no-enable-prefix-caching`",
    reason="KV is exported from and to the prefix cache, and the prefix cache is off",
    instead="leave out --no-enable-prefix-caching",
)

# ---- batch invariance ----------------------------------------------------------------------------

_invariant = partial(
    Limit,
    area="batch invariance",
    one="`--batch-invariant`",
    subject="--batch-invariant: ",
)
_OR_NOT = ", or leave out --batch-invariant"
INVARIANT_DEVICE = _invariant(
    other="a device other than the CPU",
    reason="kernels on {device} choose the order of their sums by shape",
    instead="use --device cpu" + _OR_NOT,
)
INVARIANT_MIXTURE = _invariant(
    other="a mixture of experts",
    reason="in a mixture of experts the rows of an expert's products depend on the batch",
    instead="leave out --batch-invariant",
)
INVARIANT_OFFLOAD = _invariant(
    other="KV offload",
    reason="attention over offloaded KV is computed in several segments",
    instead="use no --kv-offload-memory" + _OR_NOT,
)
INVARIANT_WINDOW = _invariant(
    other="a codec with full-precision tokens",
    reason="the KV codec {codec} keeps a full-precision window of recent tokens",
    instead="use --kv-codec none" + _OR_NOT,
)
INVARIANT_BACKEND = _invariant(
    other="`--attention` other than `native`",
    reason="--attention {attention} pads rows to the longest row of the batch",
    instead="use --attention native" + _OR_NOT,
)
INVARIANT_MODEL = _invariant(
    other="a model without forward passes of a fixed number of rows, or no native attention",
    reason="{why}",
    instead="leave out --batch-invariant",
)
INVARIANT_PRESSURE = _invariant(
    other="`when=pressure`",
    reason="with when=pressure the time of an eviction depends on other requests",
    instead="use another when=" + _OR_NOT,
)

# ---- sparse attention ----------------------------------------------------------------------------

_sparse = partial(Limit, area="sparse attention", one="`--sparse`", subject="--sparse: ")
_OR_DENSE = ", or leave out --sparse"
SPARSE_DEVICE = _sparse(
    other="a device other than a CPU and a CUDA GPU",
    reason="pages are selected by C code on a CPU, and for Triton kernels on a CUDA GPU",
    instead="use --device cpu or cuda" + _OR_DENSE,
)
SPARSE_OFFLOAD = _sparse(
    other="`--kv-offload-memory` of an engine in a shared pool",
    reason="the bounds of offloaded pages have KV memory of their own, which a shared pool has not",
    instead="leave out --kv-offload-memory" + _OR_DENSE,
)
SPARSE_OFFLOAD_DEVICE = _sparse(
    other="`--kv-offload-memory` on a GPU",
    reason="single pages are fetched by copies that wait for the CPU",
    instead="use --device cpu, or leave out --kv-offload-memory" + _OR_DENSE,
)
SPARSE_CALIBRATED = _sparse(
    other="calibrated codecs of keys (`int8_channel`, `kvquant4`, `kvquant3`, `equalise=1`)",
    reason="bounds are computed without the measured constants of the KV codec {codec}",
    instead="use int8 or int4 for keys; values may have a calibrated codec",
)
SPARSE_PRE_ROPE = _sparse(
    other="`streaming`",
    reason="bounds are those of keys after RoPE, and streaming stores keys before it",
    instead="use 'sinks', which retains the same tokens at their original positions",
)
SPARSE_ALLOWED = _sparse(
    other="`--evict-allow all`",
    reason="a request could choose 'streaming', which stores keys before RoPE",
    instead="list the rules that requests may choose in --evict-allow, without 'streaming'",
)
SPARSE_LATENT = _sparse(
    other="a model with latent attention (MLA), or whose keys are values times a weight (Gemma 4)",
    reason="pages hold latents, or parts of keys, whose bounds are not those of keys",
    instead="leave out --sparse",
)
SPARSE_ALIBI = _sparse(
    other="a model with ALiBi",
    reason="the biases of positions are not part of the bounds of keys",
    instead="leave out --sparse",
)
SPARSE_WINDOWS = _sparse(
    other="a model without layers of full attention",
    reason="every layer of the model has a sliding window, chunks or a state, and reads few pages "
    "already",
    instead="leave out --sparse",
)
SPARSE_DENSE_LAYERS = _sparse(
    other="`dense_layers` that include all layers of full attention",
    reason="the first {dense_layers} layers of the model read all pages, and no later layer has "
    "full attention",
    instead="lower dense_layers" + _OR_DENSE,
)

# ---- speculative decoding ------------------------------------------------------------------------

_speculative = partial(
    Limit, area="speculative decoding", one="`--speculative`", subject="--speculative: "
)
_OR_STEPWISE = ", or leave out --speculative"
SPECULATIVE_OFFLOAD = _speculative(
    other="`--kv-offload-memory`",
    reason="activations of proposed tokens would be stored",
    instead="leave out --kv-offload-memory" + _OR_STEPWISE,
)
SPECULATIVE_SPARSE = _speculative(
    other="`--sparse`",
    reason="each token selects pages of its own, so that one step verifies one token",
    instead="leave out --sparse" + _OR_STEPWISE,
)
SPECULATIVE_DRAFT_RANKS = _speculative(
    other="a draft model and `--tensor-parallel-size` above 1",
    reason="ranks would each load the whole draft model, and could propose other tokens",
    instead="use ngram or suffix",
)
SPECULATIVE_DRAFT_STATES = _speculative(
    other="a draft model with recurrent states",
    reason="the draft model reads each proposed token twice, and a state would count it twice",
    instead="use a draft model with attention only, or ngram or suffix",
)

LIMITS = tuple(value for value in tuple(vars().values()) if isinstance(value, Limit))
"""All limits, in the order above."""

# ---- model types ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The reason why a model type is unsupported, and the alternative."""

    reason: str
    instead: str


WITH_TRANSFORMERS = "run it with Transformers itself"
IGNORED_OPTIONS = Refusal(
    reason="Transformers ignores the options alibi=false, alibi_bias_max, prefix_lm and qk_ln of "
    "its attn_config, so that it computes another model",
    instead="use an MPT model with plain ALiBi, such as mpt-7b or mpt-30b",
)
COMPRESSED = Refusal(
    reason="its layers compress the keys and values of several tokens into one",
    instead="use DeepSeek V3, or a model with grouped-query attention, such as Llama or Qwen",
)
_OTHER_STATES = "use a model with Mamba or gated delta layers, such as Granite 4 or Qwen3-Next"
RECURRENT = Refusal(
    reason="its recurrent layers are of a kind that Quire does not know",
    instead=_OTHER_STATES,
)
MODULE_STATES = Refusal(
    reason="its recurrent blocks keep their states in attributes of their modules (conv1d_state, "
    "and rg_lru.recurrent_states), those of one batch, and a call of several tokens begins its "
    "convolution without them",
    instead=_OTHER_STATES,
)
LISTED_STATES = Refusal(
    reason="its states are five tensors of all layers [rows, elements, layers] (two last inputs, "
    "numerators, denominators and maxima), an argument of the model (state), not a cache",
    instead=_OTHER_STATES,
)
CELL_STATES = Refusal(
    reason="its states are three tensors of each layer (matrix memory, normalizer and maximum) in "
    "a cache class of its own (xLSTMCache.rnn_state), which blocks receive as an argument (state)",
    instead=_OTHER_STATES,
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
    reason="some layers use chunked attention, which Quire knows from Llama 4 only",
    instead="use a model with full or sliding-window attention",
)
SHARED_KV = Refusal(
    reason="some layers attend to the keys and values of other layers, which Quire knows from "
    "Gemma 3n and Gemma 4 only",
    instead="use a model whose layers have keys and values of their own",
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
PREFIX_LM = Refusal(
    reason="the tokens of a prompt attend to later tokens of the prompt (prefix_lm)",
    instead="use a causal language model, such as Llama or Qwen",
)
REPEATED = Refusal(
    reason="its layers compute attention several times per token, and a slot holds one key",
    instead="use a model with one attention per layer, such as Llama or Qwen",
)
PATCHES = Refusal(
    reason="it groups bytes into patches, and attention has one slot per token",
    instead=WITH_TRANSFORMERS,
)
DRAFT = Refusal(
    reason="it drafts tokens for another model and attends to that model's keys and values",
    instead="use the model that it drafts for",
)
SPARSE = Refusal(
    reason="its indexer selects blocks of keys, or keys of each KV head, and Quire knows indexers "
    "of latent attention only, which select tokens for all heads",
    instead="use DeepSeek V3.2, or a model with full or sliding-window attention",
)
LENGTH_DEPENDENT_ROPE = Refusal(
    reason="its RoPE scale depends on the longest sequence of the batch (short_mscale and "
    "long_mscale differ)",
    instead="use Phi-3 or Mixtral models",
)

_BY_NAME: tuple[tuple[Refusal, str], ...] = (
    (COMPRESSED, "deepseek_v4"),
    (MODULE_STATES, "recurrent_gemma"),
    (LISTED_STATES, "rwkv"),
    (CELL_STATES, "xlstm"),
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
    (
        OWN_MASK,
        "doge inkling inkling2 inkling2_loop inkling2_loop_text inkling2_text inkling_text",
    ),
    (PREFIX_LM, "hrm_text"),
    (REPEATED, "dory"),
    (PATCHES, "blt"),
    (DRAFT, "gemma4_assistant gemma4_unified_assistant"),
    (SPARSE, "minimax_m3_vl_text qwen4_exp qwen4_exp_text"),
    (
        MULTIMODAL,
        "dots3_note emu3 fuyu git got_ocr2 imagegpt mllama moshi moss_transcribe_diarize musicgen "
        "musicgen_melody phi4_multimodal trocr",
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
        raise unsupported(model_type, REFUSED[model_type])


def unsupported(name: str, refusal: Refusal) -> UnsupportedModel:
    """Return the error for an unsupported model, family or class."""
    return UnsupportedModel(f"{name} is not supported: {refusal.reason}; {refusal.instead}")
