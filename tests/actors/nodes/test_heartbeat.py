"""Heartbeats, on a socket pair, without a process."""

from __future__ import annotations

import queue
import socket

import pytest

from levada.actors.nodes import NodeSettings
from levada.actors.nodes.heartbeat import LAST, MARGIN, Heart, Pulse


def test_a_heart_notices_the_end_of_its_driver_at_once() -> None:
    ours, theirs = socket.socketpair()
    lost: queue.Queue[str] = queue.Queue()
    heart = Heart(theirs, lost.put)
    ours.close()
    assert lost.get(timeout=250) == "the driver has ended"
    assert heart.is_alone


def test_a_heart_gives_up_a_driver_that_is_silent() -> None:
    ours, theirs = socket.socketpair()
    lost: queue.Queue[str] = queue.Queue()
    with ours:
        heart = Heart(theirs, lost.put)
        heart.settle(beat=0.01, silence=1.0)  # a second in which this process certainly runs
        ours.send(b"\0")  # wakes it
        assert lost.get(timeout=250).startswith("nothing was heard from the driver for ")
        assert not heart.is_alone


def test_a_pulse_counts_the_rounds_that_a_node_was_not_heard_in() -> None:
    ours, theirs = socket.socketpair()
    with Pulse(0.01) as pulse, theirs:
        beats = pulse.listen(ours)
        while theirs.recv(1) and beats.missed < 5:
            pass
        assert beats.silence >= 0.05
        before = beats.missed
        theirs.send(b"\0")
        while beats.silence >= before * 0.01:  # it begins again at 0
            theirs.recv(1)
        beats.close()
        while theirs.recv(100):
            pass


def test_a_pulse_counts_each_byte_that_it_has_sent_to_a_silent_node() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        with Pulse(0.001) as pulse:
            beats = pulse.listen(ours)
            heard = theirs.recv(1)
        while octets := theirs.recv(4096):
            heard += octets
        assert beats.missed == len(heard) > 0


def test_a_heart_and_a_pulse_keep_each_other() -> None:
    ours, theirs = socket.socketpair()
    lost: queue.Queue[str] = queue.Queue()
    with Pulse(0.01) as pulse:
        beats = pulse.listen(ours)
        heart = Heart(theirs, lost.put)
        heart.settle(beat=0.01, silence=5.0)
        with_heart = [beats.missed for _ in range(1000)]
        assert max(with_heart) < 100
        assert lost.empty()
    assert lost.get(timeout=250) == "the driver has ended"


@pytest.mark.parametrize("silence", [0.5, 4.0, 10.0, 120.0])
def test_a_node_out_of_reach_has_ended_before_its_driver_starts_another(silence: float) -> None:
    # It may notice one heartbeat late, and its process may take as long as it is given.
    assert NodeSettings(silence=silence).beat + LAST < MARGIN


def test_the_end_of_a_driver_is_acted_on_before_who_waits_for_the_heart_goes_on() -> None:
    ours, theirs = socket.socketpair()
    done = list[str]()
    heart = Heart(theirs, done.append)
    heart.join(0.0)
    assert done == []
    ours.close()
    heart.join(300.0)
    assert done == ["the driver has ended"]
