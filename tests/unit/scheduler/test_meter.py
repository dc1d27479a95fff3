"""Tenant meters: counters by tenant and their bounded number."""

from quire.scheduler.fairness import IDLE_KEPT, OTHERS, TenantMeter, TenantStats
from quire.tenancy.accounts import TenantAccounts
from quire.tenancy.tenants import parse_tenants


def test_meter_counts_each_tenant_separately():
    meter = TenantMeter()
    meter.submitted("a")
    meter.submitted("a")
    meter.admitted("a", 1.5)
    meter.cached("a", 16)
    meter.served("a", prompt_tokens=100)
    meter.served("a", output_tokens=3)
    meter.preempted("a")
    meter.admitted("a", 0.5)
    meter.submitted("b")

    assert meter.report() == (
        TenantStats(
            tenant="a",
            num_requests=2,
            num_admitted=2,
            prompt_tokens=100,
            cached_tokens=16,
            output_tokens=3,
            queue_s=2.0,
            num_preemptions=1,
        ),
        TenantStats(tenant="b", num_requests=1),
    )


def test_report_includes_bytes_of_the_accounts():
    accounts = TenantAccounts(parse_tenants("a:guaranteed=200B;b"), 1000)
    accounts.note({"b": 300, "public": 100}, waiting=["a"])
    meter = TenantMeter()
    meter.submitted("b")

    assert meter.report(accounts) == (
        TenantStats(tenant="a", guaranteed_bytes=200, share_bytes=550),
        TenantStats(tenant="b", num_requests=1, held_bytes=300, share_bytes=350),
    )


def test_min_recent_idle_tenants_are_folded_into_others():
    meter = TenantMeter()
    for number in range(IDLE_KEPT + 3):
        meter.submitted(f"t{number}")
        meter.admitted(f"t{number}", 0.5)
    meter.served("t0", output_tokens=3)  # the most recent one

    meter.fold(busy={"t1"})

    rows = {row.tenant: row for row in meter.report()}
    assert len(rows) == meter.num_tenants == IDLE_KEPT + 2
    assert rows.keys().isdisjoint({"t2", "t3"})
    assert {"t0", "t1", "t4"} < rows.keys()
    assert rows[OTHERS] == TenantStats(tenant=OTHERS, num_requests=2, num_admitted=2, queue_s=1.0)


def test_others_row_has_no_bytes():
    accounts, meter = TenantAccounts((), 1000), TenantMeter()
    for number in range(IDLE_KEPT + 1):
        meter.submitted(f"t{number}")
    meter.fold(busy=())

    assert meter.report(accounts)[-1] == TenantStats(tenant=OTHERS, num_requests=1)
