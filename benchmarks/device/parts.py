"""Parts of `python -m benchmarks device` by name."""

from collections.abc import Callable, Mapping

from benchmarks.common.result import PartResult
from benchmarks.device.accuracy_part import run_accuracy
from benchmarks.device.bench import DeviceBench
from benchmarks.device.codes_part import run_codes
from benchmarks.device.host_part import run_host
from benchmarks.device.link_part import run_link
from benchmarks.device.products_part import run_products
from benchmarks.device.refit_part import run_refit
from benchmarks.device.step_part import run_step
from benchmarks.device.swap_part import run_swap
from benchmarks.device.sweep_part import run_sweep
from benchmarks.device.together_part import run_together

PARTS: Mapping[str, Callable[[DeviceBench], PartResult]] = {
    "link": run_link,
    "products": run_products,
    "together": run_together,
    "step": run_step,
    "sweep": run_sweep,
    "codes": run_codes,
    "swap": run_swap,
    "host": run_host,
    "refit": run_refit,
    "accuracy": run_accuracy,
}
