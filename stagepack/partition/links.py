"""Links between devices: how fast they send values, and how users write them."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from stagepack.errors import OptionError
from stagepack.format.quantities import parse_byte_size, parse_seconds
from stagepack.partition.costs import REFERENCE_LINK, LinkCosts

_PICOSECONDS = 10**12  # in a second
_FASTEST, _LONGEST = 1e15, 1e3  # bytes in a second, seconds
_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_GRAMMAR: Final = "NAME=BANDWIDTH[,rtt=TIME] such as host=25GB/s,rtt=0.1ms; NAME is device or host"


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """A link between two devices, in one direction.

    Attributes:
        bandwidth: bytes that it sends in a second, from 1 to 10**15.
        rtt: seconds of a round trip, at most 1000; a value takes half of it besides its bytes.

    Raises:
        OptionError: a number is out of its range.
    """

    bandwidth: float
    rtt: float

    def __post_init__(self) -> None:
        """Refuse numbers out of range."""
        if not 1 <= self.bandwidth <= _FASTEST:
            raise OptionError(f"link: expected 1 to 10**15 bytes in a second, found {self.bandwidth!r}")
        if not 0 <= self.rtt <= _LONGEST:
            raise OptionError(f"link: expected a round trip of 0 to 1000 seconds, found {self.rtt!r}")

    @property
    def costs(self) -> LinkCosts:
        """The costs of sending a value, in picoseconds."""
        return LinkCosts(per_value=round(self.rtt * _PICOSECONDS / 2), per_byte=_PICOSECONDS / self.bandwidth)


# Costs of a link that the caller does not describe. Between hosts: Ethernet of 10 Gbit/s with a round trip of 0.1 ms.
DEFAULT_LINKS: Final[Mapping[str, LinkCosts]] = {
    "device": REFERENCE_LINK,
    "host": Link(bandwidth=1.25e9, rtt=1e-4).costs,
}


def parse_link(text: str) -> tuple[str, Link]:
    """Parse a link and its name: ``host=25GB/s,rtt=0.1ms``.

    The text is ``NAME=BANDWIDTH[,rtt=TIME]``. NAME is ``device`` for links between devices of one host, or ``host`` for those between
    hosts; BANDWIDTH is a number of bytes as for memory, and ``/s``; TIME is a number and ``s``, ``ms``, ``us``, ``µs`` or ``ns``. Without
    ``rtt``, the round trip is that of `DEFAULT_LINKS`.
    """
    match = re.fullmatch(r"(\w+)=([^,]+)/s(?:,rtt=([^,]+))?", text)
    if match is None or match[1] not in DEFAULT_LINKS:
        raise OptionError(f"link: expected {_GRAMMAR}, found {text!r}")
    try:
        bandwidth = parse_byte_size(match[2])
        rtt = 2 * DEFAULT_LINKS[match[1]].per_value / _PICOSECONDS if match[3] is None else parse_seconds(match[3])
    except ValueError as error:
        raise OptionError(f"link {text!r}: {error}: expected {_GRAMMAR}") from None
    return match[1], Link(bandwidth=bandwidth, rtt=rtt)


def parse_links(texts: Iterable[str]) -> dict[str, Link]:
    """Parse links, each by its name; see `parse_link`."""
    links: dict[str, Link] = {}
    for name, link in map(parse_link, texts):
        if links.setdefault(name, link) is not link:
            raise OptionError(f"link: expected one of the name {name}, found two")
    return links


def link_costs(links: Mapping[str, Link]) -> dict[str, LinkCosts]:
    """Return the costs of the links that a caller describes, by name; refuse unknown names."""
    for link_name, link in links.items():
        if link_name not in DEFAULT_LINKS or not isinstance(link, Link):
            raise OptionError(f"links: expected a Link for device or host, found {link!r} for {link_name!r}")
    return {link_name: link.costs for link_name, link in links.items()}


def link_text(costs: LinkCosts) -> str:
    """Return a link as a user writes it, such as ``25GB/s,rtt=0.1ms``."""
    bandwidth = _PICOSECONDS / costs.per_byte if costs.per_byte else math.inf
    scale, unit = next((entry for entry in _UNITS if bandwidth >= entry[0]), (1.0, "B"))
    return f"{bandwidth / scale:.4g}{unit}/s,rtt={2 * costs.per_value / 1e9:.4g}ms"
