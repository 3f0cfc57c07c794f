"""How actors start, fail, restart and end.

An ending has four steps. Each may have to wait, so each is a call that continues where the last one stopped:

1. *pause* (`_begin`): no further message is handled; timers end, stashed messages go back.
2. *children* (`_stop_children`): stopped one by one, last started first, each with a deadline. Adopted children that were started one
   after another are stopped together, with one deadline. If the actor is killed, all are killed at once.
3. *close* (`_close`): the hook (`stopping`, or `restarting` before a restart), then the actor's tasks, then its contexts.
4. *conclude*: the next incarnation of the object (`_revive`), or the end (`_terminate`): undelivered messages, asks, watchers, links, parent.

All steps run on a worker between turns (`RunQueue.signal`), so they never interleave and no cell is inside a sync handler.
Async hooks, tasks and contexts are closed in a separate task.  Where a chain of actors would make a chain of calls, steps call one another
through signals: a million linked actors end in a loop, not in a recursion.

If a second reason arrives while an actor ends, the more severe one wins (`links.more_severe`); a kill speeds everything up.

Private fields used here: ``Cell._actor``, ``Cell._asking``, ``Cell._batch``, ``Cell._box``, ``Cell._extras``,
``Cell._handled``, ``Actor._has_metrics``, ``Actor._has_restarting``, ``Actor._has_stopping``, ``Actor._has_undelivered``,
``Cell._idle``, ``Actor._is_loop``,
``Cell._name``, ``Cell._parent``, ``Actor._slots``, ``Cell._worker``.
"""

from __future__ import annotations

import functools
import inspect
import logging
import math
from collections import deque
from collections.abc import Callable
from itertools import takewhile
from random import Random
from typing import TYPE_CHECKING, Any

import outcome
import trio
from trio.lowlevel import enable_ki_protection, reschedule

from levada.framework.errors import ActorError, ChannelError, MailboxFull
from levada.framework.events import ActorFailed, ActorRestarted, ActorTerminated
from levada.framework.links import (
    CANCELLED,
    KILLED,
    NORMAL,
    SHUTDOWN,
    Exit,
    Failed,
    Normal,
    Reason,
    Shutdown,
    more_severe,
)
from levada.framework.supervision import RestartPolicy, Strategy, delay, record, resumes, wants_restart
from levada.framework.text import text_of
from levada.framework.timers import Tick

from .ask import Ask, content_of, stopped_error
from .cell import ActorEnding, Cell, Group
from .host import split_cancelled
from .phase import PAUSED, RUNNING, STOPPED
from .remains import drop_frames, end_handles, open_handles
from .scheduler import InlineCoroutine
from .tokens import END_TURN, EndTurn, RoomCallback, Start, Stop, Take, WakeSenders

if TYPE_CHECKING:
    from .contract import System

__all__ = ["Lifecycle"]

logger = logging.getLogger("levada.framework.lifecycle")

_ENTRIES = (Start, Stop, WakeSenders, Take, EndTurn, Tick)


