"""The parts of `quire bench device` by name."""

from collections.abc import Callable, Mapping

from quire.bench.device.accuracy_part import run_accuracy
from quire.bench.device.bench import DeviceBench
from quire.bench.device.codes_part import run_codes
from quire.bench.device.host_part import run_host
from quire.bench.device.link_part import run_link
from quire.bench.device.products_part import run_products
from quire.bench.device.refit_part import run_refit
from quire.bench.device.step_part import run_step
from quire.bench.device.swap_part import run_swap
from quire.bench.device.sweep_part import run_sweep
from quire.bench.device.together_part import run_together
from quire.bench.result import PartResult

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
