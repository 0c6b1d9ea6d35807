"""A callback URL means the same to producer, worker and clerk, or it is refused."""

from __future__ import annotations

import pytest

from tokenmill.protocol.callback import AllowList, CallbackError, CallbackUrl, parse_callback

LISTED = AllowList.of(
    ["Hooks.Example.org.", "ports.example.org:8443", "http://collector.internal:8080", "[2001:DB8::1]"]
)


@pytest.mark.parametrize(
    ("url", "taken_apart"),
    [
        ("https://hooks.example.org", CallbackUrl("https", "hooks.example.org", 443, "/")),
        ("HTTPS://HOOKS.Example.ORG/A?b=C#d", CallbackUrl("https", "hooks.example.org", 443, "/A?b=C")),
        ("https://hooks.example.org.:8443/x", CallbackUrl("https", "hooks.example.org", 8443, "/x")),
        ("https://hooks.example.org:/x", CallbackUrl("https", "hooks.example.org", 443, "/x")),
        ("http://hooks.example.org", CallbackUrl("http", "hooks.example.org", 80, "/")),
        ("https://[2001:DB8:0::1]:1/", CallbackUrl("https", "2001:db8::1", 1, "/")),
        ("https://xn--bcher-kva.example/", CallbackUrl("https", "xn--bcher-kva.example", 443, "/")),
        ("https://host/@x:y@z", CallbackUrl("https", "host", 443, "/@x:y@z")),
    ],
)
def test_a_callback_url_is_split_into_normalised_parts(url: str, taken_apart: CallbackUrl) -> None:
    assert parse_callback(url) == taken_apart


BAD = {
    "": "ASCII",
    "nonsense": "https",
    "ftp://hooks.example.org/": "https",
    "//hooks.example.org/": "https",
    "javascript:alert(1)": "https",
    "https:hooks.example.org": "no host",
    "https:///x": "no host",
    "https://:443/x": "malformed",
    "https://?x": "no host",
    "https://.": "malformed",
    "https://a..b/": "malformed",
    "https://.hooks.example.org/": "malformed",
    "https://hooks.example.org../": "malformed",
    f"https://{'a' * 64}.org/": "malformed",
    f"https://{'a.' * 127}org/": "malformed",
    "https://*.example.org/": "malformed",
    "https://hooks.example.org%2f.evil.org/": "malformed",
    "https://hooks.example.org@evil.org/": "user",
    "https://user:pass@hooks.example.org/": "user",
    "https://@hooks.example.org/": "user",
    "https://:@hooks.example.org/": "user",
    "https://evil.org\\@hooks.example.org/": "backslash",
    "https://hooks.example.org\\.evil.org/": "backslash",
    "https://hooks.example.org:0/": "port",
    "https://hooks.example.org:65536/": "port",
    "https://hooks.example.org:99999999/": "port",
    "https://hooks.example.org:-1/": "malformed",
    "https://hooks.example.org:+443/": "malformed",
    "https://hooks.example.org:4_4/": "malformed",
    "https://hooks.example.org:443:443/": "malformed",
    "https://[::1/": "not a URL",
    "https://[x": "not a URL",
    "https://x]/": "not a URL",
    "https://[]/": "address|malformed|not a URL",
    "https://[::g]/": "address|malformed|not a URL",
    "https://[v1.x]/": "address|malformed|not a URL",
    "https://[::1%25eth0]/": "address|malformed|not a URL",
    "https://[::1]evil.org/": "address|malformed|not a URL",
    "https://[1.2.3.4]/": "address|malformed|not a URL",
    "https://bücher.example/": "ASCII",
    "https://hooks.example.org/ü": "ASCII",
    "https://hooks.example．org/": "ASCII",
    "https://hooks.example.org/\r\nx: y": "ASCII",
    "https://hooks.exa\tmple.org/": "ASCII",
    " https://hooks.example.org/": "ASCII",
    "https://hooks.example.org/\x00": "ASCII",
    "https://hooks.example.org/\x7f": "ASCII",
    f"https://hooks.example.org/{'x' * 2048}": "longer",
}


@pytest.mark.parametrize("url", BAD)
def test_an_ambiguous_callback_url_is_refused(url: str) -> None:
    with pytest.raises(CallbackError, match=BAD[url]):
        parse_callback(url)
    with pytest.raises(CallbackError, match=BAD[url]):
        LISTED.check(url)


@pytest.mark.parametrize(
    "url",
    [
        "https://hooks.example.org/x",
        "https://HOOKS.example.org.:8443/x",
        "https://ports.example.org:8443/",
        "https://[2001:db8:0:0::1]/",
        "http://collector.internal:8080/x",
        "http://COLLECTOR.internal.:8080/x",
    ],
)
def test_hosts_are_compared_in_normal_form(url: str) -> None:
    assert LISTED.check(url).may_be_private == url.startswith("http:")


@pytest.mark.parametrize(
    "url",
    [
        "http://hooks.example.org/",
        "https://sub.hooks.example.org/",
        "https://hooks.example.org.evil.org/",
        "https://ports.example.org/",
        "https://ports.example.org:443/",
        "http://collector.internal/",
        "http://collector.internal:8081/",
        "https://collector.internal:8080/",
        "https://[2001:db8::2]/",
    ],
)
def test_a_callback_url_that_no_entry_allows_is_refused(url: str) -> None:
    with pytest.raises(CallbackError, match="callback-hosts"):
        LISTED.check(url)
    with pytest.raises(CallbackError):
        AllowList.of(()).check(url)


def test_an_entry_without_a_scheme_allows_http_only_with_any_scheme() -> None:
    assert LISTED.check("http://hooks.example.org/", any_scheme=True).url.scheme == "http"
    with pytest.raises(CallbackError):
        LISTED.check("https://collector.internal:8080/", any_scheme=True)


@pytest.mark.parametrize(
    "entry",
    ["https://hooks.example.org/x", "ftp://x", "*.example.org", "a/b", "u@host", "host:0", "bücher.example", "a b", ""],
)
def test_the_error_of_a_malformed_entry_shows_the_entry(entry: str) -> None:
    with pytest.raises(ValueError, match="is not an entry"):
        AllowList.of([entry])
