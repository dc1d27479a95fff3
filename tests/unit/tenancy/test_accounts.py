import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from quire.errors import ConfigError, InvariantError, NeverFits, RequestError
from quire.tenancy.accounts import Right, TenantAccounts, checked_tenant
from quire.tenancy.tenants import PUBLIC, TenantSpec, parse_tenants

POOL = 1000


def book_of(text, **held):
    book = TenantAccounts(parse_tenants(text), POOL)
    book.note(held)
    return book


def test_guarantees_over_the_pool_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"1,100 B \(a 600 B, b 500 B\).*1,000 B; lower"):
        book_of("a:guaranteed=600B;b:guaranteed=500B")


def test_a_name_twice_is_refused():
    with pytest.raises(ConfigError, match="is given twice"):
        TenantAccounts([TenantSpec(name="a"), TenantSpec(name="a")], POOL)


def test_an_unknown_tenant_is_told_who_is_known():
    with pytest.raises(RequestError, match=r"unknown tenant 'c': expected one of a, b"):
        checked_tenant(book_of("b;a"), "c")


@pytest.mark.parametrize("name", ["", "a\x00b", PUBLIC, "ü", "a" * 65])
def test_without_tenants_every_name_that_can_be_one_is_taken(name):
    book = TenantAccounts((), POOL)

    assert checked_tenant(book, "anybody") == "anybody"
    with pytest.raises(RequestError):
        checked_tenant(book, name)


def test_names_that_clients_invent_are_not_kept():
    book = TenantAccounts((), POOL)
    for number in range(5_000):
        checked_tenant(book, f"user-{number}")

    assert not book.specs
    assert book.tenants == []
    assert sum(len(vars(book)[name]) for name in ("specs", "_specs", "_held")) == 0


def test_a_request_over_its_tenants_limit_never_fits():
    book = book_of("a:guaranteed=100B,burst=50B;b")

    book.refuse_if_never("a", 150)
    book.refuse_if_never("b", POOL)
    with pytest.raises(NeverFits, match=r"151 B of KV, tenant 'a' may hold 150 B"):
        book.refuse_if_never("a", 151)


def test_rights_go_down_as_a_tenant_holds_more():
    book = book_of("a:guaranteed=200B,burst=500B;b:guaranteed=200B", a=100, b=100)

    rights = [book.may_take("a", n).right for n in (100, 101, 400, 401, 600, 601)]

    assert rights == [  # the shared part of 600 halves: a's share is 500, its limit 700
        *(Right.GUARANTEED, Right.SHARE, Right.SHARE),
        *(Right.ABOVE_SHARE, Right.ABOVE_SHARE, Right.REFUSED),
    ]
    assert not book.may_take("a", 601)
    assert "701 B, over its limit of 700 B" in book.may_take("a", 601).reason


def test_who_is_not_there_leaves_its_part_of_the_shared_part():
    book = book_of("a;b:weight=3", a=10)
    assert book.share_bytes("a") == POOL

    book.note({"a": 10}, waiting=["b"])

    assert (book.share_bytes("a"), book.share_bytes("b")) == (250, 750)


def test_shared_prefixes_are_nobodys_and_make_the_shared_part_smaller():
    book = book_of("a;b", a=100, b=100, public=200)

    assert book.share_bytes("a") == 400
    assert book.tenants == ["a", "b"]
    assert book.reclaimable_for("a", 50) == []


def test_who_borrows_most_gives_first():
    book = book_of("a:guaranteed=300B;b:guaranteed=100B;c;d:weight=4", b=350, c=300, d=350)

    assert [book.over_quota_bytes(t) for t in "abcd"] == [0, 250, 300, 350]
    assert book.reclaimable_for("a", 300) == [("c", 300)]
    assert book.reclaimable_for("a", 200) == [("c", 200)]
    assert book.reclaimable_for("b", 10) == []  # it borrows itself

    book.note({"b": 350, "c": 100, "d": 550})
    assert book.reclaimable_for("a", 300) == [("b", 250), ("d", 50)]


def test_a_flood_gives_back_what_is_over_its_share():
    book = TenantAccounts((), POOL)
    book.note({"flood": 1000}, waiting=["flood", "small"])

    assert book.may_take("small", 500).right is Right.SHARE
    assert book.reclaimable_for("small", 120) == [("flood", 120)]
    assert book.reclaimable_for("small", 501) == []  # more than its share: it only borrows
    assert book.over_share_bytes("flood") == 500


def test_an_account_never_falls_below_nothing():
    book = book_of("a")
    book.add("a", 5)

    with pytest.raises(InvariantError, match="frees 1 B more"):
        book.add("a", -6)
    assert book.held_bytes("a") == 5


weights = st.sampled_from([0.5, 1.0, 2.0, 7.0])


@st.composite
def accounts(draw):
    """Any guarantees and holdings that a pool has: names, their options, held bytes, who waits."""
    names = "abcd"[: draw(st.integers(1, 4))]
    left, options = POOL, []
    for name in names:
        guaranteed = draw(st.integers(0, left))
        left -= guaranteed
        options.append((name, draw(weights), guaranteed, draw(st.none() | st.integers(0, POOL))))
    left, held = POOL, {}
    for name in draw(st.permutations([*names, PUBLIC])):
        held[name] = draw(st.integers(0, left))
        left -= held[name]
    return options, held, draw(st.sets(st.sampled_from(names)))


def book_with(options, held, waiting):
    specs = [
        TenantSpec(name=name, weight=weight, guaranteed_bytes=guaranteed, burst_bytes=burst)
        for name, weight, guaranteed, burst in options
    ]
    book = TenantAccounts(specs, POOL)
    book.note(held, waiting)
    return book


@given(accounts(), st.integers(1, POOL))
def test_what_is_a_tenants_own_can_always_be_found(account, requested):
    """Free bytes, idle shared prefixes and what others must give back cover guarantee and share."""
    book, tenant = book_with(*account), "a"
    assume(book.may_take(tenant, requested).right >= Right.SHARE)
    free = POOL - sum(book.held_bytes(t) for t in [*book.tenants, PUBLIC])
    found = free + book.held_bytes(PUBLIC)

    taken = book.reclaimable_for(tenant, requested)

    assert (
        found + sum(size for _, size in taken) >= requested
        or sum(size for _, size in taken) == requested
    )
    assert len({t for t, _ in taken}) == len(taken)
    for other, size in taken:
        assert other != tenant
        kept = book.held_bytes(other) - size
        assert size > 0
        assert kept >= book.spec(other).guaranteed_bytes  # nobody loses what it is guaranteed
        if book.may_take(tenant, requested).right is Right.SHARE:
            assert kept >= book.share_bytes(other)


@given(accounts())
def test_shares_never_add_up_to_more_than_the_pool(account):
    book = book_with(*account)
    here = [t for t in book.tenants if book.held_bytes(t)]
    idle = [s.guaranteed_bytes for s in book.specs if s.name not in here]
    book.note({t: book.held_bytes(t) for t in [*here, PUBLIC]})

    total = sum(map(book.share_bytes, here)) + sum(idle)
    assert total <= POOL
