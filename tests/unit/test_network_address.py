"""The address that a process of a distributed pipeline listens on."""

import socket

import pytest

from stagepack_loaders.distributed.meeting import chosen_address, reachable_address


def test_it_is_that_of_the_interface_that_leads_to_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert chosen_address("127.0.0.1") == "127.0.0.1"
    assert chosen_address("127.0.1.1") == "127.0.0.1"
    assert chosen_address("::1") == "::1"
    assert chosen_address("localhost") == "127.0.0.1"


def test_there_is_none_for_a_name_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_nothing(*_: object, **__: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setattr(socket, "getaddrinfo", find_nothing)
    assert chosen_address("no-such-host") is None


def test_the_variable_of_gloo_goes_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    assert chosen_address("127.0.0.1") is None


@pytest.mark.parametrize(
    ("published", "own", "expected"),
    [
        (["127.0.0.1", "127.0.0.1"], "127.0.0.1", "127.0.0.1"),  # all on one machine
        (["127.0.0.1", "10.0.0.2"], "10.0.0.2", "10.0.0.2"),
        (["127.0.0.1", None], None, None),
        (["::1", "::1"], "::1", "::1"),
        (["fe80::1%eth0", "fe80::2%eth0"], "fe80::2%eth0", "fe80::2%eth0"),
    ],
)
def test_an_address_that_others_reach_is_kept(
    published: list[str | None], own: str | None, expected: str | None
) -> None:
    assert reachable_address(own, published) == expected


def test_a_loopback_address_gives_way_to_one_that_others_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagepack_loaders.distributed.meeting._address_towards", lambda target: f"to {target}")
    assert reachable_address("127.0.1.1", ["127.0.1.1", "127.0.1.1", "10.0.0.3"]) == "to 10.0.0.3"
