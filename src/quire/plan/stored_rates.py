"""Rates of copies, prompts and steps as they stand in the file that `quire profile` writes."""

from typing import Any

from quire.layout.eviction import parse_policy
from quire.layout.model import ModelSpec
from quire.plan.rates import CopyRate, CopyRates, PrefillRates
from quire.plan.step_rates import DecodeRates, StepRates

_NUMBERS = ("cap", "every", "when")


def model_key(model: ModelSpec, *, dtype: str, device: str) -> str:
    """What the prefill rates of a model are stored under: its shape, whatever folder it is in.

    Args:
        model: the shape.
        dtype: of its weights, as `bfloat16`.
        device: `cpu`, or the name of the accelerator.
    """
    return (
        f"{model.architecture}, {model.num_layers} layers of {model.hidden_size}, "
        f"{model.num_parameters} parameters, {dtype}, {device}"
    )


def steps_key(key: str, evict: str) -> str:
    """What the step rates of a model under an eviction rule are stored under.

    How much stays and when is not in it: that is what rates are used to find out about.

    Args:
        key: of `model_key`.
        evict: the rule, as `--evict` takes it.

    Raises:
        ConfigError: it is none.
    """
    parsed = parse_policy(evict)
    kept = sorted(item for item in parsed.options.items() if item[0] not in _NUMBERS)
    options = ",".join(f"{name}={value}" for name, value in kept)
    return f"{key}; {parsed.name}:{options}" if options else f"{key}; {parsed.name}"


def copies_from(stored: object) -> dict[str, CopyRates]:
    """Copy rates by device from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
    return {
        device: CopyRates(
            out=CopyRate(**_table(rates["out"])), back=CopyRate(**_table(rates["back"]))
        )
        for device, rates in ((name, _table(value)) for name, value in _table(stored).items())
    }


def prefill_from(stored: object) -> dict[str, PrefillRates]:
    """Prefill rates by `model_key` from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
    return {key: PrefillRates(**_table(rates)) for key, rates in _table(stored).items()}


def steps_from(stored: object) -> dict[str, StepRates]:
    """Step rates by `steps_key` from their JSON object.

    Raises:
        ValueError: a rate that is none.
        KeyError, TypeError: a field is missing, or is not what it should be.
    """
    return {
        key: StepRates(
            whole=PrefillRates(**_table(rates["whole"])),
            blocks=PrefillRates(**_table(rates["blocks"])),
            decode=_decode_rates(_table(rates["decode"])),
        )
        for key, rates in ((name, _table(value)) for name, value in _table(stored).items())
    }


def _decode_rates(stored: dict[str, Any]) -> DecodeRates:
    batches = tuple((int(rows), float(seconds)) for rows, seconds in stored.pop("batch_s"))
    return DecodeRates(batch_s=batches, **stored)


def _table(value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"expected a table of rates, got {value!r}")
    return value
