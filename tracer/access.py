"""Who can reach an address, and how long a key must be: for hub and gateway alike. Knows no key."""

import ipaddress
from typing import Final

MIN_KEY_CHARS: Final = 16
"""Of a key that a person has chosen; made ones are longer."""


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
