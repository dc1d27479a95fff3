"""Parts of the cluster benchmark by name, in run order."""

from collections.abc import Callable, Mapping

from benchmarks.cluster.config import ClusterBenchConfig
from benchmarks.cluster.pool_part import run_large_pool, run_pool
from benchmarks.cluster.reports_part import run_reports
from benchmarks.cluster.scale_part import run_scale
from benchmarks.cluster.tenants_part import run_tenants
from benchmarks.common.result import PartResult

PARTS: Mapping[str, Callable[[ClusterBenchConfig], PartResult]] = {
    "pool": run_pool,
    "large_pool": run_large_pool,
    "scale": run_scale,
    "reports": run_reports,
    "tenants": run_tenants,
}
