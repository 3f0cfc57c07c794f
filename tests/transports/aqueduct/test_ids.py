"""Channel ids."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from levada.transports.aqueduct import AqueductCore, Attach, ReceiverHalf, SenderHalf

from .conftest import Wire


@pytest.mark.rule("AQ-6")
@pytest.mark.parametrize(
    ("client", "attach", "expected"),
    [
        (True, Attach.RECEIVER, [8, 16]),
        (True, Attach.ONESHOT_RECEIVER, [4, 12]),
        (True, Attach.SENDER, [1, 9]),
        (True, Attach.ONESHOT_SENDER, [5, 13]),
        (False, Attach.SENDER, [2, 10]),
        (False, Attach.ONESHOT_SENDER, [6, 14]),
        (False, Attach.RECEIVER, [3, 11]),
        (False, Attach.ONESHOT_RECEIVER, [7, 15]),
    ],
)
def test_aq6_ids_are_minted_in_order_in_each_space(client: bool, attach: Attach, expected: list[int]) -> None:
    """Flow, minter and oneshot are the low bits; each space counts from 0, the entrypoint being the first of its own."""
    core = AqueductCore(client=client)
    halves = core.mint([attach]) + core.mint([attach])
    assert [half.id for half in halves] == expected
    opposite = ReceiverHalf if attach in (Attach.SENDER, Attach.ONESHOT_SENDER) else SenderHalf
    assert all(isinstance(half, opposite) for half in halves)
    assert [half.oneshot for half in halves] == [attach in (Attach.ONESHOT_SENDER, Attach.ONESHOT_RECEIVER)] * 2


@pytest.mark.rule("AQ-6")
def test_aq6_the_entrypoint_is_0(wire: Callable[..., Wire]) -> None:
    """Id 0 flows from the client to the server."""
    assert isinstance(wire(client=True).core.halves[0], SenderHalf)
    assert isinstance(wire(client=False).core.halves[0], ReceiverHalf)
