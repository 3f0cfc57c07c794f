"""The right results for the demo's own logs, counted by other means; see ``data/README.md``."""

from __future__ import annotations

from collections.abc import Mapping

from .live import Results

__all__ = ["KNOWN", "VERIFIED", "differences", "mistakes"]

KNOWN: Mapping[tuple[str, str], Mapping[str, int]] = {
    ("access", "lines"): {"": 10_000},
    ("access", "damaged"): {"octet 2111246: 5 quotation marks, wanted 6": 1},
    ("access", "status"): {"200": 9125, "304": 445, "404": 213, "301": 164, "206": 45, "500": 3, "403": 2, "416": 2},
    ("access", "day"): {"2015-05-17": 1632, "2015-05-18": 2893, "2015-05-19": 2896, "2015-05-20": 2579},
    ("access", "suspicious"): {
        "91.236.75.25": 40,
        "144.76.95.39": 16,
        "188.165.243.45": 15,
        "195.250.34.144": 15,
        "198.245.61.43": 15,
        "95.78.54.93": 15,
        "144.76.194.187": 10,
        "199.168.96.66": 10,
        "212.90.148.107": 10,
    },
    ("auth", "lines"): {"": 7121},
    ("auth", "damaged"): {},
    ("kafka", "lines"): {"": 1032},
    ("kafka", "records"): {"": 803},
    ("kafka", "damaged"): {},
}
"""By source and kind, the count of each key."""

VERIFIED = "all counts match the known facts about these logs"
"""What the demo and its report say if there are no mistakes."""


def mistakes(results: Results, known: Mapping[tuple[str, str], Mapping[str, int]] = KNOWN) -> list[str]:
    """Compare results with the known counts; one line for each difference."""
    return [
        f"{source}, {kind}: wanted {dict(wanted)}, got {got}"
        for (source, kind), wanted in known.items()
        if (got := results.by_key(source, kind)) != wanted
    ]


def differences(one: Results, other: Results) -> list[str]:
    """Compare the results over RSocket and over Aqueduct; one line for each kind that differs."""
    return [
        f"{name} over Aqueduct differ from those over RSocket"
        for name in ("counts", "rates", "attacks", "anomalies")
        if getattr(one, name) != getattr(other, name)
    ]
