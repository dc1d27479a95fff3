"""Tenants: their options; rights to memory, shares, limits and reclaimable bytes."""

import pickle

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError, NeverFits, RequestError, UnknownName
from quire.tenancy.accounts import Right, TenantAccounts, checked_tenant
from quire.tenancy.tenants import PUBLIC, TenantSpec, parse_tenants

POOL = 1000


def accounts_of(text, **held):
    accounts = TenantAccounts(parse_tenants(text), POOL)
    accounts.note(held)
    return accounts


def test_guarantees_above_the_pool_size_and_duplicate_tenants_are_rejected():
    with pytest.raises(ConfigError, match=r"1,100 B \(a 600 B, b 500 B\).*1,000 B; lower"):
        accounts_of("a:guaranteed=600B;b:guaranteed=500B")
    with pytest.raises(ConfigError, match="is repeated"):
        TenantAccounts([TenantSpec(name="a"), TenantSpec(name="a")], POOL)


@pytest.mark.parametrize("name", ["", "a\x00b", PUBLIC, "ü", "a" * 65])
def test_any_valid_tenant_name_is_accepted_without_configured_tenants(name):
    accounts = TenantAccounts((), POOL)
    assert checked_tenant(accounts, "anybody") == "anybody"
    with pytest.raises(RequestError):
        checked_tenant(accounts, name)
    with pytest.raises(RequestError, match=r"unknown tenant 'c': expected one of a, b"):
        checked_tenant(accounts_of("b;a"), "c")


def test_unconfigured_tenant_names_are_not_stored():
    accounts = TenantAccounts((), POOL)
    empty_bytes = len(pickle.dumps(accounts))
    for number in range(5_000):
        checked_tenant(accounts, f"user-{number}")

    assert not accounts.specs
    assert accounts.tenants == []
    assert len(pickle.dumps(accounts)) == empty_bytes


def test_request_above_the_limit_of_its_tenant_never_fits():
    accounts = accounts_of("a:guaranteed=100B,burst=50B;b")
    accounts.refuse_if_never("a", 150)
    accounts.refuse_if_never("b", POOL)
    with pytest.raises(NeverFits, match=r"151 B of KV, tenant 'a' may hold 150 B"):
        accounts.refuse_if_never("a", 151)


def test_right_to_memory_decreases_with_held_bytes():
    accounts = accounts_of("a:guaranteed=200B,burst=500B;b:guaranteed=200B", a=100, b=100)

    rights = [accounts.may_take("a", n).right for n in (100, 101, 400, 401, 600, 601)]
    assert rights == [  # half of the shared 600: a's share is 500, its limit 700
        *(Right.GUARANTEED, Right.SHARE, Right.SHARE),
        *(Right.ABOVE_SHARE, Right.ABOVE_SHARE, Right.REFUSED),
    ]
    assert not accounts.may_take("a", 601)
    assert "701 B, over its limit of 700 B" in accounts.may_take("a", 601).reason


def test_share_of_an_absent_tenant_is_divided_among_the_others():
    accounts = accounts_of("a;b:weight=3", a=10)
    assert accounts.share_bytes("a") == POOL
    accounts.note({"a": 10}, waiting=["b"])
    assert (accounts.share_bytes("a"), accounts.share_bytes("b")) == (250, 750)


def test_public_prefixes_reduce_the_shared_memory():
    accounts = accounts_of("a;b", a=100, b=100, public=200)
    assert accounts.share_bytes("a") == 400
    assert accounts.tenants == ["a", "b"]
    assert accounts.reclaimable_for("a", 50) == []


def test_tenant_furthest_over_quota_is_reclaimed_first():
    accounts = accounts_of("a:guaranteed=300B;b:guaranteed=100B;c;d:weight=4", b=350, c=300, d=350)

    assert [accounts.over_quota_bytes(t) for t in "abcd"] == [0, 250, 300, 350]
    assert accounts.reclaimable_for("a", 300) == [("c", 300)]
    assert accounts.reclaimable_for("a", 200) == [("c", 200)]
    assert accounts.reclaimable_for("b", 10) == []  # it is over its quota itself

    accounts.note({"b": 350, "c": 100, "d": 550})
    assert accounts.reclaimable_for("a", 300) == [("b", 250), ("d", 50)]


def test_bytes_above_the_share_of_a_flooding_tenant_are_reclaimable():
    accounts = TenantAccounts((), POOL)
    accounts.note({"flood": 1000}, waiting=["flood", "small"])
    assert accounts.may_take("small", 500).right is Right.SHARE
    assert accounts.reclaimable_for("small", 120) == [("flood", 120)]
    assert accounts.reclaimable_for("small", 501) == []  # more than its own share
    assert accounts.over_share_bytes("flood") == 500


