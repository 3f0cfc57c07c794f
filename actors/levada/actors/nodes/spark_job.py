"""A Spark job of one task for coroutines: starting, waiting, cancelling, and finding out why it does not start.

Calls to Spark's JVM block while the JVM is busy or stopped, so all of them are made in threads.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable
from typing import Any, Final

import trio
from pyspark import InheritableThread, SparkContext
from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

from levada.actors.spark.root_cause import root_cause
from levada.actors.spark.session import NODE_TASK
from levada.framework.errors import ConfigurationError
from levada.framework.text import printable

from .spark_settings import SparkSlots

__all__ = ["SparkJob", "room"]

AGAIN: Final = 0.5
"""Seconds between two attempts to cancel a job; Spark takes 0.04 to 0.5."""
LONGEST: Final = 400
"""The most characters of a Spark error."""


_FAILURE: Final = re.compile(r"most recent failure: (.+)")
_ADVICE: Final = re.compile(r" Consider setting 'spark\..*")


def _cause(text: str) -> str:
    r"""Return the most informative line of a Spark error.

    Example:
        >>> _cause("aborted, most recent failure: Lost task 0.0 (desk executor 1): ExecutorLostFailure (executor 1 exited)\n at x")
        'Lost task 0.0 (desk executor 1): ExecutorLostFailure (executor 1 exited)'
    """
    found = _FAILURE.search(text)
    if found is None or "Traceback (most recent call last)" in text:
        return root_cause(text)
    return printable(_ADVICE.sub("", found[1]), LONGEST)


class SparkJob:
    """A job of one task; `submit` starts it.

    Args:
        context: the context of the application.
        group: a Spark job group for this job alone.
        description: a description for Spark's web interface.
        task: pickled, and called with one argument in a Python worker of Spark. Its result is dropped.
        cores: the cores of the task; None: Spark's default.
    """

    def __init__(
        self, context: SparkContext, group: str, description: str, task: Callable[[Any], None], cores: int | None = None
    ) -> None:
        self._context = context
        self._group = group
        self._description = description
        self._task = task
        self._cores = cores
        self._trio = trio.lowlevel.current_trio_token()
        self._over = trio.Event()
        self._error: str | None = None

    async def submit(self) -> None:
        """Start the job.

        Raises:
            ConfigurationError: Spark has stopped, or its JVM has ended.

        Cancellation:
            the job may have been started.
        """
        thread = InheritableThread(target=self._run, name=self._group, daemon=True)
        try:
            await trio.to_thread.run_sync(thread.start, abandon_on_cancel=True)
        except Exception as error:  # from Py4J, the operating system, or an assertion of Spark
            raise ConfigurationError(f"Spark has stopped, or its JVM has ended: {error}") from error

    @property
    def done(self) -> bool:
        """Whether the job has ended."""
        return self._over.is_set()

    async def ended(self) -> str | None:
        """Wait for the end of the job; return Spark's error in one line, or None if the task returned.

        Cancellation:
            the job continues.
        """
        await self._over.wait()
        return self._error

    async def cancel(self) -> None:
        """Cancel the job, and wait for its end. Spark kills the process of its task some seconds later.

        Cancellation:
            the job may have been cancelled.
        """
        while not self.done:  # repeated, because a job that is being submitted cannot be cancelled yet
            await trio.to_thread.run_sync(self._cancel, abandon_on_cancel=True)
            with trio.move_on_after(AGAIN):
                await self._over.wait()

    def _cancel(self) -> None:
        # If the JVM has ended, so has the job.
        with contextlib.suppress(Exception):
            self._context.cancelJobGroup(self._group)

    def _run(self) -> None:
        error: str | None = None
        try:
            self._context.setJobGroup(self._group, self._description)
            self._context.setLocalProperty(NODE_TASK, "true")
            data = self._context.parallelize([None], 1)
            if self._cores is not None:
                requests = TaskResourceRequests().cpus(self._cores)
                data = data.withResources(ResourceProfileBuilder().require(requests).build)
            data.map(self._task).collect()
        except Exception as raised:  # noqa: BLE001 - Spark's errors have no class in common, and hold objects of Java
            error = _cause(str(raised)) or type(raised).__name__
        with contextlib.suppress(trio.RunFinishedError):
            self._trio.run_sync_soon(self._end, error)

    def _end(self, error: str | None) -> None:
        self._error = error
        self._over.set()

    def _tasks(self) -> int:
        """Return how many tasks of this job run."""
        tracker = self._context.statusTracker()
        jobs = [tracker.getJobInfo(number) for number in tracker.getJobIdsForGroup(self._group)]
        stages = [tracker.getStageInfo(stage) for job in jobs if job is not None for stage in job.stageIds]
        return sum(stage.numActiveTasks for stage in stages if stage is not None)

    async def is_running(self) -> bool:
        """Return whether Spark has started the task.

        Cancellation:
            has no effect on the job.
        """
        return await trio.to_thread.run_sync(self._tasks, abandon_on_cancel=True) > 0


async def room(context: SparkContext, cores: int | None, nodes: int) -> SparkSlots:
    """Return the slots of an application, and their use.

    Args:
        context: the context of the application.
        cores: the cores of a node; None: Spark's default for a task.
        nodes: the number of running nodes of this fleet.

    Cancellation:
        has no effect.
    """

    def read() -> SparkSlots:
        executors = context.statusTracker().getExecutorInfos()
        local = len(executors) == 1  # the driver
        all_cores = context.defaultParallelism
        running = sum(executor.numRunningTasks for executor in executors)
        if local:
            return SparkSlots(slots=all_cores, cores=os.cpu_count() or 1, running=running, nodes=nodes)
        number = len(executors) - 1
        slots = all_cores if cores is None else number * (all_cores // number // cores)
        return SparkSlots(slots=slots, cores=all_cores, running=running, nodes=nodes)

    return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