class Lifecycle:
    """The life of all actors of one system."""

    def __init__(self, system: System, *, random: Random) -> None:
        self._system = system
        self._random = random
        self._signal = system.scheduler.signal

    def raised(self, cell: Cell, message: Any, error: BaseException) -> None:
        """Handle the error of a handler within a turn of `cell`."""
        if cell._actor is None:
            # The signal cell failed: a bug in the runtime, or an error in a hook that must not fail. Nothing can be trusted now:
            # the actor whose signal it was may never end, so the block does not wait for it.
            self._system.crash(error)
            self._system.root_ended()
            return
        if cell.phase is RUNNING:
            self.fail_question(cell, error)
            self._failed(cell, error, message)

    def raised_inline(self, cell: Cell, message: Any, error: BaseException) -> None:
        """Handle the error of a handler that ran inside its asker's task; the cell was held since then."""
        try:
            self.raised(cell, message, error)
        finally:
            self._system.scheduler.requeue(cell)

    def waited(self, cell: Cell, message: Any, error: BaseException | None) -> BaseException | None:
        """Handle the end of a handler that waited; return the cancellation that must reach its scope, if any."""
        cancelled, rest = split_cancelled(error) if error is not None else (None, None)
        pending = cell.ending
        if cancelled is not None and trio.current_effective_deadline() > -math.inf:
            # This handler was not cancelled. It raised a `Cancelled` that it had kept from an earlier scope.
            cancelled, rest = None, error
        if rest is not None:
            self.fail_question(cell, rest)
            if pending is None:
                self._failed(cell, rest, message)
            else:
                # The clean-up of a cancelled handler raised: the actor fails, and the error is the more severe reason.
                self._report(cell, rest, _content(message))
                pending.reason = more_severe(pending.reason, Failed(rest))
                self._begin(cell, pending)
        elif pending is not None:
            self._fail_question_stopped(cell, pending.reason)
            self._begin(cell, pending)
        elif cancelled is not None:
            self._fail_question_stopped(cell, CANCELLED)
            self._begin(cell, ActorEnding(CANCELLED, final=True, cancel=True))
        elif type(message) is Start and cell._actor._is_loop:
            stop = cell.make_extras().inbox.stop
            reason, final = (stop.reason, stop.final) if stop is not None else (NORMAL, False)
            self._fail_question_stopped(cell, reason)
            self._begin(cell, ActorEnding(reason, final=final, graceful=True))
        return cancelled

    def reached_stop(self, cell: Cell, stop: Stop) -> Any:
        """End an actor that has handled everything queued before the stop."""
        if _is_plain(cell):
            self._terminate(cell, stop.reason)  # `RunQueue` counts its messages after this turn
        else:
            self._begin(cell, ActorEnding(stop.reason, final=stop.final, graceful=True))
        return END_TURN

    def too_many_waiting(self, cell: Cell) -> None:
        """Fail an actor whose handler waits while ``max_waiting`` others already wait."""
        most = self._system.max_waiting
        error = ActorError(f"{most} handlers wait already (raise max_waiting, or let fewer wait)", actor=cell.path)
        self._signal(self._fail_from_outside, cell, error)

    def overflowed(self, cell: Cell, error: MailboxFull) -> None:
        """Fail an actor whose mailbox is full, with the policy ``stop``."""
        self._signal(self._fail_from_outside, cell, error)

    def task_failed(self, cell: Cell, error: BaseException) -> None:
        """Fail an actor since one of its tasks or contexts failed; these end before their actor does."""
        self._signal(self._task_failed, cell, error)

    def fail_question(self, cell: Cell, error: BaseException) -> None:
        """If the current message is an ask, fail it with `error`."""
        self._fail_question_stopped(cell, Failed(error))

    def request(self, cell: Cell, reason: Reason, *, cancel: bool = False, final: bool = False) -> None:
        """End an actor after the running handler, which `cancel` cancels; queued messages are not handled."""
        self._signal(self.request_now, cell, reason, cancel, final)

    @enable_ki_protection
    def release(self, cell: Cell, reason: Reason, *, hook: bool = False) -> None:
        """End an actor: immediately if it is idle, owns nothing, and its `stopping` has nothing to do or, with `hook`, is not there.

        For parents that drive thousands of children by calls: 2 µs per child, instead of 6 and the wake-up of a worker.
        """
        extras = cell._extras
        plain = extras is None or (extras.supervised is None and not extras.children and extras.host is None)
        if cell._idle and plain and not (hook and cell._actor._has_stopping):
            if cell._handled:
                self._count(cell)
            self._terminate(cell, reason)
        else:
            self.request(cell, reason)

    def exit_signal(self, cell: Cell, source: Any, reason: Reason) -> None:
        """Deliver the exit signal of a linked actor."""
        self._signal(self._exit, cell, source, reason)

    def _exit(self, cell: Cell, source: Any, reason: Reason) -> None:
        if cell.phase is STOPPED:
            return
        if cell._actor.trap_exits:
            cell.put_first(cell.enveloped(Exit(source, reason)))
        elif not isinstance(reason, Normal):
            self.request_now(cell, reason, True, False)

    def _task_failed(self, cell: Cell, error: BaseException) -> None:
        ending = cell.ending
        out_of_order = ending is not None and ending.closed and not isinstance(ending.reason, Normal | Shutdown)
        if out_of_order and _is_of_channels(error):
            self._forget(error)  # `_close` has ended the actor's channels, and a cancelled task was about to use one
        else:
            self._fail_from_outside(cell, error)

    def _escalated(self, parent: Cell, error: BaseException) -> None:
        """Fail the parent with its child's error."""
        if parent._parent is None:
            self._system.crash(error)
        else:
            self._fail_from_outside(parent, error)

    def _fail_from_outside(self, cell: Cell, error: BaseException) -> None:
        """Fail an actor with an error from outside its handlers."""
        if cell.phase is RUNNING and cell._worker is None:
            self._failed(cell, error, None, queued=not cell._idle)
        elif cell.phase is not STOPPED:
            self._report(cell, error, None)
            if cell.phase is PAUSED or not _resumes(cell, error):
                self.request_now(cell, Failed(error), True, False)
            else:
                self._forget_failure(cell)

    def request_now(self, cell: Cell, reason: Reason, cancel: bool, final: bool) -> None:
        if cell.phase is STOPPED:
            return
        pending = cell.ending
        if pending is not None:
            self._hurry(cell, pending, reason, cancel, final)
        else:
            self._end(cell, ActorEnding(reason, final=final, cancel=cancel))

    def _end(self, cell: Cell, ending: ActorEnding) -> None:
        """Start an ending from outside the actor. If a handler waits, `waited` continues when it has ended."""
        if cell._worker is None:
            self._begin(cell, ending, queued=not cell._idle)
            return
        cell.make_extras().ending = ending
        self._fail_taken_over(cell, ending.reason)
        if ending.cancel:
            cell._worker.cancel()
        elif cell._actor._is_loop:
            cell.make_extras().inbox.end()

    def _hurry(self, cell: Cell, ending: ActorEnding, reason: Reason, cancel: bool, final: bool) -> None:
        """Add a request to an ending that is under way."""
        extras = cell.make_extras()
        ending.reason = more_severe(ending.reason, reason)
        self._fail_taken_over(cell, ending.reason)
        if final:
            ending.final = True
            ending.escalate = False
        policy = extras.supervised.policy if extras.supervised is not None else None
        if final or not (isinstance(policy, RestartPolicy) and wants_restart(policy, reason)):
            ending.restart = False
        if cancel:
            ending.cancel = True
            if cell._worker is not None:
                cell._worker.cancel()
        if ending.concluded:
            if not ending.restart:
                self._count(cell)
                self._terminate(cell, ending.reason)
        elif cancel:
            if not ending.closed:
                self._stop_children(cell)
            elif extras.host is not None:
                extras.host.cancel()

    def _failed(self, cell: Cell, error: BaseException, entry: Any, *, queued: bool = False) -> None:
        message = _content(entry)
        self._report(cell, error, message)
        if not _resumes(cell, error):
            if cell.supervised is None and not _ends_system(error):
                self._system.counters.unsupervised += 1
            ending = ActorEnding(Failed(error), final=_ends_system(error))
            ending.message = message
            self._begin(cell, ending, queued=queued)
        else:
            self._forget_failure(cell)

    def _report(self, cell: Cell, error: BaseException, message: Any) -> None:
        what = f" while it handled {type(message).__name__}" if message is not None else ""
        extra = {"actor": cell.path, "event": "failed"}
        if _ends_system(error):
            # The system's block raises it with the traceback; once is enough.
            logger.info("%s was interrupted%s: %s", cell.path, what, text_of(error, repr), extra=extra)
        else:
            self._system.failure_log.log_whole(logger, error, "%s failed%s", cell.path, what, **extra)
        self._system.counters.failures += 1
        self._system.observe.count_failure(cell)
        self._system.events.publish(ActorFailed(cell, error, message))
        if _ends_system(error):
            self._system.crash(error)
        extras = cell.make_extras()
        if extras.failure is None:
            extras.failure = error
        elif extras.failure is not error:
            self._forget(error)  # of two failures the first one is the reason

    def _forget_failure(self, cell: Cell) -> None:
        """Drop the frames of the actor's error, since nothing else will fail with it."""
        extras = cell.make_extras()
        if extras.failure is not None:
            error, extras.failure = extras.failure, None
            self._forget(error)

    def _forget(self, error: BaseException) -> None:
        """Drop an error's frames, unless it comes out of the system's block."""
        if error is not self._system.fatal:
            drop_frames(error)

    def _fail_question_stopped(self, cell: Cell, reason: Reason) -> None:
        question = cell.take_question()
        if question is not None:
            question.fail(stopped_error(cell, reason, question.message, begun=True))

    def _fail_taken_over(self, cell: Cell, reason: Reason, *, over: bool = False) -> None:
        """Fail the questions that `Actor.reply_later` took, unless the actor's hook and tasks may still answer them.

        They may until they are `over`, except after a failure: then a child could wait for an answer while the actor waits for the child.
        """
        extras = cell._extras
        if extras is not None and extras.open_asks and (over or isinstance(reason, Failed)):
            asks, extras.open_asks = extras.open_asks, None
            for ask in asks:
                ask.fail(stopped_error(cell, reason, ask.message, begun=True))

    def _begin(self, cell: Cell, ending: ActorEnding, *, queued: bool = False) -> None:
        """Handle no further message; `queued`: the cell is in the run queue now."""
        if _is_plain(cell):
            self._count(cell)
            self._terminate(cell, ending.reason)
            return
        self._system.scheduler.claim_context(cell)
        extras = cell.make_extras()
        cell.pause()
        extras.queued = queued
        extras.ending = ending
        self._fail_taken_over(cell, ending.reason)
        if extras.timers is not None:
            extras.timers.cancel_all()
        if extras.receive_timer is not None:
            extras.receive_timer.cancel()
            extras.receive_timer = None
        if extras.stash:
            cell.put_back(extras.stash)
            extras.stash = None
        self._plan(cell, ending)
        if cell.context is None:
            self._stop_children(cell)
        else:
            # This may run inside the actor's own context, which the hooks will enter.
            self._signal(self._stop_children, cell)

    def _plan(self, cell: Cell, ending: ActorEnding) -> None:
        """Decide whether the actor restarts, alone or with siblings."""
        supervised = cell.make_extras().supervised
        if ending.final or supervised is None:
            return
        policy = supervised.policy
        if not isinstance(policy, RestartPolicy):
            ending.escalate = policy == "escalate" and isinstance(ending.reason, Failed)
            return
        parent = cell._parent
        assert parent is not None
        if parent.phase is not RUNNING or not wants_restart(policy, ending.reason):
            return
        strategy: Strategy = parent._actor.strategy
        group = parent.group
        if group is not None and cell in group.members:
            ending.restart = True  # the group was about to restart it anyway
            return
        now = trio.current_time()
        if strategy.scope == "one":
            times, most, seconds = supervised.times, policy.max, policy.within
        else:
            times = parent.make_extras().regroups or deque()
            parent.make_extras().regroups = times
            most, seconds = strategy.max, strategy.within
        if not record(times, now, max=most, within=seconds):
            what = "%s ended more than %d times in %g s: its parent fails"
            logger.error(what, cell.path, most, seconds, extra={"actor": cell.path})
            ending.escalate = True
            return
        ending.restart = True
        ending.delay = delay(policy, len(times), self._random)
        if strategy.scope != "one":
            group = parent.make_extras().group = group or Group()
            group.delay = max(group.delay, ending.delay)
            group.add(_restarted_together(strategy, parent, cell))

    def _stop_children(self, cell: Cell) -> None:
        """Stop the last child, adopted ones together, or all at once after a kill; without children go on to step 3."""
        extras = cell._extras
        if cell.phase is not PAUSED or extras is None or extras.ending is None or extras.ending.closed:
            return
        ending = extras.ending
        if extras.stop_timer is not None:
            extras.stop_timer.cancel()
            extras.stop_timer = None
        if not extras.children:
            self._close(cell)
        elif ending.cancel:
            for child in reversed(list(extras.children)):
                self._signal(self.request_now, child, CANCELLED if ending.reason == CANCELLED else KILLED, True, True)
        else:
            # Not `next(reversed(…))`, which steps over all deleted entries: 100,000 children took 6 s.
            child, adopted = extras.children.popitem()
            extras.children[child] = adopted
            group = [child]
            if adopted:  # a peer may have caused 10,000 of them, whose handlers never end
                group = list(takewhile(extras.children.__getitem__, reversed(extras.children)))
                ending.together = len(group)
            for child in group:
                untouched = child.phase is RUNNING and (child._extras is None or child._extras.ending is None)
                if ending.graceful and untouched:
                    child.admit(Stop(SHUTDOWN, final=True))
                else:
                    self._signal(self.request_now, child, SHUTDOWN, False, True)
            late = functools.partial(self._signal, self._children_out_of_time, group)
            extras.stop_timer = self._system.heap.after(self._system.stop_timeout, late)

    def _children_out_of_time(self, group: list[Cell]) -> None:
        """Kill the children that should have ended together and did not; log one line for all of them."""
        late = [child for child in group if child.phase is not STOPPED]
        if len(late) > 1:
            parent = late[0]._parent
            assert parent is not None
            seconds, extra = self._system.stop_timeout, {"actor": parent.path}
            what = "%d children of %s did not stop in %g s: killed"
            logger.warning(what, len(late), parent.path, seconds, extra=extra)
            for child in late:
                self.request_now(child, KILLED, True, True)
        elif late:
            self._out_of_time(late[0], True)

    def _out_of_time(self, cell: Cell, final: bool) -> None:
        """Kill an actor that does not end in time; if this is `final`, it does not restart."""
        if cell.phase is not STOPPED:
            seconds = self._system.stop_timeout
            logger.warning("%s did not stop in %g s: killed", cell.path, seconds, extra={"actor": cell.path})
            self.request_now(cell, KILLED, True, final)

    def _child_gone(self, parent: Cell, child: Cell) -> None:
        extras = parent._extras
        assert extras is not None
        assert extras.children is not None
        adopted = extras.children.pop(child, False)
        if child._name is not None and extras.names is not None:
            extras.names.pop(child._name, None)
        group = extras.group
        if group is not None and child in group.members:
            del group.members[child]
            self._signal(self._regroup, parent, group)
        ending = extras.ending
        if parent.phase is PAUSED and ending is not None:
            if adopted and ending.together:
                ending.together -= 1
            if not extras.children or not (ending.cancel or ending.together):
                self._signal(self._stop_children, parent)

    def _close(self, cell: Cell) -> None:
        extras = cell.make_extras()
        ending = extras.ending
        assert ending is not None
        ending.closed = True
        actor = cell._actor
        if not isinstance(ending.reason, Normal | Shutdown) and (handles := open_handles(actor)):
            # End the handles before the hook, which may finish them as if all had gone well.
            if extras.host is not None:
                extras.host.cancel_tasks()
            end_handles(handles, ending.reason)
        hook, arguments = self._hook(actor, ending)
        if extras.host is None and not inspect.iscoroutinefunction(hook):
            waiting = None
            if hook is not None:
                try:
                    waiting = self._call(cell, hook, *arguments)
                except BaseException as error:
                    self._hook_failed(cell, ending, error)
            if extras.host is None and not inspect.isawaitable(waiting):
                self._conclude(cell)
                return
            # A sync hook returned an awaitable, or started tasks.
            hook, arguments = _identity, (waiting,)
        context = cell.context if cell.context is not None else self._system.scheduler.base_context()
        context.run(self._system.start_task, self._close_in_task, cell, hook, arguments, name=f"<end of {cell.path}>")

    def _hook(self, actor: Any, ending: ActorEnding) -> tuple[Callable[..., Any] | None, tuple[Any, ...]]:
        if ending.restart:
            error = ending.reason.error if isinstance(ending.reason, Failed) else None
            return (actor.restarting, (error, ending.message)) if actor._has_restarting else (None, ())
        return (actor.stopping, (ending.reason,)) if actor._has_stopping else (None, ())

    async def _close_in_task(self, cell: Cell, hook: Callable[..., Any] | None, arguments: tuple[Any, ...]) -> None:
        extras = cell.make_extras()
        ending = extras.ending
        assert ending is not None
        seconds, extra = self._system.stop_timeout, {"actor": cell.path}
        # A hook may await while everything around is being cancelled, since the system's nursery is shielded, but not forever.
        with trio.move_on_after(seconds) as scope:
            try:
                if hook is not None:
                    result = hook(*arguments)
                    if inspect.isawaitable(result):
                        await result
            except BaseException as error:
                cancelled, rest = split_cancelled(error)
                if rest is not None:
                    self._hook_failed(cell, ending, rest)
                if cancelled is not None:
                    raise cancelled from None
        if scope.cancelled_caught:
            logger.warning("a hook of %s took longer than %g s: cancelled", cell.path, seconds, extra=extra)
        if extras.host is not None:
            if ending.cancel:
                extras.host.cancel()
            with trio.move_on_after(seconds) as scope:
                await extras.host.close()
            if scope.cancelled_caught:
                logger.warning("tasks of %s took longer than %g s to end", cell.path, seconds, extra=extra)
                extras.host.cancel()
                await extras.host.close()
        self._signal(self._conclude, cell)

    def _hook_failed(self, cell: Cell, ending: ActorEnding, error: BaseException) -> None:
        self._report(cell, error, None)
        ending.reason = more_severe(ending.reason, Failed(error))

    def _call(self, cell: Cell, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call the user's code in the actor's context."""
        scheduler = self._system.scheduler
        context = cell.context if cell.context is not None else scheduler.base_context()
        try:
            return context.run(function, *arguments)
        finally:
            if cell.context is None and scheduler.differs(context):
                cell.context = context

    def _conclude(self, cell: Cell) -> None:
        extras = cell.make_extras()
        ending = extras.ending
        assert ending is not None
        extras.host = None
        self._fail_taken_over(cell, ending.reason, over=True)
        if not ending.restart:
            self._count(cell)
            self._terminate(cell, ending.reason)
            return
        ending.concluded = True
        end_handles(open_handles(cell._actor), ending.reason)
        self._forget_failure(cell)
        parent = cell._parent
        assert parent is not None
        group = parent.group
        if group is not None and cell in group.members:
            self._signal(self._regroup, parent, group)
        else:
            ending.due = trio.current_time() + ending.delay
            self._after(ending.delay, self._revive_alone, cell)

    def _after(self, seconds: float, function: Callable[..., object], *arguments: Any) -> None:
        if seconds > 0:
            self._system.heap.after(seconds, functools.partial(self._signal, function, *arguments))
        else:
            self._signal(function, *arguments)

    def _regroup(self, parent: Cell, group: Group) -> None:
        """Stop the last member that has not concluded, or wait for it; when all have concluded, start them."""
        if parent.phase is not RUNNING or parent.group is not group:
            return
        while group.running:
            cell = group.running[-1]
            ending = cell.ending
            if ending is None and cell in group.members:
                ending = ActorEnding(SHUTDOWN, cancel=False)
                supervised = cell.make_extras().supervised
                assert supervised is not None
                ending.restart = isinstance(supervised.policy, RestartPolicy) and supervised.policy.kind != "temporary"
                self._end(cell, ending)
                if cell._worker is not None:
                    # The handler gets the same time as when its parent ends; children and hooks have their own deadlines.
                    late = functools.partial(self._signal, self._out_of_time, cell, False)
                    cell.make_extras().stop_timer = self._system.heap.after(self._system.stop_timeout, late)
                return
            if ending is not None and not ending.concluded:
                return
            group.running.pop()
        for cell in group.members:
            if cell.ending is not None:
                cell.ending.due = trio.current_time() + group.delay
        self._after(group.delay, self._revive_group, parent, group)

    def _revive_group(self, parent: Cell, group: Group) -> None:
        waiting = [cell.ending for cell in group.members]
        if parent.phase is not RUNNING or parent.group is not group:
            return
        if all(ending is not None and ending.concluded for ending in waiting):
            parent.make_extras().group = None
            for cell in group.members:
                if not self._revive(cell):
                    break  # another restart of the group, or the end of the parent, follows and includes the rest

    def _revive_alone(self, cell: Cell) -> None:
        """Restart an actor after its back-off, unless it was stopped or joined a group meanwhile."""
        ending = cell.ending
        if cell.phase is PAUSED and ending is not None and ending.concluded:
            assert cell._parent is not None
            group = cell._parent.group
            if group is None or cell not in group.members:
                self._revive(cell)

    @enable_ki_protection
    def _revive(self, cell: Cell) -> bool:
        """Make a new object for a cell, which keeps its mailbox; return whether that worked."""
        extras = cell.make_extras()
        supervised = extras.supervised
        assert supervised is not None
        try:
            actor = self._call(cell, supervised.factory, *supervised.args)
        except BaseException as error:
            self._report(cell, error, None)
            ending = ActorEnding(Failed(error), final=_ends_system(error))
            extras.ending = ending
            self._plan(cell, ending)
            ending.closed = True
            self._signal(self._conclude, cell)
            return False
        extras.ending = extras.group = extras.regroups = None
        extras.restarts += 1
        if cell._actor._has_metrics:
            self._system.observe.keep(cell._actor)
        cell.revive(actor)
        self._system.counters.restarts += 1
        self._system.observe.count_restart(cell)
        self._system.events.publish(ActorRestarted(cell, extras.restarts))
        if extras.queued:
            # The cell's old place in the run queue may be ahead of siblings that must start first.
            self._system.scheduler.ready.remove(cell)
        self._system.scheduler.requeue(cell)
        return True

    def _count(self, cell: Cell) -> None:
        """Add the messages of an actor that ends to the count of its class. If this is within its turn, the rest of the turn is counted later."""
        self._system.scheduler.count_ended(cell._actor, cell._handled)
        cell._handled = 0

    @enable_ki_protection
    def _terminate(self, cell: Cell, reason: Reason) -> None:
        """End the actor for good."""
        system = self._system
        left = self._fail_questions(cell, reason) if cell._batch or cell._box or cell.line else None
        actor = cell.end(reason)
        if actor._has_metrics:
            system.observe.keep(actor)
        if cell._asking is not None:
            self._fail_question_stopped(cell, reason)
        if left:
            self._hand_back(cell, actor, left)
        cell.context = None
        system.counters.stopped += 1
        parent = cell._parent
        extras = cell._extras
        if extras is not None:
            self._fail_taken_over(cell, reason, over=True)
            cell._extras = None
            self._tell_of_end(cell, extras, reason)
            if extras.ending is not None and extras.ending.escalate and parent is not None:
                error = getattr(reason, "error", None)
                if error is None:
                    error = ActorError(f"{cell.path} ended too often", actor=cell.path)
                self._signal(self._escalated, parent, error)
            elif extras.failure is not None:
                self._forget(extras.failure)
        if (getattr(actor, "__dict__", None) or type(actor)._slots) and (handles := open_handles(actor)):
            end_handles(handles, reason)
        if system.events.subscribers and system.events.wants(ActorTerminated):
            system.events.publish(ActorTerminated(cell, reason))
        if parent is not None:
            self._child_gone(parent, cell)
        else:
            system.root_ended()

    def _fail_questions(self, cell: Cell, reason: Reason) -> list[Any]:
        """Empty the mailbox; fail asks and waiting senders; return the messages, oldest first."""
        left = []
        for entry in cell.take_messages():
            if isinstance(entry, Ask):
                entry.fail(stopped_error(cell, reason, entry.message))
            elif isinstance(entry, InlineCoroutine):
                entry.coroutine.close()
                entry.question.fail(stopped_error(cell, reason, entry.question.message, begun=True))
            elif not isinstance(entry, _ENTRIES):
                left.append(content_of(entry))
        line = cell.line
        while line:
            entry, _ = line.popitem(last=False)
            message, task = entry.message, entry.task
            if isinstance(message, Ask):
                message.fail(stopped_error(cell, reason, message.message))
            elif task is not None:
                reschedule(task, outcome.Error(stopped_error(cell, reason, message)))
            elif not isinstance(message, RoomCallback):
                left.append(content_of(message))
        return left

    def _hand_back(self, cell: Cell, actor: Any, left: list[Any]) -> None:
        if actor._has_undelivered:
            try:
                self._call(cell, actor.undelivered, left)
            except BaseException as error:
                self._report(cell, error, None)
        else:
            for message in left:
                self._system.dead_letter(message, cell, "stopped")

    def _tell_of_end(self, cell: Cell, extras: Any, reason: Reason) -> None:
        if extras.ended is not None:
            extras.ended.set()
        for callback in list((extras.watchers or {}).values()):
            callback(reason)
        for forget in list((extras.watched or {}).values()):
            forget()
        for other in extras.links or ():
            other.exited(cell, reason)
        if extras.timers is not None:
            extras.timers.cancel_all()
        for timer in (extras.stop_timer, extras.receive_timer):
            if timer is not None:
                timer.cancel()


def _restarted_together(strategy: Strategy, parent: Cell, failed: Cell) -> list[Cell]:
    """List the children that restart together, in order of start, including `failed`."""
    group = []
    seen = strategy.scope == "all"
    for cell in parent.make_extras().children or ():
        seen = seen or cell is failed
        supervised = cell.supervised
        if seen and supervised is not None and isinstance(supervised.policy, RestartPolicy):
            group.append(cell)
    return group


def _content(entry: Any) -> Any:
    """Return the message inside a mailbox entry, or ``None``."""
    if isinstance(entry, Take):
        entry = entry.taken()
    elif isinstance(entry, Tick):
        entry = entry.alarm.message
    elif isinstance(entry, InlineCoroutine):
        entry = entry.question
    elif isinstance(entry, Start):
        entry = None
    return content_of(entry)


def _is_of_channels(error: BaseException) -> bool:
    """Whether an error, or each error of a group, says that a channel has ended."""
    if isinstance(error, BaseExceptionGroup):
        return all(map(_is_of_channels, error.exceptions))
    return isinstance(error, ChannelError)


def _ends_system(error: BaseException) -> bool:
    """Whether `error` ends the system: KeyboardInterrupt, SystemExit, or a group with one; not a stray `Cancelled`."""
    rest = split_cancelled(error)[1]
    return rest is not None and not isinstance(rest, Exception)


def _resumes(cell: Cell, error: BaseException) -> bool:
    supervised = cell.supervised
    return supervised is not None and isinstance(error, Exception) and resumes(supervised.policy, error)


def _identity(waiting: Any) -> Any:
    return waiting


def _is_plain(cell: Cell) -> bool:
    """Whether there is nothing to stop, close or restart, as with most actors. This saves them 1 µs."""
    actor = cell._actor
    if actor._has_stopping or actor._has_undelivered:
        return False
    extras = cell._extras
    return extras is None or (
        extras.supervised is None and extras.children is None and extras.host is None and extras.stash is None
    )
