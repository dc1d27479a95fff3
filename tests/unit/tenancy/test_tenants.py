"""Parsing of tenants and their options."""

import pytest

from quire.errors import ConfigError, UnknownName
from quire.tenancy.tenants import TenantSpec, parse_tenants

MIB = 2**20


def test_parse_tenants_with_options():
    specs = parse_tenants(" a:weight=2, guaranteed=64MiB,burst=32MiB; team-b.x ;c:burst=0;")

    assert specs == (
        TenantSpec(name="a", weight=2.0, guaranteed_bytes=64 * MIB, burst_bytes=32 * MIB),
        TenantSpec(name="team-b.x"),
        TenantSpec(name="c", burst_bytes=0),
    )
    assert [spec.limit_bytes for spec in specs] == [96 * MIB, None, 0]


def test_empty_text_has_no_tenants():
    assert parse_tenants("  ") == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a:weight=0", "a weight above 0"),
        ("a:weight=-1", "a weight above 0"),
        ("a:weight=nan", "a weight above 0"),
        ("a:weight=inf", "a weight above 0"),
        ("a:weight=much", "a weight such as 2"),
        ("a:guaranteed=lots", "not a size"),
        ("a:burst=-1", "not a size"),
        ("a:weight", "option=value"),
        ("a:weight=", "option=value"),
        ("a:weight=1,weight=2", "option 'weight' is repeated"),
        ("a;b;a:weight=2", "tenant 'a' is repeated"),
        (":weight=1", "expected a tenant name"),
        ("a b", "expected a tenant name"),
        ("a\nb", "expected a tenant name"),
        ("x" * 65, "expected a tenant name"),
        ("public", "tenant name 'public' is reserved"),
    ],
)
def test_invalid_tenants_text_is_rejected(text, message):
    with pytest.raises(ConfigError, match=message):
        parse_tenants(text)


def test_misspelled_tenant_option_error_suggests_the_nearest():
    with pytest.raises(UnknownName, match="did you mean guaranteed"):
        parse_tenants("a:garanteed=1MiB")


def test_negative_burst_is_rejected():
    with pytest.raises(ConfigError, match="burst >= 0"):
        TenantSpec(name="a", burst_bytes=-5)
