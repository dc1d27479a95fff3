"""The files of the dashboard: headers, paths without a key, and when they are served."""

import re
from importlib.resources import files

import pytest

from quire.serve.config import ServerConfig, is_loopback
from quire.serve.dashboard.routes import ASSETS_PATH, dashboard_paths
from support.kv_load import two_tenants

_FOLDER = files("quire.serve.dashboard") / "assets"
ASSETS = {file.name: file.read_text(encoding="utf-8") for file in _FOLDER.iterdir()}


def get(serve, path, headers=None, **options):
    return serve(lambda client: client.get(path, headers=headers), **options)


def test_page_and_all_files_have_security_headers(serve):
    async def main(client):
        return [await client.get(path) for path in sorted(dashboard_paths())]

    found = serve(main)

    assert len(found) >= 15
    for response in found:
        assert response.status_code in (200, 308), response.url
        policy = response.headers["content-security-policy"]
        assert "default-src 'self'" in policy
        assert "unsafe" not in policy
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == "no-cache"


def test_page_has_no_inline_script_or_style_and_no_other_host():
    for name, text in ASSETS.items():
        assert not re.search(r"<script(?![^>]*\bsrc=)", text), name
        assert "<style" not in text, name
        assert not re.search(r"\son[a-z]+=\"", text), name
        hosts = set(re.findall(r"https?://[\w.]+", text))
        assert hosts <= {"http://www.w3.org"}, name
        assert "innerHTML" not in text, name


def test_every_file_that_the_page_names_exists():
    names, page = set(ASSETS), ASSETS["index.html"]
    named = set(re.findall(r'dashboard/assets/([\w.]+)"', page))
    for name, text in ASSETS.items():
        if name.endswith(".js"):
            named |= set(re.findall(r'from "\./([\w.]+)"', text))
    assert named <= names
    assert names - named == {"index.html"}


def test_unchanged_file_is_not_sent_again(serve):
    async def main(client):
        first = await client.get(f"{ASSETS_PATH}/app.css")
        again = await client.get(
            f"{ASSETS_PATH}/app.css", headers={"if-none-match": first.headers["etag"]}
        )
        return first, again

    first, again = serve(main)

    assert first.headers["content-type"] == "text/css; charset=utf-8"
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["nothing.js", "..%2F__init__.py", "%2e%2e/routes.py"])
def test_other_files_are_not_served(serve, name):
    assert get(serve, f"{ASSETS_PATH}/{name}").status_code == 404


def test_files_need_no_key_and_data_does(serve):
    keys = two_tenants()

    assert get(serve, "/dashboard", tenant_keys=keys).status_code == 200
    assert get(serve, f"{ASSETS_PATH}/main.js", tenant_keys=keys).status_code == 200
    assert get(serve, f"{ASSETS_PATH}/nothing.js", tenant_keys=keys).status_code == 401
    assert get(serve, "/v1/kv/overview", tenant_keys=keys).status_code == 401
    wrong = {"authorization": "Bearer sk-wrong-000000"}
    assert get(serve, "/dashboard", headers=wrong, tenant_keys=keys).status_code == 200


@pytest.mark.parametrize(
    ("options", "with_keys", "expected"),
    [
        ({}, False, True),
        ({"host": "localhost"}, False, True),
        ({"host": "::1"}, False, True),
        ({"host": "0.0.0.0"}, False, False),
        ({"host": "0.0.0.0"}, True, True),
        ({"host": "0.0.0.0", "dashboard": True}, False, True),
        ({"dashboard": False}, True, False),
    ],
)
def test_dashboard_is_served_by_default_only_where_prompts_are_safe(options, with_keys, expected):
    assert ServerConfig(**options).has_dashboard(with_keys=with_keys) is expected


def test_server_without_dashboard_has_no_page(serve):
    assert get(serve, "/dashboard", dashboard=False).status_code == 404
    assert get(serve, "/dashboard", host="0.0.0.0").status_code == 404


@pytest.mark.parametrize("host", ["192.168.0.1", "example.org", "::", ""])
def test_other_hosts_are_not_loopback(host):
    assert not is_loopback(host)