def test_tenant_without_requests_counts_as_active_when_it_reclaims():
    accounts = accounts_of("a;b", b=501)
    assert accounts.over_share_bytes("b") == 0  # alone
    assert accounts.reclaimable_for("a", 500) == [("b", 1)]


def test_account_below_zero_raises():
    accounts = accounts_of("a")
    accounts.add("a", 5)
    with pytest.raises(InvariantError, match="frees 1 B more"):
        accounts.add("a", -6)
    assert accounts.held_bytes("a") == 5


weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@st.composite
def holdings(draw):
    """Accounts, held bytes, and the names of waiting tenants, for a valid pool."""
    names = "abcd"[: draw(st.integers(1, 4))]
    left, specs = POOL, []
    for name in names:
        guaranteed, weight = draw(st.integers(0, left)), draw(weights)
        left -= guaranteed
        burst = draw(st.none() | st.integers(0, POOL))
        sizes = {"guaranteed_bytes": guaranteed, "burst_bytes": burst}
        specs.append(TenantSpec(name=name, weight=weight, **sizes))
    left, held = POOL, {}
    for name in draw(st.permutations([*names, PUBLIC])):
        held[name] = draw(st.integers(0, left))
        left -= held[name]
    return specs, held, draw(st.sets(st.sampled_from(names)))


def accounts_with(specs, held, waiting):
    accounts = TenantAccounts(specs, POOL)
    accounts.note(held, waiting)
    return accounts


@given(holdings(), st.integers(1, POOL))
@example(([TenantSpec(name=name, weight=0.5) for name in "ab"], {"b": 501}, set()), 500)
def test_guarantee_and_share_can_always_be_reclaimed(account, requested):
    """Free bytes, idle public prefixes and reclaimable bytes cover guarantee and share."""
    accounts, tenant = accounts_with(*account), "a"
    assume(accounts.may_take(tenant, requested).right >= Right.SHARE)
    free = POOL - sum(accounts.held_bytes(t) for t in [*accounts.tenants, PUBLIC])
    found = free + accounts.held_bytes(PUBLIC)

    reclaimed = accounts.reclaimable_for(tenant, requested)

    total = sum(size for _, size in reclaimed)
    assert found + total >= requested or total == requested
    assert len({t for t, _ in reclaimed}) == len(reclaimed)
    _, held, waiting = account
    accounts.note(held, waiting | {tenant})  # shares while it is active
    for other, size in reclaimed:
        assert other != tenant
        remaining = accounts.held_bytes(other) - size
        assert size > 0
        assert remaining >= accounts.spec(other).guaranteed_bytes  # guarantees are not reclaimed
        if accounts.may_take(tenant, requested).right is Right.SHARE:
            assert remaining >= accounts.share_bytes(other)


@given(holdings())
def test_shares_and_idle_guarantees_fit_in_the_pool(account):
    accounts = accounts_with(*account)
    present = [t for t in accounts.tenants if accounts.held_bytes(t)]
    idle = [s.guaranteed_bytes for s in accounts.specs if s.name not in present]
    accounts.note({t: accounts.held_bytes(t) for t in [*present, PUBLIC]})
    assert sum(map(accounts.share_bytes, present)) + sum(idle) <= POOL


# ---- options of tenants --------------------------------------------------------------------------


def test_parse_tenants_with_options():
    specs = parse_tenants(" a:weight=2, guaranteed=64MiB,burst=32MiB; team-b.x ;c:burst=0;")
    sizes = {"guaranteed_bytes": 64 * 2**20, "burst_bytes": 32 * 2**20}
    first = TenantSpec(name="a", weight=2.0, **sizes)
    assert specs == (first, TenantSpec(name="team-b.x"), TenantSpec(name="c", burst_bytes=0))
    assert [spec.limit_bytes for spec in specs] == [96 * 2**20, None, 0]
    assert parse_tenants("  ") == ()


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("a:weight=0|a:weight=-1|a:weight=nan|a:weight=inf", "a weight above 0"),
        ("a:weight=much", "a weight such as 2"),
        ("a:guaranteed=lots|a:burst=-1", "not a size"),
        ("a:weight|a:weight=", "option=value"),
        ("a:weight=1,weight=2", "option 'weight' is repeated"),
        ("a;b;a:weight=2", "tenant 'a' is repeated"),
        (f":weight=1|a b|a\nb|{'x' * 65}", "expected a tenant name"),
        ("public", "tenant name 'public' is reserved"),
        ("a:garanteed=1MiB", "did you mean guaranteed"),
    ],
)
def test_invalid_tenants_text_is_rejected(texts, message):
    for text in texts.split("|"):
        with pytest.raises((ConfigError, UnknownName), match=message):
            parse_tenants(text)


def test_negative_burst_is_rejected():
    with pytest.raises(ConfigError, match="burst >= 0"):
        TenantSpec(name="a", burst_bytes=-5)
