"""Addresses of clusters: which one is meant, and where it was given.

Imports no Ray, whose import takes a second.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rayzero.engine.errors import ConfigError
from rayzero.engine.redact import redact_url

ADDRESS_VARIABLE = "RAY_ADDRESS"
CLIENT_ADDRESS_VARIABLE = "RAYZERO_CLIENT_ADDRESS"
"""Set for a command that runs in the cluster: the `--address` that its user gave."""
HOST_PORT = re.compile(r"(?P<host>\[[^\]]+\]|[^:/\s]+):(?P<port>\d{1,5})")
_DASHBOARD_SCHEMES = ("http://", "https://")
_RAY_CLIENT_SCHEME = "ray://"
_OVERRIDING_VARIABLES = (ADDRESS_VARIABLE, "RAY_API_SERVER_ADDRESS")


class AddressError(ConfigError):
    """There is no cluster at an address that was given."""


class NothingListensError(AddressError):
    """No server listens at the address: its cluster has ended, or is out of reach."""


@dataclass(frozen=True)
class Address:
    """The address of a cluster as it was given, empty without one; `is_variable` if it is the value
    of RAY_ADDRESS."""

    text: str
    is_variable: bool = False

    @property
    def is_dashboard(self) -> bool:
        return self.text.lower().startswith(_DASHBOARD_SCHEMES)

    @property
    def is_named(self) -> bool:
        """Whether it is of one cluster: not of any on this machine, or of a new one."""
        return self.text not in ("", "auto", "local")

    @property
    def host(self) -> str:
        """The host, for a proposal; `HOST` if there is none."""
        rest = self.text.partition("://")[2] or self.text
        return rest.split("/")[0].rpartition("@")[2].rpartition(":")[0] or "HOST"

    @property
    def shown(self) -> str:
        text = repr(redact_url(self.text))
        return f"{text}, the value of {ADDRESS_VARIABLE}" if self.is_variable else text

    def error(
        self,
        found: str,
        *proposals: str,
        kind: type[AddressError] = AddressError,
        setting: str = "",
    ) -> AddressError:
        """There is no cluster at this address, but what was found; `proposals` to use instead, and
        a setting with which it may be found."""
        option = f"{ADDRESS_VARIABLE}=" if self.is_variable else "--address "
        words = [f"{option}{text}" for text in proposals]
        words += [setting] if setting else []
        if self.is_variable:
            words.append(f"--address, which has precedence, or `unset {ADDRESS_VARIABLE}`")
        return kind(
            f"there is no Ray cluster at {self.shown}: {found}",
            allowed="host:port of the head node of a running cluster (Ray's own port, by default "
            "6379); from outside the cluster http://HOST:8265, its dashboard; or `auto`",
            fix="; or ".join(words) or "--address, or start the cluster (`ray start --head`)",
        )


def named_address(address: str | None) -> Address:
    """`address`; if that is None, RAY_ADDRESS, or else an empty one. No other variable counts.
    Raises ConfigError if what was given is not an address."""
    named = Address((os.environ.get(ADDRESS_VARIABLE) or "").strip(), is_variable=True)
    if address is not None:
        named = Address(address.strip())
    elif not named.text:
        return named
    if named.is_dashboard or named.text in ("auto", "local"):
        return named
    if named.text.startswith(_RAY_CLIENT_SCHEME):
        raise named.error(
            "it is an address of Ray Client, which rayzero does not support",
            f"http://{named.host}:8265",
            f"{named.host}:6379 on a machine of the cluster",
        )
    if not HOST_PORT.fullmatch(named.text):
        raise named.error("it is not of the form host:port" if named.text else "it is empty")
    return named


def head_address(address: str | None) -> Address:
    """Returns the `named_address` for a process that joins the cluster. Raises ConfigError also for
    the address of a dashboard, with which it cannot."""
    named = named_address(address)
    if named.is_dashboard:
        raise AddressError(
            f"address {named.shown} is a dashboard's, and a job in Python joins the cluster",
            allowed="host:port of a cluster that this machine is part of, or `auto`",
            fix=f"from outside the cluster: `ray job submit --address {redact_url(named.text)} -- "
            "python FILE.py`",
        )
    return named


@contextmanager
def only_given_address() -> Iterator[None]:
    """Inside the `with` Ray's clients use the address that they are given: they prefer that of a
    variable."""
    hidden = {name: os.environ.pop(name) for name in _OVERRIDING_VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(hidden)
